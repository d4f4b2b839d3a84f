"""The updates of one optimizer that go on after its step. See [Note: Updates that overlap]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._engine.pending import PendingUpdate, PendingUpdates
from ..parameter import DistributedParameter
from ._host_step import Ranges, host_ranges
from ._references import ArenaReferences, is_unwatched

if TYPE_CHECKING:
    from .._engine.runtime import BlockRuntime
    from ._elementwise import Update

__all__ = ["Overlap", "Part"]

#: Elements of parameters outside blocks that are waited for together.
_OUTSIDE = 1 << 20


class Part(NamedTuple):
    """Updates with the same options, all of fp32 or all of 16-bit parameters, and the arrays they need."""

    updates: list[Update]
    names: tuple[str, ...]
    options: dict[str, Any]


#: Adds ranges to an update of the core: `ElementwiseOptimizer._add_to`.
AddTo = Callable[[_C.OffloadUpdate, Ranges, dict[str, Any]], None]


class _Unit:
    """What is waited for as one: a block's parameters, or neighbours outside blocks."""

    def __init__(self, runtime: BlockRuntime | None, label: str) -> None:
        self.runtime = runtime
        self.label = label
        self.parts: list[Part] = []
        self.numel = 0

    def add(self, update: Update, names: tuple[str, ...], options: dict[str, Any]) -> None:
        is_32 = update.param.dtype == torch.float32
        for part in self.parts:
            if part.options is options and (part.updates[0].param.dtype == torch.float32) == is_32:
                part.updates.append(update)
                break
        else:
            self.parts.append(Part([update], names, options))
        self.numel += update.param.numel()

    def updates(self) -> list[Update]:
        return [update for part in self.parts for update in part.updates]


class Overlap:
    """Collects the parts of a step and posts those that nobody outside could watch."""

    def __init__(self) -> None:
        self.pending = PendingUpdates()
        self.arenas = ArenaReferences()

    def post(self, parts: Sequence[Part], states: dict[Tensor, dict[str, Any]], add_to: AddTo) -> list[Part]:
        """Posts what can be in the background.

        Args:
            parts: a whole step, in forward order within each part.
            states: of all parameters of the optimizer.
            add_to: the formula's.

        Returns:
            What has to be computed at once.
        """
        units, at_once = _units_of(parts)
        posted = []
        for unit in units:
            if not is_unwatched(unit.updates(), unit.runtime, states, self.arenas):
                at_once += unit.parts
                continue
            posted.append(_prepare(unit, add_to))
        _C.OffloadUpdate.post([update.update for update in posted])
        self.pending.add(posted)
        return at_once


def _units_of(parts: Sequence[Part]) -> tuple[list[_Unit], list[Part]]:
    blocks: dict[int, _Unit] = {}
    units: list[_Unit] = []
    outside: _Unit | None = None
    at_once: list[Part] = []
    for part in parts:
        rest = []
        for update in part.updates:
            param = update.param
            if not _is_direct(update):
                rest.append(update)
                continue
            runtime = _runtime_of(param)
            if runtime is not None:
                unit = blocks.get(id(runtime))
                if unit is None:
                    unit = blocks[id(runtime)] = _Unit(runtime, runtime.label)
                    units.append(unit)
                    outside = None
            else:
                if outside is None or outside.numel + param.numel() > _OUTSIDE:
                    outside = _Unit(None, f"parameters outside blocks, from shape {_shape_of(param)}")
                    units.append(outside)
                unit = outside
            unit.add(update, part.names, part.options)
        if rest:
            at_once.append(Part(rest, part.names, part.options))
    return units, at_once


def _is_direct(update: Update) -> bool:
    """Whether the workers can read and write the tensors as they are, and a wait can be put before every access."""
    param, grad = update.param, update.grad
    return (
        isinstance(param, DistributedParameter)
        and param.device.type == grad.device.type == "cpu"
        and param.is_contiguous()
        and grad.is_contiguous()
    )


def _runtime_of(param: Any) -> BlockRuntime | None:
    block = param._block
    return None if block is None or block.runtime is None else block.runtime()


def _shape_of(param: Any) -> tuple[int, ...]:
    return tuple(param._original_shape)


def _prepare(unit: _Unit, add_to: AddTo) -> PendingUpdate:
    update = _C.OffloadUpdate(unit.label)
    kept = []
    for part in unit.parts:
        with host_ranges(part.updates, part.names) as ranges:
            add_to(update, ranges, part.options)
        kept.append(ranges)
    parameters = [u.param for u in unit.updates()]
    _C.OffloadUpdate.guard_gradients(update, parameters)
    return PendingUpdate(update, parameters, kept, unit.runtime)
