"""Owners of whole tensors: one rank each, and the messages to and from it.

[Note: Owners]
Each matrix of a step has one owner among the ranks that share it, chosen by work: the largest matrices first, each to
the rank with the least work so far, alike on all ranks. The other ranks send their elements to the owner and receive
theirs of the result. Messages are posted in the order of the matrices on every rank, all gathers before the first
scatter, so that no two ranks wait for each other also where a transport serves its messages in order. While the owner
transforms a matrix others travel. No gather starts in backward: the momentum that travels takes in gradients already
clipped and unscaled, and the ranks, which decide alone what [Note: Stepping in backward] allows, would differ in order.

All ranks that hold a parameter are a team. Ranks with replicas of its shards (ZeRO level 0, `zero_size`) divide the
work too: the owner gathers from the ranks of its own part and sends the result to all. A matrix that is split over
tensor-parallel ranks, or over the ranks that hold its experts, is whole at its owner, which concatenates the slices.
A team's ranks have the order of the world, or of their stage of a pipeline: part by part, in each shard by
shard, and in each of these the slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._C import Work
from .._engine.engine import current_engine
from .._shards.sharding import ShardSpec
from ..global_var import context
from ..parameter import DistributedParameter, whole_shape


def is_here(param: Tensor) -> bool:
    """Whether this rank shares the parameter; in a pipeline another stage may hold it."""
    is_here: bool = getattr(getattr(param, "_spec", None), "is_here", True)
    return is_here


class Team:
    """The ranks that hold a parameter: its shards, replicas of these, and all slices of a tensor-parallel one.

    Attributes:
        size: number of ranks, 1 for a plain parameter.
        rank: number of this rank.
        begin: its first element, among the slices one after the other.
        key: the same for teams of the same ranks.
        comm: communicator of the team.
    """

    size, rank, begin = 1, 0, 0
    key: int | None = None

    def __init__(self, param: Tensor) -> None:
        self._spec: ShardSpec | None = getattr(param, "_spec", None)
        self.shape = whole_shape(param)
        self._num_slices = self._num_shards = 1
        self._dim = 0
        if self._spec is None:
            return
        shards, parts = self._spec.group, self._spec.replicas
        self._num_shards, self.rank = shards.size, shards.rank
        self.size = shards.size * (1 if parts is None else parts.size)
        self.rank += shards.size * (0 if parts is None else parts.rank)
        self.comm = shards.comm if parts is None else context().groups[shards.name].comm
        if isinstance(param, DistributedParameter) and param._tp_split_dim >= 0:
            slices, self._dim = param._slice_group, param._tp_split_dim
            self._num_slices = slices.size
            self.size, self.rank = self.size * slices.size, self.rank * slices.size + slices.rank
            self.comm = context().groups["pp_zero" if shards.name.startswith("pp_") else "zero"].comm
        self.key = id(self.comm)
        self.begin = self.part(self.rank)[0]

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def part(self, rank: int) -> tuple[int, int]:
        """Returns the first element and the number of elements of a rank."""
        if self._spec is None:
            return 0, self.numel
        shard, index = divmod(rank, self._num_slices)
        begin, count = self._spec.part(shard % self._num_shards)
        return index * self._spec.numel + begin, count

    def holds_all(self) -> bool:
        """Whether a rank has all elements."""
        return self._num_shards * self._num_slices == 1

    def are_together(self, rank: int, other: int) -> bool:
        """Whether two ranks are of one part: the ranks that have every element once."""
        num = self._num_shards * self._num_slices
        return rank // num == other // num

    def own(self, slices: Tensor) -> Tensor:
        """Returns this rank's elements of the slices one after the other, as a view."""
        return slices.narrow(0, *self.part(self.rank))

    def others(self, slices: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields the other ranks that hold elements, and these elements."""
        for rank in range(self.size):
            begin, count = self.part(rank)
            if rank != self.rank and count:
                yield rank, slices.narrow(0, begin, count)

    def merged(self, slices: Tensor) -> Tensor:
        """Returns the whole tensor, 1-D, of its slices one after the other."""
        if self._num_slices == 1 or self._dim == 0:
            return slices
        assert self._spec is not None
        return slices.view(self._num_slices, *self._spec.shape).movedim(0, self._dim).reshape(-1)

    def divided(self, whole: Tensor) -> Tensor:
        """Returns the slices one after the other of the whole tensor, 1-D."""
        if self._num_slices == 1 or self._dim == 0:
            return whole
        sizes = list(self.shape)
        sizes[self._dim : self._dim + 1] = [self._num_slices, sizes[self._dim] // self._num_slices]
        return whole.view(sizes).movedim(self._dim, 0).reshape(-1)


def owners_of(work: Sequence[float], teams: Sequence[Team]) -> list[int]:
    """Returns the rank of its team that owns each matrix, see [Note: Owners]."""
    loads: dict[Any, list[float]] = {}
    owners = [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        team = teams[index]
        load = loads.setdefault(team.key, [0] * team.size)
        owners[index] = owner = load.index(min(load))
        load[owner] += work[index]
    return owners


class Transfer:
    """Messages between the ranks that share a parameter and its owner, a rank in the team of the parameter."""

    def __init__(self, param: Tensor, owner: int) -> None:
        self._team = Team(param)
        self._owner = owner
        self._label = getattr(param, "_label", "plain parameter")
        self._device = context().device if hasattr(param, "_spec") else param.device
        self._works: list[Work] = []
        self._tensor = torch.empty(0)  # in flight: whole at the owner, a part elsewhere
        self._sent = self._tensor  # alive until it has arrived

    @property
    def is_owner(self) -> bool:
        return self._team.rank == self._owner

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of this rank's messages."""
        storages = [x.untyped_storage() for x in (self._tensor, self._sent)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def gather(self, local: Tensor, *, is_temporary: bool = False) -> None:
        """Posts the messages to the owner; `whole` waits for them.

        Args:
            local: 1-D, the elements of this rank.
            is_temporary: a result of the same dtype may overwrite ``local``, after the owner has received it.
        """
        team, local = self._team, local.to(self._device)
        if self.is_owner or is_temporary:
            self._tensor = local
        if team.holds_all() or not team.are_together(team.rank, self._owner):
            return
        if self.is_owner:
            self._tensor = local.new_empty(team.numel)
            team.own(self._tensor).copy_(local)
            parts = [x for x in team.others(self._tensor) if team.are_together(x[0], self._owner)]
            self._works = [team.comm.recv(x, r, self._label) for r, x in parts]
        elif local.numel():
            self._sent = local
            self._works = [team.comm.send(local, self._owner, self._label)]

    def whole(self) -> Tensor:
        """Returns the gathered tensor, 1-D, at the owner."""
        self.wait()
        return self._team.merged(self._tensor) if self.is_owner else self._tensor

    def scatter(self, whole: Tensor | None, dtype: torch.dtype) -> None:
        """Posts the messages from the owner, where ``whole`` is 1-D (elsewhere None); `part` waits for them."""
        team = self._team
        if whole is not None:
            self._tensor = self._sent = whole = whole.to(self._device)
            if team.size == 1:
                return
            self._sent = team.divided(whole)
            self._tensor = team.own(self._sent)
            self._works = [team.comm.send(x, r, self._label) for r, x in team.others(self._sent)]
            return
        if not self._tensor.numel():
            self._tensor = torch.empty(team.part(team.rank)[1], dtype=dtype, device=self._device)
        if self._tensor.numel():
            self._works.append(team.comm.recv(self._tensor, self._owner, self._label))

    def part(self) -> Tensor:
        """Returns this rank's elements of the scattered tensor, 1-D."""
        self.wait()
        return self._tensor

    def wait(self) -> None:
        """Waits for the messages."""
        if self._works:
            with current_engine(context()).waiting(self._label, "owner"):
                for work in self._works:
                    work.wait()
            self._works = []
