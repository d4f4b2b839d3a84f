"""Numbers about one tensor."""

from __future__ import annotations

import torch


def mean_and_variance(tensor: torch.Tensor) -> tuple[float, float]:
    """Mean and unbiased variance, in fp32 or better; the variance is NaN for less than two elements."""
    values = _precise(tensor)
    mean = float(values.mean())
    return mean, float(values.var()) if values.numel() > 1 else float("nan")


def smallest_and_largest(tensor: torch.Tensor) -> tuple[float, float]:
    """Minimum and maximum; NaN for a tensor without elements."""
    values = _precise(tensor)
    if values.numel() == 0:
        return float("nan"), float("nan")
    return float(values.min()), float(values.max())


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
