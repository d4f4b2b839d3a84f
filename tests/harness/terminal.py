"""Programs in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

__all__ = ["in_terminal", "screen_lines"]

ROOT = Path(__file__).parents[2]


def in_terminal(width: int, command: Sequence[str | Path], directory: Path) -> str:
    """What a program, which has to succeed, writes to a terminal of so many columns; with the terminal's own codes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, env=environment
    )
    os.close(theirs)
    written = b""
    try:
        while data := os.read(ours, 1 << 16):
            written += data
    except OSError:  # nobody writes any more
        pass
    finally:
        os.close(ours)
        assert process.wait(timeout=60) == 0
    return written.decode()


def screen_lines(written: str) -> list[str]:
    """What was to be read in each line of the screen, one after the other."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.replace("\r\n", "\n"))
    return [text for line in plain.split("\n") for text in line.split("\r")]
