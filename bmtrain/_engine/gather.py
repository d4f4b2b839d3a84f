"""Reading one parameter: its shards put together, its gradient summed into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ..global_var import context

if TYPE_CHECKING:
    from ..parameter import DistributedParameter

__all__ = ["OpAllGather", "changed_by_hooks"]


def changed_by_hooks(param: DistributedParameter, gradient: torch.Tensor) -> torch.Tensor:
    """This rank's full gradient, as the user's hooks on the parameter leave it; a sparse one is made dense."""
    for hook in list((param._gradient_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient.to_dense() if gradient.is_sparse else gradient


class OpAllGather(torch.autograd.Function):
    """shard -> full tensor; backward: full gradient -> sum over ranks -> shard."""

    @staticmethod
    def forward(ctx: Any, param: DistributedParameter) -> torch.Tensor:
        ctx.param = param
        ctx.spec = param._spec
        with context().engine.observer.waiting("outside blocks", "gather"):
            flat = param._spec.gather(param)
        full: torch.Tensor = flat.new_empty(0)  # not a view of `flat`, so that callers may write to it
        shape = param._original_shape
        strides = torch.empty(shape, device="meta").stride()
        return full.set_(flat.untyped_storage(), flat.storage_offset(), shape, strides)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        grad = changed_by_hooks(ctx.param, grad)
        if context().engine.virtual.is_open:
            context().engine.virtual.add_outside(ctx.param, grad)
            return None
        accumulation = context().engine.accumulation
        if accumulation.is_on:
            accumulation.add_outside(ctx.param, grad)
            return None
        if accumulation.is_open:
            context().engine.call_at_end_of_backward()
        grad = accumulation.with_unsent(ctx.param, grad)
        with context().engine.observer.waiting("outside blocks", "reduce"):
            reduced: torch.Tensor = ctx.spec.reduce_scatter(grad.reshape(-1))
        return reduced
