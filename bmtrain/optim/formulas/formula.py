"""Base class of formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ... import _ops
from ..._C import OffloadUpdate
from .._updates import Ranges, Update


class Formula:
    """The update of single elements: state, options, numbers of a step, and kernel.

    A subclass names its arrays and its kernel, and defines `check`, `numbers_of`, `operands_of` and `compute_by_torch`.
    """

    #: Name in the core, for `step_of_groups` and `OffloadUpdate.add`.
    name: ClassVar[str]
    #: The arrays that may be kept for each element, and the arrays required to load a state.
    arrays: ClassVar[tuple[str, ...]] = ()
    needed_arrays: ClassVar[tuple[str, ...]] = ()
    #: Whether the kernel also takes arrays narrower than fp32.
    kernel_takes_narrow: ClassVar[bool] = False
    #: Arguments of the constructor, kept as attributes, that copies and pickles of an optimizer have.
    settings: ClassVar[tuple[str, ...]] = ()
    #: Whether it takes whole matrices, in a place that gathers them; then empty shards take part in a step.
    is_whole: ClassVar[bool] = False

    def formula_in(self, group: Mapping[str, Any]) -> Formula:
        """Returns the formula of a group's parameters."""
        return self

    def check(self, options: dict[str, Any]) -> None:
        """Raises TypeError or ValueError for an option of a group that is out of its range."""
        raise NotImplementedError

    def arrays_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the arrays that a step with the options of ``group`` needs."""
        return self.arrays

    def numbers_of(self, group: dict[str, Any], *, is_low: bool, scale: float) -> dict[str, Any]:
        """Returns the numbers of a step, for the 16-bit (``is_low``) or the fp32 parameters of a group.

        Args:
            group: options.
            is_low: kind of the parameters.
            scale: gradients are divided by it.
        """
        raise NotImplementedError

    def operands_of(self, ranges: Ranges) -> Sequence[Any]:
        """Returns the lists of tensors for the kernel, in its order."""
        raise NotImplementedError

    def compute_by_torch(self, updates: Sequence[Update], numbers: dict[str, Any]) -> None:
        """Computes updates by operations of torch; fp32 weights and masters only."""
        raise NotImplementedError

    def start_step(self) -> None:
        """Called at the start of a step."""

    def compute(
        self, ranges: Ranges, parts: Sequence[Part], *, as_torch: bool = False, **options: Any
    ) -> None:
        """Updates the ranges of ``parts`` in place by the kernel.

        Args:
            ranges: what to update.
            parts: the parts that it belongs to.
            as_torch: fp32 parameters get the bits of torch's own optimizer.
            options: ``check``, for a checked step on the host.
        """
        _ops.step_of_groups(self.name, self.operands_of(ranges), *groups_of(parts), **options)

    def add_to(self, update: OffloadUpdate, ranges: Ranges, parts: Sequence[Part]) -> None:
        """Adds the ranges to an update of the core that continues after the step."""
        update.add(self.name, self.operands_of(ranges), *groups_of(parts))

    def has_kernel(self, device: torch.device) -> bool:
        """Whether the core was built with the kernel for a device."""
        return _ops.has_steps(device.type)

    def kernel_takes_fp32(self, device: torch.device) -> bool:
        """Whether the kernel also updates fp32 parameters of a GPU; otherwise torch does, whose bits they then have."""
        return False


class Part(NamedTuple):
    """Updates of one group by one formula, all of fp32 or all of 16-bit parameters.

    Attributes:
        updates: the updates.
        names: the arrays that they need.
        numbers: the numbers of the step.
        formula: what computes them.
    """

    updates: list[Update]
    names: tuple[str, ...]
    numbers: dict[str, Any]
    formula: Formula


def groups_of(parts: Sequence[Part]) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the number of updates of each part, and its numbers."""
    return [len(part.updates) for part in parts], [part.numbers for part in parts]
