"""Sharding of parameters and optimizer state over the present ranks, from shards and copies of the ranks before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.unseen import TORCH_DATA, data_of
from .._engine.engine import current_engine
from .._ranks.context import Context
from ..optim._sharded import ShardedOptimizer
from ..parameter import DistributedParameter
from .copies import Ward, all_parameters, arrays_of, put_state
from .ring import Ring

_LABEL = "sharding again"


class Before(NamedTuple):
    """Distribution over the ranks before.

    Attributes:
        rank: the former number of this rank.
        owners: for each former rank, the present rank that has its shards or their copy.
        ward: the copy on this rank; None if there is none.
        parts: the bounds of the former shards of each parameter.
        gradients: of this rank, and of the ward, where they are complete.
        steps: number of steps of each parameter of each optimizer; -1: no state.
    """

    rank: int
    owners: Sequence[int]
    ward: Ward | None
    parts: dict[DistributedParameter, list[tuple[int, int]]]
    gradients: tuple[dict[DistributedParameter, Tensor], dict[DistributedParameter, Tensor]] | None
    steps: Sequence[int]


def parts_of(params: Sequence[DistributedParameter]) -> dict[DistributedParameter, list[tuple[int, int]]]:
    """Returns the bounds of the shards of each parameter, by rank."""
    return {p: [p._spec.part(rank) for rank in range(p._spec.group.size)] for p in params}


def steps_of(optimizers: Sequence[ShardedOptimizer], ward: Ward | None) -> list[int]:
    """Returns for each parameter of each optimizer the number of its steps, as far as this rank knows."""
    steps = []
    for number, p, _ in arrays_of(optimizers):
        known = [optimizers[number].state.get(p)]
        if ward is not None and p in ward.params:
            known.append(ward.optimizers[number].state.get(ward.params[p]))
        steps.append(max((state["step"] for state in known if state), default=-1))
    return steps


@torch.no_grad()
def shard_again(
    ctx: Context, optimizers: Sequence[ShardedOptimizer], before: Before, ring: Ring
) -> Ward | None:
    """Gives each rank its shards, and a copy of the shards of its ward. Collective.

    Returns:
        The copy; None on a single rank.
    """
    comm, size = ctx.world.comm, ctx.world.size
    rank = ctx.world.rank
    ward_rank = ring.ward_of(rank)
    params = all_parameters(ctx, optimizers)

    def full(p: DistributedParameter, dtype: torch.dtype, own: Any, copy: Any) -> Tensor:
        """Returns a whole array; ``own`` and ``copy`` return the parts of this rank and of its former ward."""
        whole = torch.empty(p._original_shape.numel(), dtype=dtype)
        for former, (begin, count) in enumerate(before.parts[p]):
            if count:
                part = whole.narrow(0, begin, count)
                if before.owners[former] == rank:
                    part.copy_((own if former == before.rank else copy)().reshape(-1))
                comm.broadcast(part, before.owners[former], _LABEL).wait()
        return whole

    def copied(p: DistributedParameter) -> Any:
        assert before.ward is not None
        return before.ward.params[p]

    # Whole values, until the last Block has its new buffers: a Block's are made of all its parameters at once.
    wholes = {p: full(p, p.dtype, lambda p=p: data_of(p), lambda p=p: copied(p).detach()) for p in params}
    if any(p._spec.group is not ctx.world for p in params):
        _rebuild(ctx, params, wholes)

    def cut(p: DistributedParameter, whole: Tensor, of: int) -> Tensor:
        begin, count = p._spec.part(of)
        return whole.narrow(0, begin, count)

    ward = None
    if size > 1:
        ward = Ward(ward_rank, {p: cut(p, wholes[p], ward_rank).clone() for p in params}, optimizers)
    wholes.clear()
    entries: list[dict[Tensor, Any]] = [{} for _ in optimizers]
    copies: list[dict[Tensor, Any]] = [{} for _ in optimizers]
    for (number, p, names), step in zip(arrays_of(optimizers), before.steps, strict=True):
        if step < 0:
            continue
        entry: dict[str, Any] = {"step": step}
        copy: dict[str, Any] = {"step": step}
        for name in names:
            own_array = partial(_array, optimizers[number].state, p, name)
            whole = full(p, torch.float32, own_array, partial(_array_of_copy, before.ward, number, p, name))
            entry[name], copy[name] = cut(p, whole, rank).clone(), cut(p, whole, ward_rank).clone()
        if p.numel():
            entries[number][p] = entry
        if ward is not None and ward.params[p].numel():
            copies[number][ward.params[p]] = copy
    for number, optimizer in enumerate(optimizers):
        put_state(optimizer, entries[number])
        if ward is not None:
            put_state(ward.optimizers[number], copies[number])
    if before.gradients is not None:
        own, others = before.gradients
        for p in [p for p in params if p in own]:
            whole = full(p, own[p].dtype, lambda p=p: own[p], lambda p=p: others[p])
            p.grad = cut(p, whole, rank).clone()
            if ward is not None:
                ward.params[p].grad = cut(p, whole, ward_rank).clone()
    return ward


def _array(state: dict[Any, Any], p: Any, name: str) -> Any:
    return state[p][name]


def _array_of_copy(ward: Any, number: int, p: DistributedParameter, name: str) -> Any:
    return ward.optimizers[number].state[ward.params[p]][name]


def _rebuild(
    ctx: Context, params: Sequence[DistributedParameter], wholes: dict[DistributedParameter, Tensor]
) -> None:
    """Gives parameters and Blocks the shards of the present ranks."""
    blocks = sorted(current_engine(ctx).blocks, key=lambda state: state.number)
    for p in params:
        p.grad = None
        TORCH_DATA.__set__(p, wholes[p].view(p._original_shape))
        p._is_whole = True
    for state in blocks:
        block = None if state.reference is None else state.reference()
        if block is not None:
            block._build()
    for p in params:
        p._is_whole = False
        if p._block is None:
            del p.__dict__["_spec"]
            TORCH_DATA.__set__(p, p._spec.slice_of(wholes[p]).clone())
        p._unversioned_writes += 1
