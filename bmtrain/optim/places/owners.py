"""State on the device of the parameters or on the host; one rank each transforms whole matrices, see [Note: Owners]."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from .._owners import Team, Transfer, is_here, owners_of
from .._updates import Update
from ..formulas import Part
from .device import OnDevice, is_narrow, widened
from .host import OnHost
from .place import States
from .ranges import compute_on_host, split


class OnOwners(OnDevice):
    """The device of the parameters, and for formulas of whole matrices the ranks that own them."""

    def apply(self, parts: list[Part], states: States, *, is_early: bool) -> None:
        step = super().apply
        self.owner_bytes = _apply(parts, lambda others: step(others, states, is_early=is_early))


class OnHostOwners(OnHost):
    """Host memory; whole matrices travel and are transformed on the device of the parameters.

    fp32 parameters in host memory are updated within the step, as only then they have the bits of torch's optimizer;
    updates of others, by other formulas, overlap with the matrices and continue after the step.
    """

    def apply(self, parts: list[Part], states: States, *, is_early: bool) -> None:
        step = super().apply

        def step_others(others: list[Part]) -> None:
            exact, rest = split(others, _has_bits_of_torch)
            compute_on_host(exact, as_torch=True)
            step(list(rest), states, is_early=is_early)

        self.owner_bytes = _apply(parts, step_others)


def _has_bits_of_torch(part: Part, update: Update) -> bool:
    return update.param.is_cpu and update.param.dtype is torch.float32 and not is_narrow(part, update)


def _apply(parts: list[Part], step_others: Callable[[list[Part]], None]) -> int:
    """Computes a step: whole matrices here, the other parts by a function, while matrices travel. Returns the most
    bytes of matrices and messages."""
    whole = [(part, u) for part in parts if part.formula.is_whole for u in part.updates]
    matrices = [_Matrix(part, u) for part, u in whole if is_here(u.parameter)]
    owners = owners_of([matrix.work for matrix in matrices], [matrix.team for matrix in matrices])
    for matrix, owner in zip(matrices, owners, strict=True):
        matrix.gather(owner)
    nbytes = sum(matrix.transfer.nbytes for matrix in matrices)
    step_others([part for part in parts if not part.formula.is_whole])
    for matrix in matrices:
        matrix.transform()
    nbytes = max(nbytes, sum(matrix.transfer.nbytes for matrix in matrices))
    for matrix in matrices:
        matrix.finish()
    return nbytes


class _Matrix:
    """One matrix in a step."""

    def __init__(self, part: Part, update: Update) -> None:
        self._formula: Any = part.formula
        self._numbers = part.numbers
        self._part, self.update = part, update
        self.team = Team(update.parameter)

    @property
    def work(self) -> int:
        return int(self._formula.work(self.team.shape, self._numbers))

    def gather(self, owner: int) -> None:
        """Posts the messages to the owner."""
        self.transfer = Transfer(self.update.parameter, owner)
        narrow = is_narrow(self._part, self.update)
        with widened(self.update, self._part.names) if narrow else nullcontext(self.update) as update:
            local = self._formula.start(update, self._numbers)
        self.transfer.gather(local.reshape(-1).to(self.update.param.device), is_temporary=True)

    def transform(self) -> None:
        """Computes the result at the owner, and posts its messages."""
        result = None
        if self.transfer.is_owner:
            matrix = self.transfer.whole().view(self.team.shape)
            result = self._formula.transform(matrix, self._numbers).reshape(-1)
        self.transfer.scatter(result, torch.bfloat16)

    def finish(self) -> None:
        """Updates the weights."""
        direction = self.transfer.part()
        self._formula.finish(self.update, self._numbers, self.team.shape, self.team.begin, direction)
