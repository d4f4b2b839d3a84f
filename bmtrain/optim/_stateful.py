"""State of optimizers over shards: allocation and masters, dicts of it, copies and pickles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .._engine.engine import current_engine
from .._ranks.agree import failing_together
from .._ranks.context import current, require_intact
from ._arrays import MASTER, gathered_state, layout_of, read_state, readable_state, value_mark
from ._narrow import store_values
from ._untraced import UntracedOptimizer
from .formulas import Formula
from .places import OnDisk, Place

_OWN = ("_early", "_owned_scale", "_steps_since_last_scale", "_seen")  # attributes that copies keep


class StatefulOptimizer(UntracedOptimizer):
    """The part of an optimizer over shards that concerns its state."""

    _bmtrain_optimizer = True
    #: What is computed, and where.
    _formula_class: type[Formula]
    _place_class: type[Place]

    #: Mark of the value last written by this optimizer, by parameter with a master, see value_mark.
    _seen: dict[Tensor, tuple[int, int]]

    def _compose(self, formula: Mapping[str, Any], place: Mapping[str, Any]) -> None:
        self._formula: Any = self._formula_class(**formula)
        self._place: Any = self._place_class(self._formula, **place)

    def _use_tiers(self) -> None:
        """Lets the policies of Blocks decide where state lies, in a run with tiers."""
        context = current()
        if context is None or isinstance(self._place, OnDisk):
            return
        if current_engine(context).drives is not None:
            self._place = OnDisk(self._place, context, self.formula_of)

    def _updates(self, p: Tensor) -> bool:
        """Whether a step computes an update of ``p``; an empty shard has only a state, which scripts may read."""
        return p.numel() > 0 or self.formula_of(p).is_whole

    @property
    def state(self) -> Any:
        """State by parameter. Reading it waits for pending updates."""
        self._place.show_state()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def formula_of(self, p: Tensor) -> Formula:
        """Returns the formula that updates ``p``."""
        formula: Formula = self._formula
        return formula

    def has_master(self, p: Tensor) -> bool:
        """Whether the state of ``p`` has an fp32 copy of its value."""
        return bool(self._place.has_master(p))

    def is_on_disk(self, p: Tensor) -> bool:
        """Whether the state of ``p`` is in a file, see ``BlockPolicy(optimizer="disk")``."""
        return bool(self._place.is_on_disk(p))

    @property
    def _states(self) -> dict[Tensor, dict[str, Any]]:
        """The state by parameter, without a wait."""
        states: dict[Tensor, dict[str, Any]] = self.__dict__["state"]
        return states

    def _create_state(self, wanted: Mapping[Tensor, Sequence[str]]) -> None:
        """Allocates missing arrays of parameters as zeros, and masters of their current values.

        Tensors made in one call are contiguous.
        """
        place = self._place
        kinds: dict[tuple[torch.device, tuple[str, ...], torch.dtype, bool], list[Tensor]] = {}
        for p, names in wanted.items():
            state = self._states.get(p, {})
            lacking = tuple(name for name in names if name not in state)
            if MASTER not in state and place.has_master(p) and not place.shares_master(p):
                lacking += (MASTER,)
            kinds.setdefault((place.device_of(p), lacking, place.dtype_of(p), self._updates(p)), []).append(p)
        for (device, lacking, dtype, is_updated), members in kinds.items():
            self._allocate_state(members, lacking, dtype, device)
            if is_updated:
                place.note_new_state(members, lacking, self._states)

    def _allocate_state(
        self, parameters: Sequence[Tensor], names: tuple[str, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        dtypes = [torch.float32 if name == MASTER else dtype for name in names]
        arrays = self._place.allocate(parameters, names, dtypes, device)
        for k, p in enumerate(parameters):
            state = self._states.setdefault(p, {"step": 0})
            for name, array in zip(names, arrays, strict=True):
                state[name] = array[k]
            if MASTER in names:
                state[MASTER].copy_(p.detach())
            elif MASTER not in state and self._place.has_master(p):
                state[MASTER] = p.detach()
            self._mark_seen(p)

    def _mark_seen(self, p: Tensor) -> None:
        if self._place.has_master(p) and not self._place.shares_master(p):
            self._seen[p] = value_mark(p)

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """Returns the state of this rank's shards, or of full parameters.

        Moments in 8 bits are decoded to bf16, which is exact: they load without being rounded again.

        Args:
            gather: return every tensor as the full 1-D fp32 CPU tensor (the momentum of Muon in the shape of the
                matrix), the same on all ranks, loadable at any number of ranks; collective. Otherwise tensors are this
                rank's own, and load at the same layout only.

        Returns:
            The layout of `torch.optim.Optimizer.state_dict`, with ``is_whole`` and, for the state of one rank of
            several, ``layout``. `torch.load` reads a saved one with its defaults.

        Raises:
            CommunicationError: on GPUs, after a failure: the state may have been computed from incomplete data.
        """
        with failing_together("optimizer state") if gather and current() is not None else nullcontext():
            out: dict[str, Any] = super().state_dict()
        require_intact(f"{type(self).__name__}.state_dict()")
        if gather:
            out["state"] = gathered_state(self)
        else:
            out["state"] = readable_state(self, out["state"])
            if (layout := layout_of(self)) is not None:
                out["layout"] = layout
        out["is_whole"] = bool(gather)
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state: of this rank at the same layout, gathered, or of torch's optimizer; of this formula.

        Args:
            state_dict: not modified, and none of its tensors is kept.

        Raises:
            ValueError: groups or sizes do not match, or it is of one rank at another layout; nothing changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        groups, found = read_state(self, state_dict)
        self.__setstate__({"param_groups": groups})
        self.state.clear()
        self._seen.clear()
        self._create_state(
            {p: [n for n in self.formula_of(p).arrays if n in entry] for p, entry in found.items()}
        )
        for p, entry in found.items():
            state = self.state[p]
            state["step"] = entry["step"]
            for name in (*self.formula_of(p).arrays, MASTER):
                if name in entry and name in state:
                    store_values(state[name], entry[name], name)
            self._mark_seen(p)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ---- copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        own = {name: getattr(self, name) for name in _OWN}
        return {**state, **own, **_settings_of(self._formula), **_settings_of(self._place)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_place" not in self.__dict__:
            state = dict(state)
            self._compose(*(_take_settings(state, kind) for kind in (self._formula_class, self._place_class)))
        super().__setstate__(state)
        self._use_tiers()


def _settings_of(part: Formula | Place) -> dict[str, Any]:
    return {f"_{name}": getattr(part, name) for name in part.settings}


def _take_settings(state: dict[str, Any], kind: type[Formula] | type[Place]) -> dict[str, Any]:
    """Removes settings from the state of a copy; one of an earlier version may lack some."""
    return {name: state.pop(f"_{name}") for name in kind.settings if f"_{name}" in state}
