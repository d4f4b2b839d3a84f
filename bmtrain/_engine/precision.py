"""Computing in another dtype than the parameters'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["as_autocast_has_it", "computing_in"]


def as_autocast_has_it(tensor: torch.Tensor) -> torch.Tensor:
    """What a matrix product under the autocast of now takes for ``tensor``; without autocast, the tensor itself.

    For products in autograd functions of their own, whose backward runs without autocast.
    """
    kind = tensor.device.type
    if kind == "meta" or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def computing_in(dtype: torch.dtype, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with its floating-point arguments converted to ``dtype``.

    The conversion is a part of the forward, so gradients of the arguments have the arguments' own dtype. Arguments are
    tensors, and tensors in tuples; what is in lists, dicts and cache objects is the forward's own business, which may
    write to them. fp64 stays as it is.
    """

    def converted(*args: Any, **kwargs: Any) -> Any:
        known: dict[int, torch.Tensor] = {}  # what is given twice arrives as one object

        def convert(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.dtype not in (torch.float32, torch.float16, torch.bfloat16) or value.dtype == dtype:
                    return value
                return known.setdefault(id(value), value.to(dtype))
            if isinstance(value, tuple):
                items = [convert(item) for item in value]
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            return value

        return forward(*(convert(arg) for arg in args), **{key: convert(arg) for key, arg in kwargs.items()})

    return converted
