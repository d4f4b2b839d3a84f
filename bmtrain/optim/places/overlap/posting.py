"""Updates of one optimizer that continue after its step. See [Note: Updates that overlap]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...._C import OffloadUpdate
from ...._engine.block_state import BlockState
from ...._engine.pending import PendingUpdate, PendingUpdates
from ...._ranks import context
from ...._shards.at_rest import finish_update
from ....parameter import DistributedParameter
from ..._updates import Update
from ...formulas import Part
from ..place import zero_gradient
from ..ranges import host_ranges
from .ahead import SentAhead, SentBlock
from .references import ArenaReferences, is_unwatched
from .staging import Staging

#: Number of elements of parameters outside blocks that form one unit.
_OUTSIDE = 1 << 20


def needs_staging(device: torch.device) -> bool:
    """Whether the CPU accesses memory of ``device`` by copies only."""
    return device.type == "cuda"


class _Unit:
    """Parameters with one wait: a block's parameters, or neighbours outside blocks."""

    def __init__(self, runtime: BlockState | None, label: str, device: torch.device) -> None:
        self.runtime = runtime
        self.label = label
        self.device = device
        self.parts: list[Part] = []
        self.numel = 0

    def add(self, update: Update, origin: Part) -> None:
        """Adds an update of ``origin``."""
        is_32 = update.param.dtype == torch.float32
        for part in self.parts:
            same = part.numbers is origin.numbers
            if same and (part.updates[0].param.dtype == torch.float32) == is_32:
                part.updates.append(update)
                break
        else:
            self.parts.append(origin._replace(updates=[update]))
        self.numel += update.param.numel()

    def updates(self) -> list[Update]:
        return [update for part in self.parts for update in part.updates]


class Overlap:
    """Collects the parts of a step and posts those without references from outside."""

    def __init__(self) -> None:
        self.pending = PendingUpdates()
        self.arenas = ArenaReferences()
        self._stagings: dict[torch.device, Staging] = {}
        self._ahead: dict[torch.device, SentAhead] = {}

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for copies of gradients and parameters."""
        return sum(way.nbytes for ways in (self._stagings, self._ahead) for way in ways.values())

    def zero_grad(self, parameters: Sequence[Tensor], set_to_none: bool) -> bool:
        """Fills gradients with zeros, or sets them to None, if updates are pending; returns whether it did.

        Gradients in use are zeroed after their update.
        """
        for ahead in self._ahead.values():
            ahead.forget()
        pending = [update for update in self.pending if not update.is_finished]
        if not pending:
            return False
        later: set[int] = set()
        if not set_to_none:
            for update in pending:
                if update.zero_gradients_afterwards():
                    later.update(map(id, update.parameters))
        with torch._C.DisableTorchFunctionSubclass():  # so that nothing waits here
            for p in (p for p in parameters if id(p) not in later):
                if not set_to_none:
                    finish_update(p)
                zero_gradient(p, set_to_none)
        return True

    def post(
        self, parts: Sequence[Part], states: dict[Tensor, dict[str, Any]], *, is_early: bool
    ) -> list[Part]:
        """Posts the updates that can be computed in the background.

        Args:
            parts: a whole step, in forward order within each part.
            states: states of all parameters of the optimizer.
            is_early: it is a part of a step, inside backward, and more parts follow.

        Returns:
            The parts that must be computed at once.
        """
        units, at_once = _units_of(parts)
        posted = []
        for unit in units:
            sent = self._take(unit)
            of_sent = () if sent is None else sent.storages
            if not is_unwatched(unit.updates(), unit.runtime, states, self.arenas, of_sent):
                if sent is not None:
                    sent.copy.drop()
                at_once += unit.parts
                continue
            if not is_early:
                self._learn(unit)
            posted.append(self._prepare(unit, sent))
        OffloadUpdate.post([update.update for update in posted])
        self.pending.add(posted)
        if not is_early:
            for ahead in self._ahead.values():
                ahead.end_step()
        return at_once

    def _take(self, unit: _Unit) -> SentBlock | None:
        ahead = self._ahead.get(unit.device)
        return None if ahead is None or unit.runtime is None else ahead.take(unit.runtime, unit.updates())

    def _learn(self, unit: _Unit) -> None:
        """Prepares to send the gradients of the next step's backward ahead."""
        current = context.current()
        if unit.runtime is None or current is None or not needs_staging(unit.device):
            return
        if unit.device not in self._ahead:
            self._ahead[unit.device] = SentAhead(self._staging(unit.device))
        self._ahead[unit.device].learn(unit.runtime, unit.updates(), current.local_size)

    def _staging(self, device: torch.device) -> Staging:
        if device not in self._stagings:
            self._stagings[device] = Staging(device)
        return self._stagings[device]

    def _prepare(self, unit: _Unit, sent: SentBlock | None) -> PendingUpdate:
        update = OffloadUpdate(unit.label)
        kept = self._add_staged(update, unit, sent) if needs_staging(unit.device) else []
        for part in unit.parts if not kept else ():
            with host_ranges(part.updates, part.names) as ranges:
                part.formula.add_to(update, ranges, [part])
            kept.append(ranges)
        parameters = [u.param for u in unit.updates()]
        OffloadUpdate.guard_gradients(update, parameters)
        return PendingUpdate(update, parameters, kept, unit.runtime)

    def _add_staged(self, update: OffloadUpdate, unit: _Unit, sent: SentBlock | None) -> list[Any]:
        staging, updates = self._staging(unit.device), unit.updates()
        staged = staging.place(updates, sent)
        kept: list[Any] = [updates, staged]
        first = 0
        for part in unit.parts:
            ranges = staged.ranges(part.updates, part.names, first)
            part.formula.add_to(update, ranges, [part])
            kept.append(ranges)
            first += len(part.updates)
        staging.attach(update, updates, staged)
        return kept


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
            block: Any = param._block  # type: ignore[attr-defined]
            runtime = None if block is None else block.runtime()
            if runtime is not None:
                unit = blocks.get(id(runtime))
                if unit is None:
                    unit = blocks[id(runtime)] = _Unit(runtime, runtime.label, param.device)
                    units.append(unit)
                    outside = None
            else:
                if (
                    outside is None
                    or outside.device != param.device
                    or outside.numel + param.numel() > _OUTSIDE
                ):
                    label = f"parameters outside blocks, from shape {_shape_of(param)}"
                    outside = _Unit(None, label, param.device)
                    units.append(outside)
                unit = outside
            unit.add(update, part)
        if rest:
            at_once.append(part._replace(updates=rest))
    return units, at_once


def _is_direct(update: Update) -> bool:
    """Whether the workers can access the tensors' memory, and every access can be made to wait."""
    param, grad = update.param, update.grad
    return (
        isinstance(param, DistributedParameter)
        and param.device == grad.device
        and param.device.type in ("cpu", "cuda")
        and param.is_contiguous()
        and grad.is_contiguous()
    )


def _shape_of(param: Any) -> tuple[int, ...]:
    return tuple(param._original_shape)
