"""Batch normalisation over the batches of all ranks (Ioffe and Szegedy, arXiv:1502.03167, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._C import ReduceOp
from .._ranks.context import Group
from ..global_var import config, context
from .engine import current_engine

_LABEL = "SyncBatchNorm"


class SyncedBatchNorm:
    """Replacement of the forward of ``torch.nn.SyncBatchNorm``, which uses torch.distributed, in wrapped models.

    In training, mean, variance and gradients are computed over all ranks' batches. Collective over the world.
    """

    training: bool
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float
    weight: Tensor | None
    bias: Tensor | None
    _check_input_dim: Callable[[Tensor], None]

    def forward(self, input: Tensor) -> Tensor:
        group = context().world
        if not self.training or group.size == 1:
            return torch.nn.BatchNorm1d.forward(self, input)  # type: ignore[arg-type]
        if current_engine(context()).virtual.is_open:
            raise RuntimeError(
                "SyncBatchNorm in a loop over virtual shards: a shard's forward cannot have the statistics of shards "
                "that run later; use LayerNorm or GroupNorm, or no virtual shards"
            )
        if config.get("pipe_enabled", False):
            raise RuntimeError(
                "SyncBatchNorm with a pipeline: the ranks of its stages are not in the same layer at once; use "
                "LayerNorm or GroupNorm, or no pipeline"
            )
        self._check_input_dim(input)
        count, mean, square = _statistics(input, group)
        self._track(count, mean, square)
        variance = square / count
        result: Tensor = _Normalise.apply(
            input, self.weight, self.bias, count, mean, variance, self.eps, group
        )
        return result

    @torch.no_grad()
    def _track(self, count: Tensor, mean: Tensor, square: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum: Any = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = square / (count - 1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


@torch.no_grad()
def _statistics(input: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, by channel over all ranks' inputs, the number of values, their mean, and the sum of squared deviations.

    Each rank sends its own three numbers, which are combined in rank order (Chan, Golub and LeVeque, 1983): the results
    of all ranks are bit-identical.
    """
    dims = _all_but_channels(input)
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    own = wide.new_empty(1 + 2 * input.size(1))
    num_values = input.numel() // input.size(1)
    own[0] = num_values
    mean = wide.mean(dims) if num_values else wide.new_zeros(input.size(1))
    own[1:] = torch.cat([mean, (wide - _spread(mean, wide)).square().sum(dims)])
    rows = own.new_empty((group.size, own.numel()))
    group.comm.all_gather(rows.view(-1), own, _LABEL).wait()
    counts, means, squares = rows[:, :1], *rows[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean).square()).sum(0)


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _spread(channels: Tensor, like: Tensor) -> Tensor:
    """Returns the values, one for each channel, in a shape that broadcasts to ``like``."""
    return channels.view(-1, *[1] * (like.dim() - 2))


class _Normalise(torch.autograd.Function):
    """Normalisation; in backward every rank's loss reaches every input, through mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        group: Group,
    ) -> Tensor:
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(input, weight, count, mean, inverse)
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        scale = inverse if weight is None else inverse * weight
        out = (input - _spread(mean, input)) * _spread(scale, input)
        if bias is not None:
            out += _spread(bias, input)
        return out.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, count, mean, inverse = ctx.saved_tensors
        dims = _all_but_channels(input)
        normal = (input - _spread(mean, input)) * _spread(inverse, input)
        grad_wide = grad.to(normal.dtype)
        own = torch.stack([grad_wide.sum(dims), (grad_wide * normal).sum(dims)])
        of_all = own.clone()
        ctx.group.comm.all_reduce(of_all, ReduceOp.SUM, _LABEL).wait()
        grad_sum, grad_dot = of_all / count
        scale = inverse if weight is None else inverse * weight
        grad_input = (grad_wide - _spread(grad_sum, input) - normal * _spread(grad_dot, input)) * _spread(
            scale, input
        )
        return (
            grad_input.to(input.dtype),
            None if weight is None else own[1].to(weight.dtype),
            None if ctx.bias_dtype is None else own[0].to(ctx.bias_dtype),
            *[None] * 5,
        )
