"""The base class of lists of layers, which are read as sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class LayerSequence(torch.nn.Module):
    """Its children are its items, in their order."""

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getitem__(self, index: int | str | slice) -> Any:
        """One layer, by its number or its name, or a list of some."""
        if isinstance(index, str):
            return self._modules[index]
        return list(self._modules.values())[index]
