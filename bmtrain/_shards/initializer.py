"""Deferred initialisers of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._base.arguments import require_callable


class ParameterInitializer:
    """An initialiser and its arguments, to be called on the full tensor by :func:`bmtrain.init_parameters`.

    Args:
        func: called as ``func(tensor, *args, **kwargs)``; initialises the tensor in place.

    Raises:
        TypeError: it cannot be called.

    Example:
        >>> import torch, bmtrain
        >>> fill = bmtrain.ParameterInitializer(torch.nn.init.constant_, 2.0)
        >>> t = torch.empty(3); _ = fill(t); t
        tensor([2., 2., 2.])
    """

    def __init__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        require_callable("func", func)
        self.func = func
        self._args = args
        self._kwargs = kwargs

    def __call__(self, param: torch.Tensor) -> Any:
        return self.func(param, *self._args, **self._kwargs)
