"""Updates computed by the CPU, with state in host memory, overlapped with other work where possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._engine.engine import current_engine
from .._ranks import context
from . import _overlap
from ._arrays import MASTER, allocate
from ._elementwise import ElementwiseOptimizer
from ._host_step import compute_alike, compute_on_host, split
from ._overlap import Overlap
from ._residence import choose_residents, spare_bytes
from ._updates import Part

__all__ = ["Offloaded"]


class Offloaded(ElementwiseOptimizer):
    """An optimizer whose state lies in host memory."""

    #: Whether updates continue after `step`.
    _overlaps = True
    #: Share of the blocks whose state stays on the run device; None: as many as fit.
    _fraction: float | None = 0.0
    #: ids of the parameters whose state stays on the run device; None before that is decided.
    _residents: set[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._start_overlap()
        super().__init__(*args, **kwargs)

    def has_master(self, p: Tensor) -> bool:
        """Whether the state of ``p`` has an fp32 copy of its value: always."""
        return True

    def shares_master(self, p: Tensor) -> bool:
        """Whether that copy is the parameter itself: an fp32 parameter in host memory needs no second one."""
        here = p.is_cpu or p.device == self._state_device(p)
        return here and p.dtype is torch.float32 and p.is_contiguous()

    def _state_device(self, p: Tensor) -> torch.device:
        return p.device if self._residents and id(p) in self._residents else torch.device("cpu")

    # ---- what stays on the device

    @property
    def resident_fraction(self) -> float:
        """Share of the blocks whose state is on the run device, known from the first step on."""
        return self._resident_fraction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; a fixed fraction then applies to the blocks of all groups."""
        super().add_param_group(param_group)
        if self._fraction is not None:
            self._residents = None

    def _can_stay(self, p: Tensor) -> bool:
        """Whether the core can update ``p`` in place."""
        return p.is_contiguous() and (p.device.type == "cpu" or self._has_device_kernel(p.device))

    def _has_device_kernel(self, device: torch.device) -> bool:
        return False

    def _choose_residents(self) -> None:
        """Chooses once, after the first backward, when the memory use of a step is known."""
        stays = [
            p for group in self.param_groups for p in group["params"] if p.requires_grad and self._can_stay(p)
        ]
        budget = spare_bytes(stays[0].device) if stays and self._fraction is None else 0
        self._residents, self._resident_fraction = choose_residents(
            stays, self._fraction, self._state_bytes, budget
        )
        self._move_states()

    def _state_bytes(self, p: Tensor) -> int:
        per_element = len(self._arrays) * self._state_dtype.itemsize + 4 * (p.dtype != torch.float32)
        return p.numel() * per_element

    def _move_states(self) -> None:
        """Moves states that were loaded before the choice to their device."""
        moving: dict[tuple[torch.device, tuple[str, ...]], list[Tensor]] = {}
        for p, state in self._states.items():
            device = self._state_device(p)
            if MASTER in state and self.shares_master(p):
                state[MASTER] = p.detach()
            names = tuple(name for name, value in state.items() if name != "step" and value.device != device)
            if names:
                moving.setdefault((device, names), []).append(p)
        for (device, names), members in moving.items():
            dtypes = [self._states[members[0]][name].dtype for name in names]
            arrays = allocate([p.shape for p in members], dtypes, device)
            for name, array in zip(names, arrays, strict=True):
                for p, place in zip(members, array, strict=True):
                    self._states[p][name] = place.copy_(self._states[p][name])
            del arrays, array, place
            self._note_new_state(members, names)

    # ---- overlap

    @property
    def staging_bytes(self) -> int:
        """Bytes of page-locked host memory for copies of a GPU's gradients and parameters; 0 on CPU ranks."""
        return self._overlap.host_bytes

    def _start_overlap(self) -> None:
        self._overlap = Overlap()
        self._residents = None
        self._resident_fraction = 0.0

    @property
    def state(self) -> Any:
        """State by parameter. Reading it waits for pending updates."""
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
        """Fills all gradients with zeros, or sets them to None. Gradients in use are zeroed after their update."""
        self._overlap.forget_sent()
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
        if self._residents is None:
            self._choose_residents()

    def _apply(self, parts: list[Part]) -> None:
        residents = self._residents or ()
        resident, others = split(parts, lambda _, u: id(u.param) in residents)
        compute_alike(map(_with_contiguous_gradients, resident), self._compute)
        current = context.current()
        if self._overlaps and current is not None and _overlap.needs_staging(current.device):
            current_engine(current).lagging_steps += 1
        if self._overlaps and others:
            others = self._overlap.post(others, self._states, self._add_to, is_early=bool(self._early))
        compute_on_host(others, self._compute)

    def _note_new_state(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        self._overlap.arenas.note(parameters, names, self._states)

    def _own_attributes(self) -> tuple[str, ...]:
        return (*super()._own_attributes(), "_overlaps", "_state_dtype", "_fraction")


def _with_contiguous_gradients(part: Part) -> Part:
    return part._replace(updates=[u._replace(grad=u.grad.contiguous()) for u in part.updates])


def _zero(grad: Tensor | None) -> None:
    if grad is not None:
        if grad.grad_fn is not None:
            grad.detach_()
        else:
            grad.requires_grad_(False)
        grad.zero_()
