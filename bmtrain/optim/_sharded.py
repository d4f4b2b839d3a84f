"""Base classes of optimizers over shards, of a formula and a place: loss scale, masters, order of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._base.arguments import require_number
from .._base.deprecate import warn_once
from .._base.opaque import opaque
from .._base.tensors import gradient_of
from .._C import StepCheck
from ..global_var import num_losses
from ._arrays import MASTER, take_changed_value, value_mark
from ._grad_stats import check_overflow, forget_unsent, parameters_of
from ._narrow import stored_shape
from ._options import check_group, listed_parameters
from ._stateful import StatefulOptimizer
from ._updates import Journal, Update
from .formulas import Part
from .places.ranges import ranges_of, split

_UNSET: Any = object()
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: A group, its parameters that a step covers, and the updated ones with their gradients.
_Group = tuple[dict[str, Any], Sequence[Tensor], Sequence[tuple[Tensor, Tensor]]]


class ShardedOptimizer(StatefulOptimizer):
    """An optimizer over shards and plain parameters. 16-bit parameters have an fp32 master.

    Args:
        params: parameters, or group dicts.
        defaults: options of groups that do not name them.
        formula: settings of the formula.
        place: settings of the place.
        scale: initial loss scale of the optimizer; None for none.
    """

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
        super().__init__(listed_parameters(params), defaults)

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
    @opaque
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

    @opaque
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fills all gradients with zeros, or sets them to None; drops unsent gradients."""
        parameters = list(parameters_of(self.param_groups))
        forget_unsent(parameters)
        if not self._place.zero_grad(parameters, set_to_none):
            super().zero_grad(set_to_none=set_to_none)


class OffloadOptimizer(ShardedOptimizer):
    """An optimizer whose place is `OnHost`."""

    @property
    def resident_fraction(self) -> float:
        """Share of the blocks whose state is on the run device, known from the first step on."""
        return float(self._place.resident_fraction)

    @property
    def staging_bytes(self) -> int:
        """Bytes of page-locked host memory for copies of a GPU's gradients and parameters; 0 on CPU ranks."""
        return int(self._place.staging_bytes)


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
