"""Parameters and gradients of new Blocks on a drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._base.host_memory import give_back_freed
from .._C import ShardedBuffer
from .._engine.disk_shard import StoredShard
from .._engine.disk_tier import tier_of
from .._engine.engine import current_engine
from .._engine.policy import BlockPolicy
from .._ranks.agree import failing_together

if TYPE_CHECKING:
    from .._ranks.context import Context

__all__ = ["check_tier", "store"]


def check_tier(ctx: Context, policy: BlockPolicy, label: str) -> None:
    """Refuses places of the policy of a new Block that this run does not have; ``label`` names the Block.

    Raises:
        ValueError: naming the place.
    """
    if policy.optimizer == "disk" and current_engine(ctx).drives is None:
        raise ValueError(
            f"{label}: BlockPolicy(optimizer='disk'): expected init_distributed(tier_directories=[...]), got none"
        )
    for name in ("parameters", "gradients"):
        place = getattr(policy, name)
        if place != "device" and ctx.device.type != "cpu":
            raise ValueError(f"{label}: BlockPolicy({name}={place!r}): expected CPU ranks, got {ctx.device}")


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
        return StoredShard(
            tier_of(engine), label, buffer, parameters=policy.parameters == "disk", gradients=keeps
        )
