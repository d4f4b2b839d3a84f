"""The end of a process whose ranks are connected by NCCL.

[Note: The end of a rank]
On a GPU an operation returns when it is queued. A process that ends then destroys the device context that executes it,
and the other ranks, which need its part, wait until the time-out. So a process that ends in Python waits until all its
operations have completed, and then closes its communicators, which makes NCCL flush pending sends. Waits that never
end (another rank has exited) have the limits below. CPU ranks need none of this: there an operation that has
returned is over. Nothing runs at ``os._exit``, where a program must call `bmtrain.synchronize` itself.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Sequence

from .._C import Communicator
from . import context as _context

#: After an exception: it has been reported to the other ranks, which abort.
_HASTY_SECONDS = 2.0
#: NCCL's own end, which may wait for ranks of the same host to end theirs.
_CLOSING_SECONDS = 5.0
#: Interval of checks for Ctrl-C.
_POLL_SECONDS = 0.1


def register() -> None:
    """Registers `end_in_order` at exit; called after the watchdog was started, which must live until the end."""
    atexit.unregister(end_in_order)
    atexit.register(end_in_order)


def end_in_order() -> None:
    """Waits for the operations of this process and closes its communicators, once. See [Note: The end of a rank]."""
    context = _context.current()
    if context is None or context.backend != "nccl" or _context.forked_from is not None:
        return
    comms = context.communicators()
    failed = getattr(sys, "last_value", None) is not None or any(comm.failure() for comm in comms)
    with contextlib.suppress(
        KeyboardInterrupt
    ):  # the caller that waits for this process shall not wait longer
        _settle(comms, _HASTY_SECONDS if failed else context.timeout)
    for comm in comms:
        comm.close()
    _settle(comms, _CLOSING_SECONDS)


def _settle(comms: Sequence[Communicator], seconds: float) -> None:
    """Waits until all operations of ``comms`` have completed, or the time is over."""
    deadline = time.monotonic() + seconds
    for comm in comms:
        while not comm.settle(_POLL_SECONDS) and time.monotonic() < deadline:
            pass
