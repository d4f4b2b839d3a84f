"""Processes that a command waits for, and that end with it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

_SECONDS = 10.0
_started: set[subprocess.Popen[bytes]] = set()


def run_to_end(command: Sequence[str], **options: Any) -> int:
    """Runs a program as `subprocess.Popen` with ``options``, and returns its exit status."""
    with subprocess.Popen(command, **options) as process:
        _started.add(process)
        try:
            return process.wait()
        except KeyboardInterrupt:  # Ctrl-C reaches it too, and end_started has asked it
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
            raise
        finally:
            _started.discard(process)


def end_started() -> None:
    """Asks the programs that threads wait for in `run_to_end` to end."""
    for process in list(_started):
        process.terminate()
