"""State in host memory, and updates computed by the CPU, overlapped with other work where possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._engine.engine import current_engine
from ..._ranks import context
from .._arrays import MASTER, allocate
from ..formulas import Formula, Part
from .overlap import posting
from .place import Groups, Place, States
from .ranges import compute_alike, compute_on_host, split
from .residence import choose_residents, spare_bytes


class OnHost(Place):
    """Host memory, except for the blocks whose state stays on the run device.

    Args:
        formula: the formula of the optimizer.
        overlaps: whether updates continue after `step`.
        fraction: share of the blocks whose state stays on the run device; None: as many as fit.
        state_dtype: dtype of the formula's arrays, see `read_state_dtype`.
    """

    settings = (*Place.settings, "overlaps", "fraction")

    def __init__(
        self,
        formula: Formula,
        *,
        overlaps: bool = True,
        fraction: float | None = 0.0,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(formula, state_dtype=state_dtype)
        self.overlaps = overlaps
        self.fraction = fraction
        self.overlap = posting.Overlap() if overlaps else None
        #: ids of the parameters whose state stays on the run device; None before that is decided.
        self._residents: set[int] | None = None
        #: Share of the blocks whose state is on the run device.
        self.resident_fraction = 0.0

    # ---- state

    def has_master(self, p: Tensor) -> bool:
        return True

    def shares_master(self, p: Tensor) -> bool:
        # An fp32 parameter in host memory needs no second copy.
        here = p.is_cpu or p.device == self.device_of(p)
        return here and p.dtype is torch.float32 and p.is_contiguous()

    def device_of(self, p: Tensor) -> torch.device:
        return p.device if self._residents and id(p) in self._residents else torch.device("cpu")

    def note_new_state(self, parameters: Sequence[Tensor], names: Sequence[str], states: States) -> None:
        if self.overlap is not None:
            self.overlap.arenas.note(parameters, names, states)

    @property
    def staging_bytes(self) -> int:
        """Bytes of page-locked host memory for copies of a GPU's gradients and parameters."""
        return 0 if self.overlap is None else self.overlap.host_bytes

    # ---- what stays on the device

    def note_new_group(self) -> None:
        if self.fraction is not None:
            self._residents = None  # a fixed fraction applies to the blocks of all groups

    def _choose_residents(self, groups: Groups, states: States) -> None:
        """Chooses once, after the first backward, when the memory use of a step is known."""
        stays = [p for group in groups for p in group["params"] if p.requires_grad and self._can_stay(p)]
        stays = [p for p in stays if p.is_cuda] or stays  # those in Blocks on the host have no other place
        budget = spare_bytes(stays[0].device) if stays and self.fraction is None else 0
        self._residents, self.resident_fraction = choose_residents(
            stays, self.fraction, self._state_bytes, budget
        )
        self._move_states(states)

    def _can_stay(self, p: Tensor) -> bool:
        """Whether the core can update ``p`` in place."""
        if not p.is_contiguous():
            return False
        takes_state = self._formula.kernel_takes_narrow or self.state_dtype == torch.float32
        return p.is_cpu or (takes_state and self._formula.has_kernel(p.device))

    def _state_bytes(self, p: Tensor) -> int:
        per_element = len(self._formula.arrays) * self.state_dtype.itemsize + 4 * (p.dtype != torch.float32)
        return p.numel() * per_element

    def _move_states(self, states: States) -> None:
        """Moves states that were loaded before the choice to their device."""
        moving: dict[tuple[torch.device, tuple[str, ...]], list[Tensor]] = {}
        for p, state in states.items():
            device = self.device_of(p)
            if MASTER in state and self.shares_master(p):
                state[MASTER] = p.detach()
            names = tuple(name for name, value in state.items() if name != "step" and value.device != device)
            if names:
                moving.setdefault((device, names), []).append(p)
        for (device, names), members in moving.items():
            dtypes = [states[members[0]][name].dtype for name in names]
            arrays = allocate([p.shape for p in members], dtypes, device)
            for name, array in zip(names, arrays, strict=True):
                for p, place in zip(members, array, strict=True):
                    states[p][name] = place.copy_(states[p][name])
            del arrays, array, place
            self.note_new_state(members, names, states)

    # ---- a step

    def start_step(self, groups: Groups, states: States) -> None:
        self.finish()
        if self._residents is None:
            self._choose_residents(groups, states)

    def apply(self, parts: list[Part], states: States, *, is_early: bool) -> None:
        residents = self._residents or ()
        resident, others = split(parts, lambda _, u: id(u.param) in residents)
        compute_alike(map(_with_contiguous_gradients, resident))
        if self.overlap is not None:
            current = context.current()
            if current is not None and posting.needs_staging(current.device):
                current_engine(current).lagging_steps += 1
            if others:
                others = self.overlap.post(others, states, is_early=is_early)
        compute_on_host(others)

    def finish(self) -> None:
        if self.overlap is not None:
            self.overlap.pending.finish()

    def zero_grad(self, parameters: Sequence[Tensor], set_to_none: bool) -> bool:
        return self.overlap is not None and self.overlap.zero_grad(parameters, set_to_none)


def _with_contiguous_gradients(part: Part) -> Part:
    return part._replace(updates=[u._replace(grad=u.grad.contiguous()) for u in part.updates])
