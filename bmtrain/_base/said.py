"""Output in one write each; reports that all ranks share appear once in each output.

Ranks that share an output (a terminal, a launcher's pipe) would all print the same report. The first one to bind a name
in the host's abstract socket namespace, made of the message and of the file behind stderr, prints it; a rank whose
output goes elsewhere prints it there.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import sys
import time
from typing import Any

# Names that this process holds, until it ends.
_held: list[socket.socket] = []

# When a wait is reported first; later reports come after twice the time each.
_FIRST_SECONDS = 10.0


def say(text: str) -> None:
    """Writes lines to stderr at once, so that other processes' lines do not come in between."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
        data = (text.rstrip("\n") + "\n").encode(errors="backslashreplace")
        try:
            descriptor = sys.stderr.fileno()
        except (OSError, ValueError, AttributeError):  # replaced by something that is no file
            sys.stderr.write(data.decode())
            return
        while data:
            data = data[os.write(descriptor, data) :]


def print_whole(*values: Any, **options: Any) -> None:
    """`print`, in one call of ``write``: several lines stay together too.

    Example:
        >>> print_whole("rank", 0, sep=" ")
        rank 0
    """
    file = options.pop("file", None) or sys.stdout
    flush = options.pop("flush", False)
    text = io.StringIO()
    print(*values, file=text, **options)
    if file is not None:
        file.write(text.getvalue())
        if flush:
            file.flush()


def write_lines() -> None:
    """Makes standard output and error write line by line, as torchrun's ``python -u`` writes pieces of lines.

    `print` would write a line and its end apart, and lines of ranks that share an output would mix.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


def say_once(what: list[str], text: str) -> None:
    """As `say`, but only in the first process with this output that calls it with any of ``what``.

    They identify the message (at most about 60 characters), equal in all processes that would print it.
    """
    if not [name for name in what if not _is_first(name)]:  # all of them are bound
        say(text)


def _is_first(what: str) -> bool:
    try:
        output = os.fstat(sys.stderr.fileno())
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except (OSError, ValueError, AttributeError):
        return True
    try:
        name.bind(f"\0bmtrain-{what}-{output.st_dev}-{output.st_ino}"[:107])
    except OSError as error:
        name.close()
        return error.errno != errno.EADDRINUSE
    _held.append(name)
    return True


class Waiting:
    """Reports a long wait: after 10 s, and whenever it has become twice as long. ``what`` is as for `say_once`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._next = _FIRST_SECONDS

    def is_due(self) -> bool:
        """Whether `report` should be called now."""
        return time.monotonic() - self._started >= self._next

    def report(self, whom: str) -> None:
        """Reports the event that this process waits for."""
        seconds, self._next = self._next, 2 * self._next
        say_once([f"{self._what}-{seconds:g}"], f"bmtrain: waiting for {whom} ({seconds:.0f} s so far)")
