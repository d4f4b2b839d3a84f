"""The highest memory of a rank while something runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

__all__ = ["GIVE_BACK", "peak_of"]

#: Environment in which freed memory goes back to the system.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak_of(function: Callable[[], object]) -> int:
    """By how many bytes the resident memory of this process rises at most, above what it is before the call.

    Call it once before, on something small, so that code which is loaded at first use is there.
    """
    # What is free at the end of the heap would be used, and kept, by some ranks.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    function()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
