"""Blocks that are large enough for memory that ranks of a host share."""

from __future__ import annotations

import time
from typing import Any

import torch

import bmtrain as bmt

__all__ = ["DIM", "LAYERS", "Layer", "Small", "inputs", "model_of"]

LAYERS, DIM = 5, 760  # a block has more than the 1 MiB from which memory is shared, in 16 bits too


class Layer(bmt.DistributedModule):
    """``delay(number of the call)``: seconds that a forward takes longer."""

    def __init__(self, delay: Any = None) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(DIM, DIM) / DIM**0.5)
        self.bias = bmt.DistributedParameter(torch.zeros(DIM))
        self.calls, self.delay = 0, delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.delay is not None:
            time.sleep(self.delay(self.calls))
        return x + torch.tanh(torch.nn.functional.linear(x, self.weight, self.bias))


class Small(bmt.DistributedModule):
    """Just large enough for memory that is shared; reads one of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(520, 520))

    def forward(self, index: int, *, trains: bool = False) -> Any:
        element = self.weight[65 * index, index]
        return element if trains else float(element)


def model_of(
    layers: int = LAYERS, delay: Any = None, kind: type[Layer] = Layer, **options: Any
) -> bmt.TransformerBlockList:
    torch.manual_seed(0)
    return bmt.TransformerBlockList([bmt.Block(kind(delay), **options) for _ in range(layers)])


def inputs(number: int = 0) -> torch.Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * number + bmt.rank()))
