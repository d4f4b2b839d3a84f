"""Dividing a dimension over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from ..global_var import context
from ..parameter import DistributedParameter, ParameterInitializer

__all__ = ["divided", "tp_parameter"]


def divided(name: str, size: int) -> int:
    """``size`` over the number of tensor-parallel ranks.

    Raises:
        ValueError: if it does not divide.
    """
    tp_size = context().groups["tp"].size
    if size % tp_size:
        raise ValueError(f"{name}: expected a multiple of tp_size {tp_size}, got {size}")
    return size // tp_size


def tp_parameter(
    shape: tuple[int, ...], split_dim: int, dtype: Any, init: Any, *args: Any, **kwargs: Any
) -> Any:
    """A tensor-parallel parameter of which this rank's slice has ``shape``."""
    return DistributedParameter(
        torch.empty(shape, dtype=dtype),
        init_method=ParameterInitializer(init, *args, **kwargs),
        tp_mode=True,
        tp_split_dim=split_dim,
    )
