"""Flat buffers of a block's parameters, one per kind."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .._base.tensors import gradient_of
from .._C import Communicator, ShardedBuffer
from .._engine.disk_shard import StoredShard
from .._engine.engine import current_engine
from .._engine.policy import BlockMode, BlockPolicy
from .._ranks.context import Context, Group
from .._ranks.groups import parts_of, ranks_per_host
from .._shards.at_rest import show, zero_consumed
from .._shards.block_ref import BlockRef
from .._shards.sharding import ShardSpec
from ..global_var import context
from ..parameter import DistributedParameter
from .tiers import check_tier, host_lane_of, store


@dataclass(frozen=True)
class BlockStorage:
    """One flat buffer of a block.

    Args:
        kind: ``"<dtype>_<grad|nograd>"``, and ``"_g_<group>"`` for labelled parameters.
        group: the ranks that share it.
        replicas: the ranks that hold the same shard as this one; None if there are no others.
        names: qualified names of its parameters.
        requires_grad: whether its parameters were trainable when the block was built.
        stored: its shards on a drive.
    """

    kind: str
    shards: ShardedBuffer
    group: Group
    replicas: Group | None
    names: tuple[str, ...]
    parameters: tuple[DistributedParameter, ...]
    requires_grad: bool
    stored: StoredShard | None = None

    def flat_parameter(self) -> torch.nn.Parameter:
        """Returns the shard as one parameter, with its gradient if there is one."""
        for name, member in zip(self.names, self.parameters, strict=True):
            member.require_data(name)
            show(member)
            zero_consumed(member)
            show(member, gradient=True)
        param = torch.nn.Parameter(self.shards.shard, requires_grad=self.requires_grad)
        for member in self.parameters:
            if member._sent is not None:
                member._sent.drop()  # the result is another alias of its gradient
        param.grad = self.shards.gradient_shard
        return param

    def info(self) -> dict[str, Any]:
        """Returns the ranks and sizes (in elements) of the buffer."""
        layout, rank = self.shards.layout, self.group.rank
        return {
            "total": layout.total,
            "storage_type": _STORAGE_TYPES.get(self.shards.shard.dtype),
            "requires_grad": self.requires_grad,
            "group": self.parameters[0].group,
            "zero_comm": self.group.comm,
            "world_size": self.group.size,
            "partition_size": layout.partition,
            "begin": rank * layout.partition,
            "end": (rank + 1) * layout.partition,
        }

    def parameter_infos(self) -> Iterator[dict[str, Any]]:
        """Yields the position of each parameter; with ``begin`` and ``end`` if a part of it is on this rank."""
        layout = self.shards.layout
        for index, (name, param) in enumerate(zip(self.names, self.parameters, strict=True)):
            begin, count, _ = layout.local_part(index, self.group.rank)
            info = {
                "parameter": param,
                "name": name,
                "kw_name": self.kind,
                "offset": layout.offset(index),
                "size": layout.numel(index),
                "shape": param._original_shape,
            }
            yield {**info, "begin": begin, "end": begin + count} if count else info


_STORAGE_TYPES = {
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
}


def _kind(param: DistributedParameter) -> str:
    trains = param.__dict__.setdefault("_trains_in_block", param.requires_grad)
    kind = f"{str(param.dtype).removeprefix('torch.')}_{'grad' if trains else 'nograd'}"
    return f"{kind}_g_{param.group}" if param.group else kind


def build_storage(
    named: Iterable[tuple[str, DistributedParameter]],
    mode: BlockMode,
    policy: BlockPolicy,
    label: str,
    owner: BlockRef,
    comm: Communicator | None = None,
) -> list[BlockStorage]:
    """Moves parameters, each named once, into flat buffers; their values and gradients stay. Collective over ``comm``,
    None: all ranks.

    ``label`` names the block in errors and records; ``owner`` is the parameters' reference to it.
    """
    kinds: dict[tuple[str, str | None], list[tuple[str, DistributedParameter]]] = {}
    for name, param in named:
        kinds.setdefault((_kind(param), param._slices), []).append((name, param))
    ctx = context()
    check_tier(ctx, policy, label)
    storages = []
    for (kind, slices), members in kinds.items():
        family = ctx.zero_group(slices, mode is BlockMode.PIPE)
        sharing = policy.num_sharing(family.size, rounds_up=ctx.survival is not None)
        group, replicas = parts_of(ctx, family.name, sharing)
        params = [param for _, param in members]
        dtypes = policy.dtypes_of(params[0].dtype)
        shards = ShardedBuffer(
            label=label,
            parameters=list(params),
            names=[name for name, _ in members],
            shapes=[list(param._original_shape) for param in params],
            gather_comm=group.comm,
            reduce_comm=group.reduce_comm,
            pool=current_engine(ctx).pool,
            dtype=params[0].dtype,
            device=ctx.device,
            replica_comm=None if replicas is None else replicas.reduce_comm,
            gather_dtype=dtypes.gather,
            compute_dtype=dtypes.compute,
            reduce_dtype=dtypes.reduce,
            host_lane=host_lane_of(ctx, policy),
            **_reduction(ctx, family, group, policy),
        )
        trains = params[0]._trains_in_block
        stored = store(ctx, policy, label, shards, trains, comm) if policy.shards_on_disk else None
        with torch.no_grad():
            for index, param in enumerate(params):
                spec = ShardSpec(param._original_shape, group, shards.layout, index, replicas)
                _move(param, shards, spec, index)
        shards.attach()
        for param in params:
            param._block = owner
            if param.grad is not None:
                param.grad = param.__dict__.pop("_moved_grad")
        owner.members += tuple(map(weakref.ref, params))
        owner.add_home(shards.shard)
        for index, param in enumerate(params):
            if param._gradient_hooks is not None:
                shards.set_hooks(index, param._gradient_hooks)
        names = tuple(name for name, _ in members)
        storages.append(BlockStorage(kind, shards, group, replicas, names, tuple(params), trains, stored))
    return storages


def keeping_on_host(storages: Iterable[BlockStorage], function: Any) -> Any:
    """Returns ``function``, the argument of ``Module._apply``, which moves no shard from the host."""
    on_host = [storage for storage in storages if storage.shards.shard.device != context().device]
    kept = [
        t for storage in on_host for p in storage.parameters for t in (p, gradient_of(p)) if t is not None
    ]

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(tensor)
        if result.is_cpu or result.is_meta or not any(tensor is one for one in kept):
            return result
        return tensor if result.dtype is tensor.dtype else result.cpu()

    return apply if kept else function


def _reduction(ctx: Context, family: Group, sharing: Group, policy: BlockPolicy) -> dict[str, Any]:
    """Returns the options of gradient reduction over ``sharing``, in the group ``family``. Collective."""
    ways = ShardedBuffer.ReduceWay
    if policy.reduce == "ring":
        if ctx.virtual_shards:
            raise ValueError(
                "reduce: virtual shards sum the gradients of each rank, expected None or 'direct'"
            )
        return {"reduce_way": ways.RING}
    if policy.reduce == "direct" or sharing.size < family.size or ctx.virtual_shards:
        return {"reduce_way": ways.DIRECT}
    here = ranks_per_host(ctx, family.name)
    if here in (1, family.size):
        return {"reduce_way": ways.DIRECT}
    host, hosts = parts_of(ctx, family.name, here)
    assert hosts is not None
    return {"reduce_way": ways.HOSTS, "host_comm": host.reduce_comm, "hosts_comm": hosts.reduce_comm}


def _move(param: DistributedParameter, shards: ShardedBuffer, spec: ShardSpec, index: int) -> None:
    if not param.is_meta:
        shards.local_view(index).copy_(_respread(param, param.detach(), spec))
    if param.grad is not None:
        param.__dict__["_moved_grad"] = _respread(param, param.grad, spec).to(shards.shard.device, copy=True)
    param._spec = spec


def _respread(param: DistributedParameter, local: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Returns this rank's part under ``spec`` of a tensor distributed under the parameter's current spec."""
    if param._is_full():
        return spec.slice_of(local.reshape(-1))
    old = param._spec
    same_ranks = old.group.size == spec.group.size
    if same_ranks and all(old.part(rank) == spec.part(rank) for rank in range(spec.group.size)):
        return local
    return spec.slice_of(old.gather(local, param._label))
