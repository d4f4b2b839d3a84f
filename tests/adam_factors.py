"""What csrc/optim/adam.cpp makes of the options of a step, for kernels that are called directly."""

from __future__ import annotations

import math

import torch

__all__ = ["adam_factors"]


def adam_factors(
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    scale: float,
    decoupled: bool,
    folded: bool = False,
) -> torch.Tensor:
    """The factors of one range in step ``step``, counted from 1: fp32."""
    beta1, beta2 = betas
    lerp = 1 - beta1
    root = math.sqrt(1 - beta2**step)
    fold = root if folded else 1.0
    is_power = math.frexp(scale)[0] == 0.5
    factors = [
        1 / scale if is_power else scale,
        not is_power,
        lerp >= 0.5,
        lerp - 1 if lerp >= 0.5 else lerp,
        beta2,
        1 - beta2,
        root / fold,
        eps * fold,
        -lr / (1 - beta1**step) * fold,
        2 if decoupled else 1,
        1 - lr * decay if decoupled else decay,
        step,
    ]
    return torch.tensor(factors, dtype=torch.float32)
