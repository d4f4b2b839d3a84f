"""Version counters for writes through ``.data``, which torch does not count.

Each ``param.data`` of torch is a tensor with a version counter of its own, so the parameter's version does not change
with a write through it. Here the returned tensors share one counter, which holds no memory. Reading through them
changes nothing, so a single rank may do it.
"""

from __future__ import annotations

import torch

from .._base.tensors import TORCH_DATA


class DataVersion:
    """Counts the writes through ``.data`` of one parameter, or of all parameters of one Block."""

    __slots__ = ("_counter", "_replaced")

    def __init__(self) -> None:
        self._counter: torch.Tensor | None = None
        self._replaced = 0

    @property
    def value(self) -> int:
        """Number that changes with each write."""
        return self._replaced + self.num_writes

    @property
    def num_writes(self) -> int:
        """Number of writes in place since the data were first read, or moved to another device."""
        return 0 if self._counter is None else self._counter._version

    def counted(self, data: torch.Tensor) -> torch.Tensor:
        """Returns an alias of ``data`` whose in-place writes are counted."""
        if self._counter is None:
            self._begin(data)
        try:
            return self._alias(data)
        except RuntimeError:  # torch puts no data of one device into a tensor of another
            self.note_replaced()
            self._begin(data)
            return self._alias(data)

    def _begin(self, data: torch.Tensor) -> None:
        self._replaced = self.value
        with torch.inference_mode(False):
            self._counter = data.new_empty(0)

    def _alias(self, data: torch.Tensor) -> torch.Tensor:
        assert self._counter is not None
        alias = self._counter.detach()
        TORCH_DATA.__set__(alias, data)
        return alias

    def note_replaced(self) -> None:
        """Counts the replacement of a parameter's data."""
        self._replaced += 1
