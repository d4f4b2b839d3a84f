"""Updates computed by the CPU, with their state in host memory, and behind the caller's back where they can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ._elementwise import ElementwiseOptimizer, Update
from ._host_step import Ranges, host_ranges
from ._overlap import Overlap, Part

__all__ = ["Offloaded"]


class Offloaded(ElementwiseOptimizer):
    """An optimizer whose state lies in host memory.

    The formula's class gives `_compute`, and `_add_to` for updates that go on after the step.
    """

    #: Whether updates go on after `step`.
    _overlaps = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._start_overlap()
        super().__init__(*args, **kwargs)

    def _compute(self, ranges: Ranges, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _add_to(self, update: _C.OffloadUpdate, ranges: Ranges, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def has_master(self, p: Tensor) -> bool:
        """Whether the state of ``p`` has an fp32 copy of its value: always."""
        return True

    def shares_master(self, p: Tensor) -> bool:
        """Whether that copy is the parameter itself: an fp32 parameter in host memory needs no second one."""
        return p.dtype == torch.float32 and p.device.type == "cpu" and p.is_contiguous()

    def _state_device(self, p: Tensor) -> torch.device:
        return torch.device("cpu")

    # ---- overlap

    def _start_overlap(self) -> None:
        self._overlap = Overlap()
        self._parts: list[Part] = []  # of the step that runs now

    @property
    def state(self) -> Any:
        """State by parameter. Whoever reads it waits for the updates under way."""
        self._overlap.pending.finish()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_overlap" not in self.__dict__:  # a copy
            self._start_overlap()
        super().__setstate__(state)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill all gradients with zeros, or set them to None. Those in use are zeroed once they have been used."""
        pending = [update for update in self._overlap.pending if not update.is_finished]
        if not pending:
            super().zero_grad(set_to_none)
            return
        later: set[int] = set()
        if not set_to_none:
            for update in pending:
                if update.zero_gradients_afterwards():
                    later.update(map(id, update.parameters))
        with torch._C.DisableTorchFunctionSubclass():  # so that nothing waits here
            for p in (p for group in self.param_groups for p in group["params"] if id(p) not in later):
                if set_to_none:
                    p.grad = None
                    continue
                if (waiting := p.__dict__.get("_pending")) is not None:
                    waiting.finish()
                _zero(p.grad)

    # ---- the step

    def _start_step(self) -> None:
        self._overlap.pending.finish()
        self._parts = []

    def _apply(self, updates: Sequence[Update], names: tuple[str, ...], options: dict[str, Any]) -> None:
        part = Part(list(updates), names, options)
        if self._overlaps:
            self._parts.append(part)
        else:
            self._compute_part(part)

    def _end_step(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            for part in self._overlap.post(parts, self._states, self._add_to):
                self._compute_part(part)

    def _compute_part(self, part: Part) -> None:
        with host_ranges(part.updates, part.names) as ranges:
            self._compute(ranges, part.options)

    def _note_new_state(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        self._overlap.arenas.note(parameters, names, self._states)

    def _own_attributes(self) -> tuple[str, ...]:
        return (*super()._own_attributes(), "_overlaps", "_state_dtype")


def _zero(grad: Tensor | None) -> None:
    if grad is not None:
        if grad.grad_fn is not None:
            grad.detach_()
        else:
            grad.requires_grad_(False)
        grad.zero_()
