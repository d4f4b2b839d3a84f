"""What a model file is written with: torch's own layers, or layers that a user made from the documented parts.

A model is a function of a kit, so the plain model and its sharded twin are one piece of code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt

__all__ = ["BMTRAIN", "TORCH", "TORCH_RECOMPUTED", "Kit", "TanhLinear"]


@dataclass(frozen=True)
class Kit:
    """Classes to build a model from."""

    module: Any
    parameter: Callable[[torch.Tensor], torch.nn.Parameter]
    linear: Any
    embedding: Any
    layer_norm: Any
    layers: Callable[[Iterable[torch.nn.Module]], Any]  # (hidden, *for every layer) -> hidden


class PlainLayers(torch.nn.ModuleList):
    def forward(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        for layer in self:
            hidden = layer(hidden, *rest)
        return hidden


class RecomputedLayers(PlainLayers):
    """Layers that keep only their inputs, in torch's way: a layer is a node of its own in the graph, as a Block is."""

    def forward(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        for layer in self:
            hidden = checkpoint(layer, hidden, *rest, use_reentrant=True)
        return hidden


def normal(*shape: int, std: float = 0.2) -> bmt.DistributedParameter:
    return bmt.DistributedParameter(
        torch.empty(*shape), init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=std)
    )


def constant(size: int, value: float) -> bmt.DistributedParameter:
    return bmt.DistributedParameter(
        torch.empty(size), init_method=bmt.ParameterInitializer(torch.nn.init.constant_, value)
    )


class Linear(bmt.DistributedModule):
    def __init__(self, dim_in: int, dim_out: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = normal(dim_out, dim_in)
        self.bias = constant(dim_out, 0.0) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(bmt.DistributedModule):
    def __init__(self, num: int, dim: int) -> None:
        super().__init__()
        self.weight = normal(num, dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class LayerNorm(bmt.DistributedModule):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = constant(dim, 1.0)
        self.bias = constant(dim, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


TORCH = Kit(
    torch.nn.Module, torch.nn.Parameter, torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, PlainLayers
)
TORCH_RECOMPUTED = replace(TORCH, layers=RecomputedLayers)
BMTRAIN = Kit(
    bmt.DistributedModule,
    bmt.DistributedParameter,
    Linear,
    Embedding,
    LayerNorm,
    lambda layers: bmt.TransformerBlockList([bmt.CheckpointBlock(layer) for layer in layers]),
)


class TanhLinear(bmt.DistributedModule):
    """The smallest layer whose blocks can be stacked: ``tanh(x @ weight.T + bias)``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.randn(dim, dim) / dim**0.5, init_method=torch.nn.init.normal_
        )
        self.bias = bmt.DistributedParameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias))
