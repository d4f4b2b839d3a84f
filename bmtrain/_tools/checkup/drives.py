"""Check of disk tiers: how transfers are made, and how fast drives are."""

from __future__ import annotations

from ..._engine.drives import make_queue, measure
from ...errors import DiskError
from .findings import Check, Surroundings

_MEASURED = 256 << 20  # bytes


def check_drive(here: Surroundings) -> Check:
    """Transfers work; with directories, also the bandwidth of each."""
    queue = make_queue(here.environ)
    found = f"transfers by {queue.back_end}" + (f" ({queue.reason})" if queue.reason else "")
    if not here.tier_directories:
        return Check("drive", f"{found}; --tier-directory DIR measures one")
    for directory in here.tier_directories:
        try:
            file, write, read = measure(queue, directory, _MEASURED)
        except DiskError as error:
            return Check("drive", str(error), "name another directory")
        way = "around the page cache" if file.is_direct else "through the page cache (no O_DIRECT there)"
        found += f"; {directory}: {write / 1e9:.1f} GB/s written, {read / 1e9:.1f} GB/s read, {way}"
    return Check("drive", found)
