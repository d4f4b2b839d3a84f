"""State on the device of the parameters; whole matrices are transformed by one rank each, their owner.

[Note: Owners]
Each matrix of a step has one owner among the ranks that share it, chosen by work: the largest matrices first, each to
the rank with the least work so far, alike on all ranks. The other ranks send their elements to the owner and receive
theirs of the result. Messages are posted in the order of the matrices on every rank, all gathers before the first
scatter, so that no two ranks wait for each other also where a transport serves its messages in order. While the owner
transforms a matrix others travel. Ranks that hold replicas (ZeRO level 0, `zero_size`) each compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._C import Work
from ..._shards.sharding import ShardSpec
from .._updates import Update
from ..formulas import Part
from .device import OnDevice
from .place import States

__all__ = ["OnOwners", "owners_of"]


class OnOwners(OnDevice):
    """The device of the parameters, and for formulas of whole matrices the ranks that own them."""

    def apply(self, parts: list[Part], states: States, *, is_early: bool) -> None:
        whole = [(part, u) for part in parts if part.formula.is_whole for u in part.updates]
        matrices = [_Matrix(part, u) for part, u in whole if _is_here(u.param)]
        owners = owners_of([matrix.work for matrix in matrices], [matrix.spec for matrix in matrices])
        for matrix, owner in zip(matrices, owners, strict=True):
            matrix.gather(owner)
        super().apply([part for part in parts if not part.formula.is_whole], states, is_early=is_early)
        for matrix in matrices:
            matrix.transform()
        for matrix in matrices:
            matrix.finish()


def owners_of(work: Sequence[int], specs: Sequence[ShardSpec | None]) -> list[int]:
    """Returns the group rank that owns each matrix, see [Note: Owners].

    Args:
        work: of each matrix.
        specs: distribution of each; None for a whole one.
    """
    loads: dict[int, list[int]] = {}
    owners = [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        spec = specs[index]
        if spec is None:
            continue
        load = loads.setdefault(id(spec.group), [0] * spec.group.size)
        owners[index] = owner = load.index(min(load))
        load[owner] += work[index]
    return owners


def _is_here(param: Any) -> bool:
    """Whether this rank shares the parameter; in a pipeline another stage may hold it."""
    is_here: bool = getattr(getattr(param, "_spec", None), "is_here", True)
    return is_here


class _Matrix:
    """One matrix in a step."""

    def __init__(self, part: Part, update: Update) -> None:
        self._formula: Any = part.formula
        self._numbers = part.numbers
        self._update = update
        param: Any = update.param
        self.spec: ShardSpec | None = getattr(param, "_spec", None)
        self._shape: torch.Size = param.shape if self.spec is None else self.spec.shape
        self._label = getattr(param, "_label", "plain parameter")
        self._whole: Tensor | None = None  # at the owner
        self._works: list[Work] = []

    @property
    def work(self) -> int:
        work: int = self._formula.work(self._shape, self._numbers)
        return work

    def gather(self, owner: int) -> None:
        """Posts the messages to the owner."""
        local = self._formula.start(self._update, self._numbers).reshape(-1)
        self._owner = owner
        if self.spec is None or self.spec.group.size == 1:
            self._whole = local
            return
        group = self.spec.group
        if group.rank == owner:
            self._whole = local.new_empty(self.spec.numel)
            self.spec.slice_of(self._whole).copy_(local)
            self._works = [group.comm.recv(x, r, self._label) for r, x in self._parts(self._whole)]
        elif local.numel():
            self._sent = local
            self._works = [group.comm.send(local, owner, self._label)]

    def _parts(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """Returns the other ranks that hold elements, and their elements."""
        assert self.spec is not None
        others = [(r, self.spec.part(r)) for r in range(self.spec.group.size) if r != self.spec.group.rank]
        return [(r, flat.narrow(0, begin, count)) for r, (begin, count) in others if count]

    def transform(self) -> None:
        """Computes the result at the owner, and posts its messages."""
        if self._whole is not None:
            self._wait()
            result = self._formula.transform(self._whole.view(self._shape), self._numbers)
            self._whole = result.reshape(-1)
            if self.spec is None or self.spec.group.size == 1:
                self._result = self._whole
                return
            self._result = self.spec.slice_of(self._whole)
            comm = self.spec.group.comm
            self._works = [comm.send(x, r, self._label) for r, x in self._parts(self._whole)]
            return
        assert self.spec is not None
        count = self.spec.local_part[1]
        self._result = torch.empty(count, dtype=torch.bfloat16, device=self._update.param.device)
        if count:
            self._works.append(self.spec.group.comm.recv(self._result, self._owner, self._label))

    def finish(self) -> None:
        """Updates the weights."""
        self._wait()
        begin = 0 if self.spec is None else self.spec.local_part[0]
        self._formula.finish(self._update, self._numbers, self._shape, begin, self._result)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
