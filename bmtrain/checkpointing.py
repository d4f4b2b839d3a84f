"""Recomputation of a single function (whole modules are recomputed by :class:`bmtrain.Block`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ._base.deprecate import warn_once

__all__ = ["checkpoint"]

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(func: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function so that it keeps only its inputs and is recomputed in backward.

    The random-number state of the first run is restored for the second, so dropout masks agree. Parameters
    that ``func`` reads get their gradients as usual.

    Args:
        func: any function of tensors; it must not depend on state that changes before backward.

    Returns:
        The wrapped function, called like ``func``.

    Example:
        >>> import torch
        >>> @checkpoint
        ... def square(x):
        ...     return x * x
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> square(x).backward()
        >>> x.grad
        tensor(6.)
    """

    warn_once(
        "checkpoint", "bmtrain.checkpoint is deprecated: use Block, or torch.utils.checkpoint for a function"
    )

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        call = functools.partial(func, **kwargs) if kwargs else func  # no keyword can be taken for an option
        result: R = torch_checkpoint(call, *args, use_reentrant=False, preserve_rng_state=True)
        return result

    return wrapper
