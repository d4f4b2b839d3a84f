"""Check of disk tiers: how transfers are made, and how fast a drive is."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..._C import DiskFile, DiskQueue
from ...errors import DiskError
from .findings import Check, Surroundings

_BUFFERS, _BUFFER = 6, 2 << 20
_MOVED = 128  # buffers that one way of the measurement moves


def check_drive(here: Surroundings) -> Check:
    """Transfers work; with a directory, also its bandwidth."""
    queue = DiskQueue(here.environ.get("BMTRAIN_DISK_IO", "auto"), _BUFFERS, _BUFFER)
    found = f"transfers by {queue.back_end}" + (f" ({queue.reason})" if queue.reason else "")
    if here.tier_directory is None:
        return Check("drive", f"{found}; --tier-directory DIR measures one")
    try:
        file = DiskFile(here.tier_directory)
        file.reserve(_MOVED * _BUFFER)
        write, read = _pass(queue, file, queue.write), _pass(queue, file, queue.read)
    except DiskError as error:
        return Check("drive", str(error), "name another directory")
    around = "around" if file.is_direct else "through"
    return Check(
        "drive",
        f"{found} {around} the page cache; {here.tier_directory}: {write:.1f} GB/s written, {read:.1f} GB/s read",
    )


def _pass(queue: DiskQueue, file: DiskFile, move: Callable[[int, DiskFile, int, int], None]) -> float:
    start = time.perf_counter()
    for number in range(_MOVED):
        queue.wait(number % _BUFFERS)
        move(number % _BUFFERS, file, number * _BUFFER, _BUFFER)
    for number in range(_BUFFERS):
        queue.wait(number)
    return _MOVED * _BUFFER / (time.perf_counter() - start) / 1e9
