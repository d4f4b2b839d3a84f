"""The division of one logical tensor: into slices (tensor-parallel ones, or experts), and these into runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...parameter import DistributedParameter

__all__ = ["Spread", "local_run", "spread_of"]


@dataclass(frozen=True)
class Spread:
    """A tensor as ``parts`` equal slices along ``dim``, each of which is flattened for itself.

    Args:
        shape: of the whole tensor.
        dim: along which it is sliced; -1 if it is one slice.
        parts: number of slices.

    Example:
        >>> columns = Spread((2, 4), dim=1, parts=2)
        >>> list(columns.to_whole(part=1, begin=0, count=4))     # (first element in the whole, number)
        [(2, 2), (6, 2)]
        >>> list(columns.from_whole(begin=1, count=4))           # (slice, first element in it, number)
        [(0, 1, 1), (1, 0, 2), (0, 2, 1)]
    """

    shape: tuple[int, ...]
    dim: int = -1
    parts: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0:
            if self.parts != 1:
                raise ValueError(f"parts: expected 1 without a dimension to cut, got {self.parts}")
        elif self.dim >= len(self.shape) or self.parts < 1 or self.shape[self.dim] % self.parts:
            raise ValueError(f"cannot cut shape {self.shape} along dimension {self.dim} into {self.parts}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def part_numel(self) -> int:
        return self.numel // self.parts

    def _lengths(self) -> tuple[int, int]:
        """Number of elements that follow each other in a slice, and from one such run to the next in the whole."""
        if self.dim < 0:
            return max(self.numel, 1), max(self.numel, 1)
        stride = math.prod(self.shape[self.dim :])
        return max(stride // self.parts, 1), max(stride, 1)

    def to_whole(self, part: int, begin: int, count: int) -> Iterator[tuple[int, int]]:
        """Positions of elements of a slice in the whole tensor: runs of (first element, number)."""
        run, stride = self._lengths()
        while count > 0:
            row, column = divmod(begin, run)
            length = min(run - column, count)
            yield row * stride + part * run + column, length
            begin, count = begin + length, count - length

    def from_whole(self, begin: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Positions of a run of the whole tensor in the slices: runs of (slice, first element in it, number)."""
        run, stride = self._lengths()
        while count > 0:
            row, rest = divmod(begin, stride)
            part, column = divmod(rest, run)
            length = min(run - column, count)
            yield part, row * run + column, length
            begin, count = begin + length, count - length


def spread_of(param: torch.Tensor) -> Spread:
    """The present division of the parameter over the ranks that have a slice each."""
    if not isinstance(param, DistributedParameter):
        return Spread(tuple(param.shape))
    if param._tp_split_dim < 0:
        return Spread(tuple(param._tp_original_shape))
    return Spread(tuple(param._tp_original_shape), param._tp_split_dim, param._slice_group.size)


def local_run(param: torch.Tensor) -> tuple[int, int, int]:
    """This rank's part of the parameter: the slice, the first element in it, the number of elements."""
    if not isinstance(param, DistributedParameter):
        return 0, 0, param.numel()
    part = param._slice_group.rank if param._tp_split_dim >= 0 else 0
    begin, count = param._spec.local_part
    return part, begin, count
