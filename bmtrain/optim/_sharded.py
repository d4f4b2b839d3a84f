"""Base class of optimizers over shards, of a formula and a place: loss scale, state, masters, order of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._base.arguments import require_number
from .._base.deprecate import warn_once
from .._base.tensors import gradient_of
from .._C import StepCheck
from .._engine.engine import current_engine
from .._ranks.agree import failing_together
from .._ranks.context import current, require_intact
from ..global_var import num_losses
from ._arrays import (
    MASTER,
    gathered_state,
    layout_of,
    read_state,
    readable_state,
    take_changed_value,
    value_mark,
)
from ._grad_stats import check_overflow, forget_unsent, parameters_of
from ._narrow import store_values, stored_shape
from ._options import check_group
from ._untraced import UntracedOptimizer
from ._updates import Journal, Update
from .formulas import Formula, Part
from .places import OnDisk, Place
from .places.ranges import ranges_of, split

_UNSET: Any = object()
_OWN = ("_early", "_owned_scale", "_steps_since_last_scale", "_seen")  # attributes that copies keep
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: A group, its parameters that a step covers, and the updated ones with their gradients.
_Group = tuple[dict[str, Any], Sequence[Tensor], Sequence[tuple[Tensor, Tensor]]]


class ShardedOptimizer(UntracedOptimizer):
    """An optimizer over shards and plain parameters. 16-bit parameters have an fp32 master.

    Args:
        params: parameters, or group dicts.
        defaults: options of groups that do not name them.
        formula: settings of the formula.
        place: settings of the place.
        scale: initial loss scale of the optimizer; None for none.
    """

    _bmtrain_optimizer = True
    #: What is computed, and where.
    _formula_class: type[Formula]
    _place_class: type[Place]
    #: Whether `step_early` may be called, which each rank decides by itself.
    _may_step_early = True
    #: Where steps are recorded; None: nowhere.
    _journal: Journal | None = None

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        formula: Mapping[str, Any] = MappingProxyType({}),
        place: Mapping[str, Any] = MappingProxyType({}),
        scale: float | None = None,
    ) -> None:
        self._compose(formula, place)
        if scale is not None:
            check_scale(scale)
            warn_once(
                "optimizer.scale",
                f"{type(self).__name__}(scale=) is deprecated: write OptimManager(loss_scale=...)",
                stacklevel=3,
            )
        self._owned_scale: float | None = None if scale is None else float(scale)
        self._steps_since_last_scale = 0
        # Mark of the value last written by this optimizer, by parameter with a master, see value_mark.
        self._seen: dict[Tensor, tuple[int, int]] = {}
        self._early: set[int] = set()  # ids of parameters that this step has updated already
        self._formula.check(defaults)
        if not isinstance(params, Iterable):
            raise TypeError(
                f"params: expected parameters or group dicts, got {params!r:.80} ({type(params).__name__})"
            )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; missing options default to the constructor's.

        Raises:
            TypeError, ValueError: it has no ``params``; an option is of another type or out of its range.
        """
        check_group(param_group)
        options = {**self.defaults, **param_group}
        self._formula.formula_in(options).check(options)
        super().add_param_group(param_group)
        self._place.note_new_group()
        self._use_tiers()
        self._place.reserve(self.param_groups[-1]["params"])

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

    # ---- loss scale

    @property
    def scale(self) -> float:
        """The loss scale this optimizer owns; 1 if it owns none."""
        return 1 if self._owned_scale is None else self._owned_scale

    @property
    def steps_since_last_scale(self) -> int:
        """Number of steps with the current scale."""
        return self._steps_since_last_scale

    def loss_scale(self, loss: Tensor) -> Tensor:
        """Scales a loss for backward: by `scale`, and to the mean over the ranks' losses."""
        scaled: Tensor = loss * (self.scale / num_losses())
        return scaled

    def justify_scale(self, scale: float) -> None:
        """Sets the loss scale and restarts the count of steps with it."""
        check_scale(scale)
        self._owned_scale = float(scale)
        self._steps_since_last_scale = 0

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, scale: float = _UNSET) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: re-evaluates the model; called first, with gradients enabled.
            scale: current factor of the gradients. Default: the optimizer's own scale; then the gradients of all ranks
                are checked first, which is collective. Without an own scale: 1.

        Returns:
            The result of the closure, or None.

        Raises:
            OverflowError: with an owned scale, on all ranks, if any rank's gradient is not finite; nothing changed.
            RuntimeError: a gradient is sparse, or its parameter neither fp32, fp16 nor bf16; nothing changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        early, self._early = self._early, set()
        if not early:
            self._start_step()
        rest = [(group, _without(group["params"], early)) for group in self.param_groups]
        ready = [(group, members, self._with_gradients(group, members)) for group, members in rest]
        owned = scale is _UNSET and self._owned_scale is not None
        if scale is _UNSET:
            scale = self.scale
        else:
            check_scale(scale)
        if owned:
            if check_overflow(self.param_groups):
                raise OverflowError("Gradient overflow")
            self._steps_since_last_scale += 1
        self._step_members(ready, float(scale), is_early=False)
        return loss

    @torch.no_grad()
    def step_checked(
        self, scale: float, factors: Mapping[Tensor, list[float]]
    ) -> list[tuple[Tensor, str, int, int]]:
        """Updates every parameter that has a gradient, of a copy in host memory, without hooks: in any thread.

        Args:
            scale: current factor of the gradients.
            factors: what gradients are multiplied by first, in place, by parameter.

        Returns:
            For each parameter and array ("value", "gradient", or its name in the state) the sums of its words before
            and after the update. See [Note: Checked steps] in the core.
        """
        groups = [(group, self._with_gradients(group, group["params"])) for group in self.param_groups]
        parts = [part for group, pairs in groups for part in self._parts_of(group, pairs, scale)]
        return self._apply_by_pieces(parts, factors, self._open_journal)

    @property
    def _open_journal(self) -> Journal | None:
        return self._journal if self._journal is not None and self._journal.is_open else None

    def _apply_by_pieces(
        self, parts: Iterable[Part], factors: Mapping[Tensor, list[float]], journal: Journal | None = None
    ) -> list[tuple[Tensor, str, int, int]]:
        """Updates parts in host memory; returns the sums of `step_checked`, none of a step that is recorded."""
        found: list[tuple[Tensor, str, int, int]] = []
        for part in parts:
            updates = [u._replace(grad=u.grad.contiguous()) for u in part.updates]
            alone = [part._replace(updates=[u]) for u in updates]
            ranges = ranges_of(updates, part.names)
            of_each = [factors.get(u.param, []) for u in updates]
            if journal is not None:
                check = StepCheck(of_each, journal.core, [journal.first_pieces[u.param] for u in updates])
            else:
                check = StepCheck(of_each)
            part.formula.compute(ranges, alone, as_torch=self._place.as_torch, check=check)
            if journal is None:
                arrays = (*((MASTER,) if ranges.rounded else ()), "value", *part.names, "gradient")
                keys = [(u.param, array) for u in updates for array in arrays]
                found += [(*key, *sums) for key, *sums in zip(keys, check.before, check.after, strict=True)]
        return found

    @torch.no_grad()
    def step_early(self, groups: Sequence[tuple[dict[str, Any], Sequence[Tensor]]]) -> None:
        """Updates some parameters of groups now, by unscaled gradients; the next :meth:`step` skips them."""
        if not self._early:
            self._start_step()
        for _, members in groups:
            self._early.update(map(id, members))
        ready = [(group, members, self._with_gradients(group, members)) for group, members in groups]
        self._step_members(ready, 1.0, is_early=True)

    def _start_step(self) -> None:
        self._place.start_step(self.param_groups, self._states)
        self._formula.start_step()

    def _with_gradients(
        self, group: dict[str, Any], members: Iterable[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns the parameters that a step updates, with their gradients."""
        pairs = []
        for p in members:
            grad = gradient_of(p)
            if grad is None or not p.requires_grad:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(f"step: expected dense gradients, got one of layout {grad.layout}")
            if p.dtype not in _DTYPES:
                wanted = "float32, float16 or bfloat16 parameters"
                raise RuntimeError(f"step: expected {wanted}, got {p.dtype}; torch.optim takes others")
            # Of an empty shard the gradient itself: another tensor of that memory would count as a reader.
            pairs.append((p, grad.detach() if self._updates(p) else grad))
        return pairs

    def _step_members(self, groups: Sequence[_Group], scale: float, *, is_early: bool) -> None:
        self._place.begin_updates([p for _, _, pairs in groups for p, _ in pairs], is_early=is_early)
        for group, _, pairs in groups:
            names = self._formula.formula_in(group).arrays_of(group)
            _check_bounds(pairs, self._states, names[0] if names else MASTER)
        parts = [part for group, _, pairs in groups for part in self._parts_of(group, pairs, scale)]
        # Before the updates: later, an access to a parameter waits for its pending update. Empty shards too: all ranks
        # see the same parameters change.
        torch.autograd.graph.increment_version(
            [p for _, members, _ in groups for p in members if gradient_of(p) is not None and p.requires_grad]
        )
        for part in parts:
            for update in part.updates:
                if MASTER in update.state:
                    self._mark_seen(update.param)
        if (journal := self._open_journal) is not None:
            recorded, others = split(parts, lambda _, u: u.param in journal.first_pieces)
            self._apply_by_pieces(recorded, {}, journal)
            parts = list(others)
        self._place.apply(parts, self._states, is_early=is_early)

    def _parts_of(
        self, group: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]], scale: float
    ) -> Iterator[Part]:
        formula, states = self._formula.formula_in(group), self._states
        names = formula.arrays_of(group)
        required = frozenset(names)
        fresh = [(state := states.get(p)) is None or not required <= state.keys() for p, _ in pairs]
        if any(fresh):
            self._create_state({p: names for (p, _), is_fresh in zip(pairs, fresh, strict=True) if is_fresh})
        low: list[Update] = []
        wide: list[Update] = []
        for (p, grad), is_fresh in zip(pairs, fresh, strict=True):
            self._prepare(p, states[p])
            if self._updates(p):
                kind = wide if p.dtype is torch.float32 else low
                begins = is_fresh or (self._journal is not None and p in self._journal.fresh)
                kind.append(Update(p, grad, states[p], begins))
        for updates in (low, wide):
            if updates:
                numbers = formula.numbers_of(group, is_low=updates is low, scale=scale)
                yield Part(updates, names, numbers, formula)

    def _prepare(self, p: Tensor, state: dict[str, Any]) -> None:
        """Advances the step count of a state, and brings its master up to date."""
        if (MASTER in state) != self._place.has_master(p):
            self._follow_dtype(p, state)
        state["step"] += 1
        master = state.get(MASTER)
        if master is not None:
            if self._place.shares_master(p):
                if master.data_ptr() != p.data_ptr():
                    state[MASTER] = p.detach()
            elif self._seen.get(p) != value_mark(p):
                self._place.note_write(p)
                take_changed_value(master, p)

    def _follow_dtype(self, p: Tensor, state: dict[str, Any]) -> None:
        """Adds a master to a parameter that became 16-bit since its last step; drops the master of an fp32 one."""
        if MASTER in state:
            del state[MASTER]
        else:
            self._create_state({p: ()})

    def _mark_seen(self, p: Tensor) -> None:
        if self._place.has_master(p) and not self._place.shares_master(p):
            self._seen[p] = value_mark(p)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fills all gradients with zeros, or sets them to None; drops unsent gradients."""
        forget_unsent(parameters_of(self.param_groups))
        if not self._place.zero_grad(self.param_groups, set_to_none):
            super().zero_grad(set_to_none=set_to_none)

    def _updates(self, p: Tensor) -> bool:
        """Whether a step computes an update of ``p``; an empty shard has only a state, which scripts may read."""
        return p.numel() > 0 or self.formula_of(p).is_whole

    # ---- state

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


def _check_bounds(
    pairs: Sequence[tuple[Tensor, Tensor]], states: Mapping[Tensor, Mapping[str, Any]], array: str
) -> None:
    """Refuses the state of a parameter whose shard now has other bounds; checks one array, as all are made together."""
    for p, _ in pairs:
        state = states.get(p)
        found = state.get(array) if state else None
        if found is None:
            continue
        if found.numel() != (needed := stored_shape(p.shape, found.dtype).numel()):
            raise RuntimeError(
                f"optimizer state: expected {needed} elements for this rank's shard of a parameter, got "
                f"{found.numel()}: its shards got other bounds when it was put into a Block, or its Block "
                "converted to another dtype. Take the optimizer's state_dict(gather=True) before that and load it "
                "afterwards, or make a new optimizer"
            )


def _without(parameters: Sequence[Tensor], ids: set[int]) -> Sequence[Tensor]:
    return [p for p in parameters if id(p) not in ids] if ids else parameters


def check_scale(scale: float) -> None:
    require_number("scale", scale)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale: expected a finite number above 0, got {scale}")
