"""A few small blocks and a head outside of them, for tests of what is sent and kept."""

from __future__ import annotations

from typing import Any

import torch

import bmtrain as bmt

from .kits import TanhLinear

__all__ = ["DIM", "LAYERS", "MICROS", "Model", "batches"]

LAYERS, DIM, MICROS = 4, 8, 3


class Model(bmt.DistributedModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = bmt.TransformerBlockList([bmt.Block(TanhLinear(DIM), **options) for _ in range(LAYERS)])
        self.head = TanhLinear(DIM)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(x)).square().sum()


def batches(step: int) -> list[torch.Tensor]:
    """This rank's micro-batches of a step."""
    generator = torch.Generator().manual_seed(100 * step + bmt.rank())
    return [torch.randn(2, DIM, generator=generator) for _ in range(MICROS)]
