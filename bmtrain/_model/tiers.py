"""Parameters and gradients of new Blocks on a drive."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._base.host_memory import give_back_freed
from .._C import ShardedBuffer
from .._engine.disk_shard import StoredShard
from .._engine.disk_tier import DiskTier
from .._engine.engine import current_engine
from .._engine.policy import BlockMode, BlockPolicy
from .._ranks.agree import failing_together

if TYPE_CHECKING:
    from .._ranks.context import Context

__all__ = ["check_tier", "store"]


def check_tier(
    ctx: Context, policy: BlockPolicy, mode: BlockMode, label: str, slices: Sequence[str | None]
) -> None:
    """Refuses places of a policy that this run does not have.

    Args:
        ctx: of this process.
        policy: of a new Block.
        mode: of the Block.
        label: of the Block, for messages.
        slices: the families of ranks that have a slice each, of its parameters.

    Raises:
        ValueError: naming the place.
    """
    if policy.optimizer == "disk" and current_engine(ctx).drives is None:
        raise ValueError(
            f"{label}: BlockPolicy(optimizer='disk'): expected init_distributed(tier_directories=[...]), got none"
        )
    places = [name for name in ("parameters", "gradients") if getattr(policy, name) not in ("device", "disk")]
    if places and ctx.device.type != "cpu":
        raise ValueError(f"{label}: BlockPolicy({places[0]}='host'): expected CPU ranks, got {ctx.device}")
    if not policy.shards_on_disk:
        return
    place = "parameters" if policy.parameters == "disk" else "gradients"
    found = {
        f"parameters on {ctx.device}": ctx.device.type != "cpu",
        "a Block of a pipeline": mode is BlockMode.PIPE,
        f"parameters that are {next(filter(None, slices), None)}-parallel": any(slices),
        "virtual shards": bool(ctx.virtual_shards),
    }
    for what, is_so in found.items():
        if is_so:
            raise ValueError(
                f"{label}: BlockPolicy({place}='disk'): {what}: not supported; expected whole parameters on CPU ranks "
                "without pipelines and virtual shards"
            )


def store(
    ctx: Context, policy: BlockPolicy, label: str, buffer: ShardedBuffer, trains: bool
) -> StoredShard | None:
    """Moves the shards of a new buffer to a drive, as its policy says. Collective.

    Raises:
        DiskError: a drive has no room.
    """
    keeps = policy.gradients == "disk" and trains
    if not (policy.parameters == "disk" or keeps) or not buffer.layout.partition:
        return None
    engine = current_engine(ctx)
    give_back_freed()  # of the blocks before
    with failing_together(f"reserving space for {label}"):
        if engine.tier is None:
            assert engine.drives is not None  # `check_tier`
            poison = bool(int(os.environ.get("BMTRAIN_POISON_BUFFERS", "0")))
            engine.tier = DiskTier(engine.drives, poison)
        return StoredShard(
            engine.tier, label, buffer, parameters=policy.parameters == "disk", gradients=keeps
        )
