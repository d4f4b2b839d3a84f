"""The forced end of a process that does not react to a verdict against it. See csrc/comm/guard/sentinel.h."""

from __future__ import annotations

import faulthandler
import signal
import sys
import tempfile
from typing import Any

from .._C import Sentinel

# Time for a rank at fault to react to the verdict.
_GRACE_SECONDS = 10.0

# Signal and file of faulthandler's stacks: one pair per process, as a handler cannot distinguish callers.
_stacks: list[Any] = []


def _register() -> tuple[int, int]:
    """The signal that makes faulthandler write all stacks, and the file that it writes to."""
    if not _stacks:
        number = int(signal.SIGRTMAX) - 5
        try:
            file: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as the process
            descriptor = file.fileno()
        except OSError:
            file, descriptor = 2, 2
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        _stacks.extend((number, descriptor, file))
    return _stacks[0], _stacks[1]


class LastResort(Sentinel):
    """Ends this process if it does not react to a verdict against it, or if its watchdog is silent for too long."""

    def __init__(self, who: str, timeout: float, silence: float) -> None:
        self._grace = min(_GRACE_SECONDS, timeout)
        super().__init__(f"bmtrain: {who}", *_register(), silence + self._grace)

    def accuse(self, verdict: str) -> None:
        """Starts the countdown: this rank is at fault."""
        sys.stderr.flush()
        self.arm(self._grace, f"{verdict}; for {self._grace:g} s since then it has not noticed")
