"""Memory of a rank, in which shared memory counts once for all ranks.

[Note: Shared memory counted once]
The highest resident set that the kernel knows of counts a page in every process that maps it, and twice in a process
that maps it twice. Buffers that ranks share stay mapped once they are used, so their resident part at the end was
resident at the peak; it is replaced by the process's share of it (Pss in ``/proc/self/smaps``: a page that k mappings
have counts 1/k).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_NAME = "/memfd:bmtrain"


class Shared(NamedTuple):
    """Bytes of this library's shared memory: the resident part in this process, and this rank's share of it."""

    resident: int
    share: int


def shared_bytes() -> Shared:
    """The present shared memory of the ranks."""
    sizes = {"Rss": 0, "Pss": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key = line.partition(":")[0]
        if " " in key:  # the range of addresses that begins a mapping, and its name
            inside = _NAME in line
        elif inside and key in sizes:
            sizes[key] += int(line.split()[1]) * 1024
    return Shared(sizes["Rss"], sizes["Pss"])


def peak_bytes() -> int:
    """The peak of resident memory since the start, or since :func:`forget_peak`."""
    shared = shared_bytes()
    return _status("VmHWM") - shared.resident + shared.share


def resident_bytes() -> int:
    """The present resident memory."""
    shared = shared_bytes()
    return _status("VmRSS") - shared.resident + shared.share


def forget_peak() -> None:
    """Resets the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
