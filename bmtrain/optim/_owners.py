"""Owners of whole tensors: one rank each, and the messages to and from it.

[Note: Owners]
Each matrix of a step has one owner among the ranks that share it, chosen by work: the largest matrices first, each to
the rank with the least work so far, alike on all ranks. The other ranks send their elements to the owner and receive
theirs of the result. Messages are posted in the order of the matrices on every rank, all gathers before the first
scatter, so that no two ranks wait for each other also where a transport serves its messages in order. While the owner
transforms a matrix others travel. Ranks that hold replicas (ZeRO level 0, `zero_size`) each compute the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._C import Work
from .._shards.sharding import ShardSpec

__all__ = ["Transfer", "is_here", "owners_of", "spec_of"]


def spec_of(param: Any) -> ShardSpec | None:
    """Returns the distribution of a parameter; None for a plain one."""
    return getattr(param, "_spec", None)


def is_here(param: Tensor) -> bool:
    """Whether this rank shares the parameter; in a pipeline another stage may hold it."""
    is_here: bool = getattr(spec_of(param), "is_here", True)
    return is_here


def owners_of(work: Sequence[float], specs: Sequence[ShardSpec | None]) -> list[int]:
    """Returns the group rank that owns each matrix, see [Note: Owners].

    Args:
        work: of each matrix.
        specs: distribution of each; None for a whole one.
    """
    loads: dict[int, list[float]] = {}
    owners = [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        spec = specs[index]
        if spec is None:
            continue
        load = loads.setdefault(id(spec.group), [0] * spec.group.size)
        owners[index] = owner = load.index(min(load))
        load[owner] += work[index]
    return owners


class Transfer:
    """Messages between the ranks that share a parameter and its owner.

    Args:
        param: the parameter.
        owner: group rank of the owner.
    """

    def __init__(self, param: Tensor, owner: int) -> None:
        self._spec = spec_of(param)
        self._owner = owner
        self._label = getattr(param, "_label", "plain parameter")
        self._device = param.device
        self._works: list[Work] = []
        self._tensor: Tensor  # in flight: whole at the owner, a part elsewhere
        self._sent: Tensor | None = None  # alive until it has arrived

    @property
    def is_alone(self) -> bool:
        """Whether this rank has all elements."""
        return self._spec is None or self._spec.group.size == 1

    @property
    def is_owner(self) -> bool:
        return self._spec is None or self._spec.group.rank == self._owner

    def gather(self, local: Tensor) -> None:
        """Posts the messages to the owner; `whole` waits for them.

        Args:
            local: 1-D, the elements of this rank.
        """
        self._tensor = local
        if self._spec is None or self.is_alone:
            return
        comm = self._spec.group.comm
        if self.is_owner:
            self._tensor = local.new_empty(self._spec.numel)
            self._spec.slice_of(self._tensor).copy_(local)
            self._works = [comm.recv(x, r, self._label) for r, x in self._parts_of_others(self._tensor)]
        elif local.numel():
            self._sent = local
            self._works = [comm.send(local, self._owner, self._label)]

    def whole(self) -> Tensor:
        """Returns the gathered tensor, 1-D, at the owner."""
        self.wait()
        return self._tensor

    def scatter(self, whole: Tensor | None, dtype: torch.dtype) -> None:
        """Posts the messages from the owner; `part` waits for them.

        Args:
            whole: 1-D at the owner, None elsewhere.
            dtype: of the tensor.
        """
        if whole is not None:
            if self._spec is None or self.is_alone:
                self._tensor = whole
                return
            self._sent = whole
            self._tensor = self._spec.slice_of(whole)
            comm = self._spec.group.comm
            self._works = [comm.send(x, r, self._label) for r, x in self._parts_of_others(whole)]
            return
        assert self._spec is not None
        self._tensor = torch.empty(self._spec.local_part[1], dtype=dtype, device=self._device)
        if self._tensor.numel():
            self._works.append(self._spec.group.comm.recv(self._tensor, self._owner, self._label))

    def part(self) -> Tensor:
        """Returns this rank's elements of the scattered tensor, 1-D."""
        self.wait()
        return self._tensor

    def wait(self) -> None:
        """Waits for the messages."""
        for work in self._works:
            work.wait()
        self._works = []

    def _parts_of_others(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields the other ranks that hold elements, and their elements."""
        assert self._spec is not None
        group = self._spec.group
        for r in range(group.size):
            begin, count = self._spec.part(r)
            if r != group.rank and count:
                yield r, flat.narrow(0, begin, count)
