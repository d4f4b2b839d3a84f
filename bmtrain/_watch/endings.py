"""The exit code or signal of a process of this host, which the kernel keeps until its parent has collected it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_EXITING = 0x4  # PF_EXITING of the flags in /proc/PID/stat
_PAUSE_SECONDS = 0.05


def own_process() -> str:
    """An identifier of this process, unique among all hosts; empty where there is no /proc."""
    return _name(os.getpid())


def ending(process: str, patience: float = 0.0) -> str:
    """The exit code or signal of an `own_process`, for example ``exit code 3`` or ``SIGKILL``; empty if unknown.

    Waits up to ``patience`` seconds for the end of one that still runs.
    """
    end = time.monotonic() + patience
    while True:
        fields = _fields(process)
        if not fields:
            return ""
        if fields[0] in "ZX" or int(fields[6]) & _EXITING:
            return _words(int(fields[-1]))
        if time.monotonic() >= end:
            return ""
        time.sleep(_PAUSE_SECONDS)


def is_running(process: str) -> bool:
    """Whether a process of this host has not begun to end."""
    fields = _fields(process)
    return bool(fields) and fields[0] not in "ZX" and not int(fields[6]) & _EXITING


def _fields(process: str) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if the process has exited or runs on another host."""
    boot, _, rest = process.partition(" ")
    number = rest.partition(" ")[0]
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []
    return fields if boot and _name(int(number)) == process else []


def _name(process: int) -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        started = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[19]
    except OSError:
        return ""
    return f"{boot} {process} {started}"


def _words(status: int) -> str:
    number = status & 0x7F
    if number == 0:
        return f"exit code {status >> 8 & 0xFF}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
