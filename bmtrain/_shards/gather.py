"""Autograd function that gathers one parameter, and reduces its gradient into the shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from .._base.deprecate import warn_once
from .._base.tensors import version_of
from ..global_var import context, rank
from .penalties import expected

if TYPE_CHECKING:
    from .sharded import Sharded


def changed_by_hooks(param: Sharded, gradient: torch.Tensor) -> torch.Tensor:
    """Returns this rank's full gradient after the user's hooks on the parameter, as a dense tensor."""
    for hook in list((param._gradient_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient.to_dense() if gradient.is_sparse else gradient


def warn_if_kept(ctx: Any, params: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Warns, once and on rank 0, of gathered tensors in a second backward, before which their parameters changed."""
    versions = [version_of(param) for param in params]
    before = ctx.versions = getattr(ctx, "versions", versions)
    rows = zip(params, gradients, before, versions, strict=True)
    changed = [param._label for param, gradient, old, new in rows if gradient is not None and old != new]
    if changed and rank() == 0:
        warn_once(
            "gather.kept",
            f"backward: the loss uses a tensor that an earlier step has read from {changed[0]}, or computed from such "
            "a tensor: it is a copy of the parameter before that step. Read module.weight in every forward",
            stacklevel=3,
            category=UserWarning,
        )


class OpAllGather(torch.autograd.Function):
    """Gathers a shard into the full tensor; backward sums full gradients over ranks into shards."""

    @staticmethod
    def forward(ctx: Any, param: Any) -> torch.Tensor:
        ctx.param, ctx.is_unused = param, False
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.home = param._spec, param.device
        with context().engine.waiting("outside blocks", "gather"):
            flat = param._spec.gather(param, param._label)
        full: torch.Tensor = flat.new_empty(0)  # not a view of `flat`, so that callers may write to it
        shape = param._original_shape
        strides = torch.empty(shape, device="meta").stride()
        return full.set_(flat.untyped_storage(), flat.storage_offset(), shape, strides)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        engine = context().engine
        warn_if_kept(ctx, [ctx.param], [grad])
        if grad is None and not ctx.is_unused:  # a function may have returned a gradient on other ranks
            grad = torch.zeros(ctx.spec.shape, dtype=ctx.param.dtype, device=context().device)
        gradient = None if grad is None else engine.gradients.of_parameter(ctx.param, grad)
        if gradient is None:
            return None
        with engine.waiting("outside blocks", "reduce"):
            reduced: torch.Tensor = ctx.spec.reduce_scatter(gradient.reshape(-1), ctx.param._label)
        return expected(ctx.param, reduced.to(ctx.home))


def note_unused(gather: Any) -> None:
    """Lets the parameter have no gradient whose gathered tensor, made by this node, no rank uses."""
    if getattr(gather, "is_unused", None) is False:  # a node of `OpAllGather`
        gather.is_unused = True
