"""A call in a thread of its own, for operations that may block longer than the caller can wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """Runs ``call`` in a daemon thread. An abandoned call stays behind, blocked.

    Example:
        >>> aside = Aside(lambda: 6 * 7, "example")
        >>> aside.wait(5.0), aside.result()
        (True, 42)
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Waits at most ``seconds``; returns whether the call has ended."""
        return self._over.wait(seconds)

    def result(self) -> T:
        """Returns the result of the ended call, or raises its exception."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:  # raised where the result is asked for
            self._error = error
        finally:
            self._over.set()
