"""Free memory of the host, and the resident memory of this process."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path


def available_bytes() -> int:
    """Bytes that processes could still use: of the machine, or of the control group that limits this one."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    with suppress(OSError, ValueError):  # "max" means no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, limit - used)
    return max(available, 0)


def give_back_freed() -> None:
    """Gives memory that was freed back to the system, where the C library keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def resident_bytes() -> tuple[int, int]:
    """Resident memory of this process now and at its peak."""
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize(), peak
    except OSError:
        return peak, peak
