"""Gathering of parameters outside blocks, small ones in one message. See [Note: Reads of one forward]."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .._base.stand_in import StandIn
from .._base.tensors import version_of
from .._C import ReduceOp
from .._ranks.context import Group
from .._shards.gather import warn_if_kept
from .._shards.penalties import expected
from .._shards.sharding import slot_length
from ..global_var import context
from ..parameter import DistributedParameter

#: Parameters up to this full size (in bytes) are gathered together.
SMALL_BYTES = 256 * 1024

_Mode = tuple[bool, bool]  # grad mode, inference mode: a tensor read in one cannot be used in another


class _Known(NamedTuple):
    """The result of reading a parameter."""

    param: DistributedParameter  # kept: its identity is the key
    full: torch.Tensor
    versions: tuple[int, int, int, bool]

    def is_current(self) -> bool:
        return self.versions == _versions(self.param, self.full)


def _versions(param: DistributedParameter, full: torch.Tensor) -> tuple[int, int, int, bool]:
    through_data = (param if param._block is None else param._block)._data_version
    written = 0 if through_data is None else through_data.value
    return version_of(param), written, version_of(full), param.requires_grad


class Results:
    """Results of the reads of parameters in one forward of ``root``."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._known: dict[tuple[int, _Mode], _Known] = {}
        self._modes: set[_Mode] = set()
        self._times: dict[int, int] = {}

    def read(self, param: DistributedParameter) -> torch.Tensor:
        """Returns the full tensor, the same as before if it is unchanged. Collective."""
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if mode not in self._modes:
            self._modes.add(mode)
            self._gather_small(mode)
        known = self._known.get((id(param), mode))
        if known is not None and known.is_current():
            return known.full
        full = param.gather()
        self._times[id(param)] = self._times.get(id(param), 0) + 1
        param._is_reread |= self._times[id(param)] > 1
        # Every virtual shard must read it equally often, the first one too.
        if param._is_reread or _is_small(param) or context().engine.is_summing_virtual_shards:
            self._keep(param, full, mode)
        return full

    def _keep(self, param: DistributedParameter, full: torch.Tensor, mode: _Mode) -> None:
        self._known[id(param), mode] = _Known(param, full, _versions(param, full))

    def _gather_small(self, mode: _Mode) -> None:
        places: dict[int, int] = {}
        together: dict[tuple[int, torch.dtype], list[DistributedParameter]] = {}
        for param in _outside_blocks(self._root):
            places[id(param)] = places.get(id(param), 0) + 1
            if places[id(param)] > 1:
                param._is_reread = True
            elif _is_small(param) and param._spec.layout is None and param._spec.group.size > 1:
                together.setdefault((id(param._spec.group), param.dtype), []).append(param)
        for members in together.values():
            if len(members) > 1:
                fulls = _GatherTogether.apply(_Bundle(members), *members)
                for param, full in zip(members, fulls, strict=True):
                    self._keep(param, full, mode)


def _outside_blocks(root: torch.nn.Module) -> Iterator[DistributedParameter]:
    """Yields the parameters below ``root`` that have values and are in no Block, once for each module with one."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for param in module._parameters.values():
            if isinstance(param, DistributedParameter) and not (param.is_meta or param._is_full()):
                yield param
        waiting += [
            child
            for child in module._modules.values()
            if child is not None and not isinstance(child, StandIn)
        ]


def _is_small(param: DistributedParameter) -> bool:
    return param._original_shape.numel() * param.element_size() <= SMALL_BYTES


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
        warn_if_kept(ctx, ctx.params, gradients)
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
                out[index] = expected(ctx.params[index], part)
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
