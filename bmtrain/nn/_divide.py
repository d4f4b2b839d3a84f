"""Dividing a dimension over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import require_dtype, require_integer
from ..global_var import context
from ..parameter import DistributedParameter, ParameterInitializer

__all__ = ["check_layer", "divided", "tp_parameter"]


def check_layer(dtype: Any, **sizes: Any) -> None:
    """Raises TypeError or ValueError unless all sizes are integers of 0 or more, and the dtype is one of floats."""
    for name, size in sizes.items():
        require_integer(name, size, 0)
    require_dtype("dtype", dtype)


def divided(name: str, size: int) -> int:
    """``size`` over the number of tensor-parallel ranks.

    Raises:
        TypeError: it is no integer.
        ValueError: it is negative, or does not divide.
    """
    require_integer(name, size, 0)
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
