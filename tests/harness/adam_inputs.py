"""Parameters and gradients of every shape and size, and torch's steps with nearest roots, to compare steps with."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

SHAPES = ((), (1,), (7,), (3, 5), (64, 33), (2, 3, 4), (40_001,))


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def draw_gradients(params: list[nn.Parameter], generator: torch.Generator) -> None:
    for p in params:
        size = 10 ** (4 * torch.rand(p.shape, generator=generator) - 3)
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(p.dtype)


def ulps_of_largest(a: torch.Tensor, b: torch.Tensor) -> float:
    largest = b.abs().max()
    ulp = largest.nextafter(torch.tensor(math.inf)) - largest
    return float((a - b).abs().max() / ulp)


def step_with_nearest_roots(optimizer: torch.optim.Optimizer) -> None:
    """A step of torch's Adam (``foreach=False``) whose square roots are the nearest numbers, as the core's are.

    Those of torch with MKL need not be: on one AMD EPYC 17 of 100 fp32 roots are a neighbour, elsewhere fewer.
    """
    with patch.object(torch.Tensor, "sqrt", lambda x: x.double().sqrt_().to(x.dtype)):
        optimizer.step()
