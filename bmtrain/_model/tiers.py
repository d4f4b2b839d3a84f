"""Parameters and gradients of new Blocks in other memory than the device's."""

from __future__ import annotations

from .._base.host_memory import give_back_freed
from .._C import Communicator, HostLane, ShardedBuffer
from .._engine.disk_shard import StoredShard
from .._engine.disk_tier import tier_of
from .._engine.engine import current_engine
from .._engine.policy import BlockPolicy
from .._ranks.agree import failing_together
from .._ranks.context import Context


def check_tier(ctx: Context, policy: BlockPolicy, label: str) -> None:
    """Refuses places of the policy of a new Block that this run does not have; ``label`` names the Block.

    Raises:
        ValueError: naming the place.
    """
    if policy.optimizer == "disk" and current_engine(ctx).drives is None:
        raise ValueError(
            f"{label}: BlockPolicy(optimizer='disk'): expected init_distributed(tier_directories=[...]), got none"
        )
    if ctx.device.type == "cpu":
        return
    elsewhere = {"gradients": policy.gradients, "optimizer": policy.optimizer or "device"}
    for name, place in elsewhere.items() if policy.parameters == "device" else ():
        if place != "device":
            raise ValueError(
                f"{label}: BlockPolicy({name}={place!r}) on a GPU: expected parameters='host' or 'disk' as well, got "
                "'device': gradients, and state on a drive, are with their parameters"
            )
    if policy.parameters == "host" and policy.level < 2:
        raise ValueError(
            f"{label}: BlockPolicy(parameters='host'): expected level 2 or 3, got {policy.level}, which keeps all "
            "parameters on the device"
        )


def host_lane_of(ctx: Context, policy: BlockPolicy) -> HostLane | None:
    """Returns what copies shards between host and device, or None where they are on the device."""
    if policy.parameters == "device" or ctx.device.type == "cpu":
        return None
    engine = current_engine(ctx)
    if engine.host_lane is None:
        engine.host_lane = HostLane(ctx.device)
    return engine.host_lane


def store(
    ctx: Context,
    policy: BlockPolicy,
    label: str,
    buffer: ShardedBuffer,
    trains: bool,
    comm: Communicator | None = None,
) -> StoredShard | None:
    """Moves the shards of a new buffer to a drive, as its policy says. Collective over ``comm``, None: all ranks.

    Raises:
        DiskError: a drive has no room.
    """
    keeps = policy.gradients == "disk" and trains
    if not (policy.parameters == "disk" or keeps) or not buffer.layout.partition:
        return None
    engine = current_engine(ctx)
    give_back_freed()  # of the blocks before
    with failing_together(f"reserving space for {label}", comm):
        return StoredShard(
            tier_of(engine), label, buffer, parameters=policy.parameters == "disk", gradients=keeps
        )
