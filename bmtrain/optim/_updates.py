"""Updates of one step: parameters with gradients and state, and ranges of tensors for kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .._C import StepJournal


class Update(NamedTuple):
    """One parameter in one step."""

    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    #: Whether arrays of the state begin with this step.
    is_fresh: bool = False
    #: The parameter, where `param` is a copy of its elements.
    source: Tensor | None = None

    @property
    def parameter(self) -> Tensor:
        """The parameter, with its place in a whole one."""
        return self.param if self.source is None else self.source


class Ranges(NamedTuple):
    """Parallel lists of contiguous tensors of one device.

    Attributes:
        weights: fp32 parameters, or fp32 masters of 16-bit ones.
        rounded: 16-bit parameters that receive the rounded weights; empty if there are none.
        grads: gradients.
        arrays: for each array that the formula keeps, a list.
        steps: the number of each tensor's update, 1 for the first.
        fresh: whether arrays begin with this update.
    """

    weights: list[Tensor]
    rounded: list[Tensor]
    grads: list[Tensor]
    arrays: list[list[Tensor]]
    steps: list[int]
    fresh: list[bool]


class Journal(NamedTuple):
    """The record by which another process completes the steps of an optimizer.

    Attributes:
        core: the record.
        first_pieces: place of each parameter in it.
        fresh: parameters whose arrays begin with this step, although they were allocated before it.
        is_open: whether the next step is recorded.
    """

    core: StepJournal
    first_pieces: Mapping[Any, int]
    fresh: frozenset[Any] = frozenset()
    is_open: bool = False
