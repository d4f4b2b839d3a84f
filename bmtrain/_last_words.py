"""What only a process itself can see of its end: the exception that ends it, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import _position
from .errors import CommunicationError

__all__ = ["LastWords"]

# How much later than its cause a rank ends that only lost others: launchers take the first that ends for the cause.
_VICTIM_SECONDS = 1.0


class LastWords:
    """The interpreter's hooks, from `set` to `restore`.

    Args:
        tell: is called with ``"exception"`` or ``"interrupted"`` and what the exception says, after its traceback
            was printed; returns when the process may end.

    Attributes:
        signals: readable when a signal has come.
        raised_at: where the exception that ends this process was raised.
    """

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self.signals, self._waker = socket.socketpair()
        self.signals.setblocking(False)
        self._waker.setblocking(False)
        self.raised_at: str | None = None
        self._tell = tell
        self._pid = os.getpid()
        self._old_hook: Any = None
        self._wakes = False  # whether signals are written to us

    def set(self) -> None:
        """Listen. Signals only from the main thread, and unless an event loop listens to them."""
        self._old_hook, sys.excepthook = sys.excepthook, self._uncaught
        if threading.current_thread() is threading.main_thread():
            old = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
            self._wakes = old == -1
            if not self._wakes:
                signal.set_wakeup_fd(old, warn_on_full_buffer=False)

    def restore(self) -> None:
        """Leave the hooks as they were, unless somebody has set them since."""
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._old_hook
        if self._wakes and threading.current_thread() is threading.main_thread():
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._waker.fileno()):
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def wake(self) -> None:
        """Make `signals` readable."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def interrupted(self) -> bool:
        """Read the signals; whether one of them will raise KeyboardInterrupt."""
        with contextlib.suppress(OSError):
            numbers = self.signals.recv(4096)
            # Another handler than Python's own may want the step to end first.
            return signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return False

    def close(self) -> None:
        """Give the connection back."""
        self.signals.close()
        self._waker.close()

    def after_fork(self) -> None:
        """In a child: its signals must not reach the parent."""
        if self._wakes:
            signal.set_wakeup_fd(-1)
        self.close()

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell the others before this process ends; they are waiting for it.

        The traceback comes first: a launcher ends this process as soon as another one has raised.
        """
        self.raised_at = _position.of_traceback(trace)
        try:
            self._old_hook(kind, error, trace)
            sys.stderr.flush()
        finally:
            if os.getpid() == self._pid:
                interrupted = issubclass(kind, KeyboardInterrupt)
                what = kind.__name__ + _summary(str(error))
                self._tell("interrupted" if interrupted else "exception", what)
                if issubclass(kind, CommunicationError):
                    time.sleep(_VICTIM_SECONDS)


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
