"""Dividing a dimension over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import require_dtype, require_integer, require_tensor
from ..global_var import context
from ..parameter import DistributedParameter, ParameterInitializer

__all__ = ["check_features", "check_layer", "divided", "tp_parameter"]


def check_layer(dtype: Any, **sizes: Any) -> None:
    """Raises TypeError or ValueError unless all sizes are integers of 0 or more, and the dtype is one of floats."""
    for name, size in sizes.items():
        require_integer(name, size, 0)
    require_dtype("dtype", dtype)


def check_features(name: str, x: Any, weight: torch.Tensor, width: int) -> None:
    """Raises TypeError or ValueError unless ``x`` is a tensor that fits the weight of a linear layer.

    Args:
        name: of the argument.
        x: what was given.
        weight: by which it is multiplied.
        width: what the last dim has to be.
    """
    require_tensor(name, x)
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(f"{name}: expected a last dim of {width}, got shape {tuple(x.shape)}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name}: expected {weight.dtype} as of weight, got {x.dtype}")


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
