"""Parameters, gradients and a manager of one process."""

from __future__ import annotations

from typing import Any

import torch

from bmtrain.optim import OptimManager


def parameters(*dtypes: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(3, 4 + i, generator=generator).to(dtype))
        for i, dtype in enumerate(dtypes or [torch.float32] * 3)
    ]


def give_gradients(params: list[torch.nn.Parameter], factor: float = 1.0, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * factor).to(p.dtype)


def manager_of(params: list[torch.nn.Parameter], **options: Any) -> OptimManager:
    manager = OptimManager(**options)
    manager.add_optimizer(torch.optim.SGD(params, lr=0.5))
    return manager
