"""Gathering of several parameters in one message."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from .._C import ReduceOp
from .._shards.sharding import slot_length
from ..global_var import context
from ..parameter import DistributedParameter

if TYPE_CHECKING:
    from .._ranks.context import Group

__all__ = ["gather_together"]


class _Bundle:
    """Parameters gathered in one message: a rank's slot has its part of each, padded to the longest slot."""

    def __init__(self, params: Sequence[DistributedParameter]) -> None:
        self.params = params
        self.label = _label_of(tuple([param._number for param in params]))
        self.group: Group = params[0]._spec.group

    def _chunks(self) -> list[int]:
        """Returns the number of elements of each parameter in a slot, and of the padding."""
        chunks = [-(-param._spec.numel // self.group.size) for param in self.params]
        used = sum(chunks)
        return [*chunks, slot_length(used, self.params[0].element_size()) - used]

    def gathered(self) -> list[torch.Tensor]:
        """Returns the full tensors. Collective."""
        size, chunks = self.group.size, self._chunks()
        like = self.params[0].detach()
        slots = like.new_empty((size, sum(chunks)))
        own = like.new_zeros(sum(chunks))
        for part, param in zip(own.split(chunks)[:-1], self.params, strict=True):
            param._spec.check_local(param)
            part[: param.numel()] = param.detach()
        with context().engine.waiting("outside blocks", "gather"):
            self.group.comm.all_gather(slots.view(-1), own, self.label).wait()
        fulls = []
        for columns, param in zip(slots.split(chunks, dim=1)[:-1], self.params, strict=True):
            full = like.new_empty(param._original_shape)
            full.view(-1).copy_(columns.reshape(-1)[: full.numel()])
            fulls.append(full)
        return fulls

    def reduced(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns this rank's parts of the sums over the ranks. Collective."""
        size, chunks = self.group.size, self._chunks()
        slots = gradients[0].new_zeros((size, sum(chunks)))
        for columns, gradient in zip(slots.split(chunks, dim=1)[:-1], gradients, strict=True):
            flat = gradient.new_zeros(columns.numel())
            flat[: gradient.numel()] = gradient.reshape(-1)
            columns.copy_(flat.view_as(columns))
        own = slots.new_empty(sum(chunks))
        with context().engine.waiting("outside blocks", "reduce"):
            self.group.reduce_comm.reduce_scatter(own, slots.view(-1), ReduceOp.SUM, self.label).wait()
        return [  # copies: each becomes a parameter's gradient, which owns its memory
            part[: param._spec.local_part[1]].clone()
            for part, param in zip(own.split(chunks)[:-1], self.params, strict=True)
        ]


class _GatherTogether(torch.autograd.Function):
    """Gathers the shards of several parameters; backward sums full gradients over ranks into shards."""

    @staticmethod
    def forward(ctx: Any, bundle: _Bundle, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.params = bundle.params
        ctx.set_materialize_grads(False)
        fulls = bundle.gathered()
        frozen = [full for full, param in zip(fulls, bundle.params, strict=True) if not param.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(fulls)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        engine = context().engine
        trained: list[tuple[int, torch.Tensor]] = []
        for index, (param, gradient) in enumerate(zip(ctx.params, gradients, strict=True)):
            if gradient is not None and param.requires_grad:
                now = engine.gradients.of_parameter(param, gradient)
                if now is not None:
                    trained.append((index, now))
        out: list[torch.Tensor | None] = [None] * len(gradients)
        if trained:
            bundle = _Bundle([ctx.params[index] for index, _ in trained])
            for (index, _), part in zip(trained, bundle.reduced([g for _, g in trained]), strict=True):
                out[index] = part
        return None, *out


@functools.lru_cache(maxsize=256)
def _label_of(numbers: tuple[int, ...]) -> str:
    """Returns a label that distinguishes the parameters from others of the same sizes on another rank."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    if len(runs) > 8:
        digest = zlib.crc32(repr(numbers).encode())
        return f"{len(numbers)} parameters, {numbers[0]} to {numbers[-1]} ({digest:08x})"
    return f"parameters {', '.join('-'.join(map(str, run)) for run in runs)}"


def gather_together(params: Sequence[DistributedParameter]) -> tuple[torch.Tensor, ...]:
    """Returns the full tensors of parameters of one dtype and group of ranks, differentiable. Collective."""
    fulls: tuple[torch.Tensor, ...] = _GatherTogether.apply(_Bundle(params), *params)
    return fulls
