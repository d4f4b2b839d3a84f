"""Clipping by the norm of the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._base.arguments import require_number
from .._base.deprecate import warn_once
from ..global_var import context, rank
from ..virtual import check_no_loop
from ._grad_stats import global_norm, multiply_gradients, parameters_of

__all__ = ["clip_grad_norm", "clip_gradients"]


def clip_gradients(
    param_groups: Iterable[Any],
    max_norm: float,
    scale: float = 1.0,
    norm_type: float | str = 2,
    eps: float = 1e-6,
) -> Tensor:
    """Scales gradients down so that their norm over all ranks is at most ``max_norm``. Collective.

    Every logical element counts once, whether it is sharded or replicated; a gradient of None counts as 0. If the norm
    is inf or NaN the gradients stay unchanged, and the following step detects it. On a GPU the host does not wait for
    the norm.

    Args:
        param_groups: group dicts as of ``optimizer.param_groups``, or parameters.
        max_norm: largest norm of the true (unscaled) gradients that is not clipped.
        scale: the loss scale that the stored gradients carry.
        norm_type: p of the p-norm, ``"inf"`` or ``math.inf`` for the largest magnitude.
        eps: added to the stored norm before dividing by it.

    Returns:
        The norm before clipping, unscaled: a 0-dim fp32 tensor on the run device, equal on all ranks.

    Raises:
        TypeError: ``param_groups`` has objects that are not parameters.
        ValueError: ``max_norm``, ``scale``, ``norm_type`` or ``eps`` is out of range.
        RuntimeError: before ``init_distributed``.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> clip_gradients([p], max_norm=1.0), p.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if norm_type != "inf":
        require_number("norm_type", norm_type)
    require_number("max_norm", max_norm)
    require_number("scale", scale)
    require_number("eps", eps)
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type: expected more than 0 or 'inf', got {norm_type!r}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm: expected at least 0, got {max_norm}")
    if not scale > 0:
        raise ValueError(f"scale: expected more than 0, got {scale}")
    if not eps >= 0:
        raise ValueError(f"eps: expected at least 0, got {eps}")
    check_no_loop("clip_grad_norm")
    parameters = _parameters_of(param_groups)
    norm = global_norm(parameters, p)
    coefficient = (max_norm * scale / (norm + eps)).clamp_(max=1.0)
    factor = torch.where(norm.isfinite() & (norm > 0), coefficient, 1.0)
    multiply_gradients(parameters, factor)
    survival = context("clip_grad_norm").survival
    if survival is not None:
        survival.scale_copies(parameters, factor)
    return (norm / scale).to(torch.float32)


def _parameters_of(param_groups: Iterable[Any]) -> list[Tensor]:
    if not isinstance(param_groups, Iterable) or isinstance(param_groups, Tensor):
        raise TypeError(
            f"param_groups: expected parameters or dicts of them, got a {type(param_groups).__name__}"
        )
    groups = list(param_groups)
    if not groups and rank() == 0:
        warn_once(
            "clip_grad_norm.nothing",
            "param_groups: expected parameters, got none, so that nothing is clipped; a generator such as "
            "model.parameters() can be read only once: pass optimizer.param_groups",
            stacklevel=4,
            category=UserWarning,
        )
    if any(isinstance(group, Mapping) and "params" not in group for group in groups):
        raise TypeError("param_groups: expected dicts with params, got one without")
    return list(parameters_of(groups))


def clip_grad_norm(
    param_groups: Iterable[Any],
    max_norm: float,
    scale: float = 1.0,
    norm_type: float | str = 2,
    eps: float = 1e-6,
) -> Tensor:
    """:func:`clip_gradients`, by the name of 0.1. Programs with an :class:`OptimManager` call its method instead."""
    warn_once(
        "optim.clip_grad_norm", "optim.clip_grad_norm() is deprecated: call OptimManager.clip_grad_norm()"
    )
    return clip_gradients(param_groups, max_norm, scale, norm_type, eps)
