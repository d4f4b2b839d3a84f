"""Sharding of parameters and optimizer state over the present ranks, from shards and copies of the ranks before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.tensors import TORCH_DATA, data_of
from .._C import Communicator
from .._engine.engine import current_engine
from .._ranks.context import Context
from .._ranks.groups import host_comm
from ..optim._sharded import ShardedOptimizer
from ..parameter import DistributedParameter
from .copies import Held, Ward, all_parameters, arrays_of, is_copied, put_state
from .ring import Ring

_LABEL = "sharding again"
#: Size of the arrays whose parts are sent together.
_BYTES = 16 << 20


class Before(NamedTuple):
    """Distribution over the ranks before.

    Attributes:
        held: by former rank; empty in a process that was none.
        owners: for each former rank, the present rank that holds its shards.
        parts: the bounds of the former shards of each parameter.
        has_gradients: whether the gradients are complete.
        steps: number of steps of each parameter of each optimizer; -1: no state.
        lost: former ranks.
    """

    held: Mapping[int, Held]
    owners: Sequence[int]
    parts: dict[DistributedParameter, list[tuple[int, int]]]
    has_gradients: bool
    steps: Sequence[int]
    lost: Collection[int] = ()

    def part(self, param: DistributedParameter, former: int) -> tuple[int, int]:
        """Returns the bounds of what a former rank sends: its shard, or nothing if another one sends the same."""
        parts = self.parts[param]
        holders = range(former % len(parts), len(self.owners), len(parts))
        first = next((rank for rank in holders if rank not in self.lost), holders[0])
        return parts[holders[0]] if former == first else (0, 0)


class _Array(NamedTuple):
    """An array of all ranks: of a parameter, with the function that returns the part of a former rank."""

    param: DistributedParameter
    dtype: torch.dtype
    of: Callable[[Held], Tensor]


def own_shards(
    optimizers: Sequence[ShardedOptimizer],
    params: Sequence[DistributedParameter],
    gradients: dict[DistributedParameter, Tensor] | None = None,
) -> Held:
    """Returns what this rank has of its own, in host memory; the Blocks may get new buffers."""
    values = {p: data_of(p).to("cpu", copy=True) for p in params}
    states = [
        {
            p: {name: x.cpu() if isinstance(x, Tensor) else x for name, x in entry.items()}
            for p, entry in o.state.items()
        }
        for o in optimizers
    ]
    return Held(values, states, gradients)


def parts_of(params: Sequence[DistributedParameter]) -> dict[DistributedParameter, list[tuple[int, int]]]:
    """Returns the bounds of the shards of each parameter, by rank; replicas of these follow in the same order."""
    return {p: [p._spec.part(rank) for rank in range(p._spec.group.size)] for p in params}


def steps_of(optimizers: Sequence[ShardedOptimizer]) -> list[int]:
    """Returns for each parameter of each optimizer the number of its steps; -1 where no update has begun its state."""
    steps = []
    for number, p, _ in arrays_of(optimizers):
        state, journal = optimizers[number].state.get(p), optimizers[number]._journal
        is_fresh = not state or (journal is not None and p in journal.fresh)
        steps.append(-1 if is_fresh else state["step"])
    return steps


@torch.no_grad()
def shard_again(
    ctx: Context, optimizers: Sequence[ShardedOptimizer], before: Before, ring: Ring, copies_ward: bool
) -> Ward | None:
    """Gives each rank its shards and, with ``copies_ward``, a copy of the shards of its ward. Collective.

    Returns:
        The copy; None without it, and on a single rank.
    """
    comm, rank = host_comm(ctx), ctx.world.rank
    params = all_parameters(ctx, optimizers)

    # Whole values, until the last Block has its new buffers: a Block's are made of all its parameters at once.
    values = [_Array(p, p.dtype, partial(_value, p)) for p in params]
    wholes = dict(zip(params, _wholes(comm, before, values), strict=True))
    present = [ctx.world, *(parts.sharing for parts in ctx.parts.values())]
    if any(all(p._spec.group is not group for group in present) for p in params):
        _rebuild(ctx, params, wholes)

    ward = None
    if ctx.world.size > 1 and copies_ward:
        of = ring.ward_of(rank)
        ward = Ward(of, {p: _cut(p, wholes[p], of).clone() for p in params if is_copied(p)}, optimizers)
    wholes.clear()
    _share_state(comm, optimizers, before, ward)
    if before.has_gradients:
        own = next(iter(before.held.values())).gradients or {}
        gradients = [_Array(p, own[p].dtype, partial(_gradient, p)) for p in params if p in own]
        for (p, *_), whole in zip(gradients, _wholes(comm, before, gradients), strict=True):
            p.grad = _cut(p, whole, rank).to(p.device, copy=True)
    return ward


def _share_state(
    comm: Communicator, optimizers: Sequence[ShardedOptimizer], before: Before, ward: Ward | None
) -> None:
    """Gives this rank's optimizers, and the copy's, the state of their shards. Collective."""
    told = zip(arrays_of(optimizers), before.steps, strict=True)
    found = [(number, p, names, step) for (number, p, names), step in told if step >= 0]
    users = [*optimizers, *(() if ward is None else ward.optimizers)]
    states: list[dict[Tensor, Any]] = [{} for _ in users]
    # Each rank whose shards are here, its parameters, and what its optimizers get.
    own = {p: p for _, p, *_ in found}
    holders: list[tuple[int, Any, Any]] = [(comm.rank, own, states[: len(optimizers)])]
    if ward is not None:
        holders.append((ward.rank, ward.params, states[len(optimizers) :]))
    wanted = [(number, p, name) for number, p, names, _ in found for name in names]
    wholes = _wholes(comm, before, [_Array(of[1], torch.float32, partial(_state, *of)) for of in wanted])
    for number, p, names, step in found:
        kept = [(rank, params[p], entries[number]) for rank, params, entries in holders if p in params]
        for _, param, entry in kept:
            entry[param] = {"step": step}
        for name in names:
            whole = next(wholes)
            for rank, param, entry in kept:
                entry[param][name] = _cut(p, whole, rank).clone()
    for optimizer, entries in zip(users, states, strict=True):
        put_state(optimizer, entries)


def _cut(p: DistributedParameter, whole: Tensor, rank: int) -> Tensor:
    """Returns the shard of a rank, in the sharding that the parameter has now."""
    return whole.narrow(0, *p._spec.part(rank % p._spec.group.size))


def _value(p: DistributedParameter, held: Held) -> Tensor:
    return held.values[p]


def _state(number: int, p: DistributedParameter, name: str, held: Held) -> Any:
    return held.states[number][p][name]


def _gradient(p: DistributedParameter, held: Held) -> Tensor:
    return (held.gradients or {})[p]


def _wholes(comm: Communicator, before: Before, arrays: Sequence[_Array]) -> Iterator[Tensor]:
    """Yields whole arrays; a former rank's parts of several are one message, as each takes a while. Collective."""
    buckets: list[list[_Array]] = []
    room = 0
    for array in arrays:
        size = array.param._original_shape.numel() * array.dtype.itemsize
        if size > room or not buckets:
            buckets.append([])
            room = max(_BYTES, size)
        buckets[-1].append(array)
        room -= size
    for bucket in buckets:
        wholes = [
            torch.empty(array.param._original_shape.numel(), dtype=array.dtype, device="cpu")
            for array in bucket
        ]
        for former, owner in enumerate(before.owners):
            parts = [
                whole.narrow(0, *before.part(array.param, former)).view(torch.uint8)
                for array, whole in zip(bucket, wholes, strict=True)
            ]
            message = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device="cpu")
            pieces = message.split([len(part) for part in parts])
            if owner == comm.rank:
                for array, piece in zip(bucket, pieces, strict=True):
                    if len(piece):
                        piece.copy_(array.of(before.held[former]).reshape(-1).view(torch.uint8))
            if len(message):
                comm.broadcast(message, owner, _LABEL).wait()
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece)
        yield from wholes


def _rebuild(
    ctx: Context, params: Sequence[DistributedParameter], wholes: dict[DistributedParameter, Tensor]
) -> None:
    """Gives parameters and Blocks the shards of the present ranks."""
    blocks = sorted(current_engine(ctx).blocks, key=lambda state: state.number)
    devices = {p: data_of(p).device for p in params}
    for p in params:
        p.grad = None
        TORCH_DATA.__set__(p, wholes[p].view(p._original_shape))
        p._is_whole = True
    for state in blocks:
        block = None if state.reference is None else state.reference()
        if block is not None:
            members: Sequence[Any] = [p for buffer in state.buffers for p in buffer.parameters]
            for member in members:  # of one Block at a time, as the device may have no room for all
                TORCH_DATA.__set__(member, data_of(member).to(devices[member]))
            block._build()
    for p in params:
        p._is_whole = False
        if p._block is None:
            del p.__dict__["_spec"]
            TORCH_DATA.__set__(p, p._spec.slice_of(wholes[p]).to(devices[p], copy=True))
        p._unversioned_writes += 1
