"""A model of blocks, and its training by an offloading optimizer, for tests that compare bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import bmtrain as bmt

__all__ = ["LAYERS", "Layer", "Model", "values_of"]

LAYERS = 5


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.bias = bmt.DistributedParameter(torch.zeros(40))  # first, so that rank 0 of 2 has a part of both
        self.weight = bmt.DistributedParameter(torch.randn(40, 40) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + torch.nn.functional.linear(x, self.weight, self.bias).tanh()
        return result


class Model(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = bmt.DistributedParameter(torch.randn(40, 40))
        self.layers = bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x @ self.first)
        return result


def values_of(model: torch.nn.Module, optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """Everything that a step changes."""
    dicts = [optimizer.state_dict()["state"] for optimizer in optimizers]
    states = [state for of_one in dicts for _, state in sorted(of_one.items())]
    return [
        *(p.detach().clone() for p in model.parameters()),
        *(value.clone() for state in states for value in state.values() if torch.is_tensor(value)),
    ]
