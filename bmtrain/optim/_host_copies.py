"""Warning about full optimizer states that exceed host memory."""

from __future__ import annotations

from .._base.deprecate import warn_once
from .._base.host_memory import available_bytes
from .._ranks import context

_SHARE = 0.5  # of the free memory; a file that is written of it may need as much again


def warn_of_large_state(num_bytes: int) -> None:
    """Warns on rank 0, once, that a state of this size on every rank may exceed the memory of its host."""
    current = context.current()
    if current is None or current.topology.rank != 0:
        return
    needed, available = num_bytes * current.local_size, available_bytes()
    if needed > _SHARE * available:
        warn_once(
            "optimizer.large_state",
            f"the whole optimizer state takes {num_bytes / 2**30:.3g} GiB on each of the {current.local_size} ranks of "
            f"a host, {needed / 2**30:.3g} GiB together, and {available / 2**30:.3g} GiB are free here: "
            "bmtrain.distributed.checkpoint.save() writes the shards, which load on any number of ranks",
            stacklevel=4,
            category=UserWarning,
        )
