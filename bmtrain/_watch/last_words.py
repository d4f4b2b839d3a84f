"""Causes of a process's end that only the process itself can see: an uncaught exception, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from .._base import position
from .._C import end_by_signal
from ..errors import CommunicationError

_OUT_OF_MEMORY = (
    'bmtrain: out of memory. Build large models with `with torch.device("meta"):`; init_parameters() or loading then '
    "allocates only shards. `python -m bmtrain plan` predicts the memory"
)

# Delay of the exit of a victim after the cause: launchers report the first rank that exits as the cause. It is longer
# where each rank judges alone: others that come later must find the report printed, which is known until this one ends.
_VICTIM_SECONDS = 1.0
ALONE_SECONDS = 3.0


class LastWords:
    """The interpreter's hooks, from `set` to `restore`.

    Args:
        tell: is called with ``"exception"`` or ``"interrupted"`` and the exception's text, after its traceback
            was printed; returns when the process may end.
        is_victim: whether an exception, given with its text, only repeats a reported failure, so that its traceback can
            be omitted.
        say: prints a traceback, its second argument, once in each output; the first identifies the failure.

    Attributes:
        signals: readable when a signal has come.
        raised_at: the position at which the exception that ends this process was raised.
        delay: seconds from the end of a victim's last words to its exit.
    """

    def __init__(
        self,
        tell: Callable[[str, str], None],
        is_victim: Callable[[BaseException, str], bool],
        say: Callable[[list[str], str], None],
    ) -> None:
        self.signals, self._waker = socket.socketpair()
        self.signals.setblocking(False)
        self._waker.setblocking(False)
        self.raised_at: str | None = None
        self.delay = _VICTIM_SECONDS
        self._tell = tell
        self._is_victim = is_victim
        self._say = say
        self._pid = os.getpid()
        self._old_hook: Any = None
        self._wakes = False  # whether signals are written to us
        self._over = False

    def set(self) -> None:
        """Installs the hooks; for signals only on the main thread, and unless an event loop handles them."""
        self._old_hook, sys.excepthook = sys.excepthook, self._uncaught
        if threading.current_thread() is threading.main_thread():
            old = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
            self._wakes = old == -1
            if not self._wakes:
                signal.set_wakeup_fd(old, warn_on_full_buffer=False)
            elif signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(
                    signal.SIGTERM, self._terminate
                )  # written to us, too: the watchdog ends the process

    def restore(self) -> None:
        """Restores the previous hooks, unless other code has replaced ours since."""
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._old_hook
        if self._wakes and threading.current_thread() is threading.main_thread():
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._waker.fileno()):
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGTERM) == self._terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._over = True
        # Other code may keep our hook, and shall not keep the watch with it.
        self._tell, self._is_victim, self._say = (lambda *_: None), (lambda *_: False), (lambda *_: None)

    def wake(self) -> None:
        """Makes `signals` readable."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def take(self) -> tuple[bool, bool]:
        """Reads the signals; returns whether one will raise KeyboardInterrupt, and whether one ends the process."""
        with contextlib.suppress(OSError):
            numbers = self.signals.recv(4096)
            # Another handler than Python's own may want the step to end first.
            interrupted = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            terminated = signal.getsignal(signal.SIGTERM) == self._terminate
            return signal.SIGINT in numbers and interrupted, signal.SIGTERM in numbers and terminated
        return False, False

    def _terminate(self, number: int, _: Any) -> None:
        """SIGTERM's handler: does nothing as long as the watchdog, which has seen the signal, will end the process."""
        if self._over or os.getpid() != self._pid:
            end_by_signal(number)

    def close(self) -> None:
        """Closes the connection."""
        self.signals.close()
        self._waker.close()

    def after_fork(self) -> None:
        """In a child: its signals must not reach the parent."""
        if self._wakes:
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.close()

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports the exception to the other ranks before this process ends; they are waiting for it.

        The traceback comes first: a launcher ends this process as soon as another one has raised.
        """
        self.raised_at = position.of_traceback(trace)
        ours = os.getpid() == self._pid
        interrupted = issubclass(kind, KeyboardInterrupt)
        what = kind.__name__
        with contextlib.suppress(Exception):  # of the exception's own code
            what += _summary(str(error))
        quiet = ours and (interrupted or self._is_victim(error, what))
        if ours and interrupted:
            sys.unraisablehook = lambda _: None  # what Ctrl-C left half open may fail when Python closes it
        try:
            if not quiet:
                self._print(kind, error, trace, what)
        finally:
            if ours:
                self._tell("interrupted" if interrupted else "exception", what)
                if issubclass(kind, CommunicationError):
                    time.sleep(self.delay)

    def _print(self, kind: Any, error: BaseException, trace: TracebackType | None, what: str) -> None:
        """Prints the traceback in one write, unless another rank has raised the same or at the same place."""
        if self._over or os.getpid() != self._pid or self._old_hook is not sys.__excepthook__:
            self._old_hook(kind, error, trace)
            return
        lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
        text = "".join(traceback.format_exception(kind, error, trace))
        self._say(
            [what, f"{kind} {lines}"], text + _OUT_OF_MEMORY * _is_out_of_memory(error) + _on_shards(trace)
        )


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether one of torch's allocators has raised it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def _on_shards(trace: TracebackType | None) -> str:
    """Says so if the innermost module whose code was running is one of torch that computed with its shards."""
    running = (frame.f_locals.get("self") for frame, _ in reversed(list(traceback.walk_tb(trace))))
    module = next((each for each in running if isinstance(each, torch.nn.Module)), None)
    if module is None or getattr(module, "_handles_shards", False):
        return ""
    parameters = [p for p in module._parameters.values() if p is not None]
    if all(getattr(p, "full_shape", p.shape) == p.shape for p in parameters):
        return ""
    return (
        f"bmtrain: {type(module).__name__} computes with shards of its distributed parameters. The attributes of a "
        "bmtrain.DistributedModule are full parameters: derive the class from it, or convert the module by "
        "bmtrain.BMTrainModelWrapper(module)"
    )


def _summary(text: str) -> str:
    """The first line of an exception's text, and the last one where it holds another process's traceback.

    >>> _summary("a bad sample\\nand more"), _summary("")
    (': a bad sample', '')
    >>> _summary("Caught ValueError in worker 0.\\nOriginal Traceback (most recent call last):\\nValueError: no 7")
    ': Caught ValueError in worker 0. ValueError: no 7'
    """
    lines = text.strip().splitlines()
    shown = [lines[0], lines[-1]] if "Traceback (most recent call last)" in text else lines[:1]
    return f": {' '.join(shown)}" if shown else ""
