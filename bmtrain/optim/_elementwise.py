"""Base class of elementwise optimizers: loss scale, state, masters, order of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from .._base.arguments import require_number
from .._base.unseen import gradient_of
from .._C import OffloadUpdate
from .._ranks.context import require_intact
from ..global_var import num_losses
from ._arrays import MASTER, allocate, gathered_state, layout_of, read_state, take_changed_value
from ._grad_stats import check_overflow, forget_unsent, parameters_of
from ._torch_base import TorchOptimizer
from ._updates import Part, Ranges, Update

__all__ = ["ElementwiseOptimizer", "check_scale"]

_UNSET: Any = object()
_OWN = ("_early", "_owned_scale", "_steps_since_last_scale", "_seen")  # attributes that copies keep
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: A group, its parameters that a step covers, and the updated ones with their gradients.
_Group = tuple[dict[str, Any], Sequence[Tensor], Sequence[tuple[Tensor, Tensor]]]


class ElementwiseOptimizer(TorchOptimizer):
    """An elementwise optimizer over shards and plain parameters.

    16-bit parameters have an fp32 master. A subclass defines, by the hooks below, the arrays of its formula and the
    computation of a list of updates; the place of computation is defined by `OnDevice` and `Offloaded`.

    Args:
        params: parameters, or group dicts.
        defaults: options of groups that do not name them.
        scale: initial loss scale of the optimizer; None for none.
    """

    _bmtrain_optimizer = True
    #: Name of the formula in the core: `adam_step`, the operator `adam_` and `OffloadUpdate.add_adam`.
    _formula: str
    #: The arrays that the formula may keep for each element, and the arrays required to load a state.
    _arrays: tuple[str, ...] = ()
    _needed_arrays: tuple[str, ...] = ()
    #: Dtype of the arrays.
    _state_dtype = torch.float32

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], scale: float | None = None) -> None:
        self._owned_scale: float | None = None if scale is None else float(scale)
        self._steps_since_last_scale = 0
        # Mark of the value last written by this optimizer, by parameter with a master, see _value_mark.
        self._seen: dict[Tensor, tuple[int, int]] = {}
        self._early: set[int] = set()  # ids of parameters that this step has updated already
        self._check_options(defaults)
        if not isinstance(params, Iterable):
            raise TypeError(
                f"params: expected parameters or group dicts, got {params!r:.80} ({type(params).__name__})"
            )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; missing options default to the constructor's.

        Raises:
            ValueError: an option is out of its range.
        """
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    # ---- hooks: the formula

    def _check_options(self, options: dict[str, Any]) -> None:
        """Raises ValueError for an option of a group that is out of its range."""
        raise NotImplementedError

    def _arrays_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the arrays that a step with the options of ``group`` needs."""
        return self._arrays

    def _options_of(self, group: dict[str, Any], *, is_low: bool, scale: float) -> dict[str, Any]:
        """Returns the options for the core, for the 16-bit (``is_low``) or the fp32 parameters of a group."""
        raise NotImplementedError

    def _lists_of(self, ranges: Ranges) -> Sequence[Any]:
        """Returns the lists of tensors for the core, in its order."""
        raise NotImplementedError

    def _compute(self, ranges: Ranges, parts: Sequence[Part], **flags: bool) -> Any:
        """Updates the ranges of ``parts`` in place by the core; ``flags`` are options of the operator."""
        sizes, groups = _groups_of(parts)
        return _ops.step_of_groups(self._formula, self._lists_of(ranges), sizes, groups, **flags)

    def _add_to(self, update: OffloadUpdate, ranges: Ranges, parts: Sequence[Part]) -> None:
        """Adds the ranges to an update of the core that continues after the step."""
        getattr(update, f"add_{self._formula}")(*self._lists_of(ranges), *_groups_of(parts))

    # ---- hooks: place of computation

    def _start_step(self) -> None:
        """Called at the start of a step."""

    def _apply(self, parts: list[Part]) -> None:
        """Computes a step (which may have no updates), or its early part.

        The state's ``step`` and the parameters' versions already count it.
        """
        raise NotImplementedError

    def _note_new_state(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        """Called for new state entries of parameters, in allocations without other references."""

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

    @property
    def _states(self) -> dict[Tensor, dict[str, Any]]:
        """The state by parameter, without the wait of `state` for pending updates."""
        states: dict[Tensor, dict[str, Any]] = self.__dict__["state"]
        return states

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
        rest = [(group, _without(group["params"], early)) for group in self.param_groups]
        ready = [(group, members, _with_gradients(members)) for group, members in rest]
        owned = scale is _UNSET and self._owned_scale is not None
        if scale is _UNSET:
            scale = self.scale
        else:
            check_scale(scale)
        if owned:
            if check_overflow(self.param_groups):
                raise OverflowError("Gradient overflow")
            self._steps_since_last_scale += 1
        if not early:
            self._start_step()
        self._step_members(ready, float(scale))
        return loss

    @torch.no_grad()
    def step_early(self, group: dict[str, Any], members: Sequence[Tensor]) -> None:
        """Updates some parameters of a group now, by unscaled gradients; the next :meth:`step` skips them."""
        if not self._early:
            self._start_step()
        self._early.update(map(id, members))
        self._step_members([(group, members, _with_gradients(members))], 1.0)

    def _step_members(self, groups: Sequence[_Group], scale: float) -> None:
        for group, _, pairs in groups:
            names = self._arrays_of(group)
            _check_bounds(pairs, self._states, names[0] if names else MASTER)
        parts = [part for group, _, pairs in groups for part in self._parts_of(group, pairs, scale)]
        # Before the updates: later, an access to a parameter waits for its pending update. Empty shards too: all ranks
        # see the same parameters change.
        torch.autograd.graph.increment_version(
            [p for _, members, _ in groups for p in members if gradient_of(p) is not None and p.requires_grad]
        )
        for part in parts:
            for update in part.updates:
                self._mark_seen(update.param)
        self._apply(parts)

    def _parts_of(
        self, group: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]], scale: float
    ) -> Iterator[Part]:
        names, states = self._arrays_of(group), self._states
        required = frozenset(names)
        fresh = [(state := states.get(p)) is None or not required <= state.keys() for p, _ in pairs]
        if any(fresh):
            self._create_state({p: names for (p, _), is_fresh in zip(pairs, fresh, strict=True) if is_fresh})
        low: list[Update] = []
        wide: list[Update] = []
        for (p, grad), is_fresh in zip(pairs, fresh, strict=True):
            kind = wide if p.dtype is torch.float32 else low
            kind.append(Update(p, grad, self._prepare(p), is_fresh))
        for updates in (low, wide):
            if updates:
                yield Part(updates, names, self._options_of(group, is_low=updates is low, scale=scale))

    def _prepare(self, p: Tensor) -> dict[str, Any]:
        """Returns the state with its step count advanced and its master up to date."""
        state = self._states[p]
        if (MASTER in state) != self.has_master(p):
            self._follow_dtype(p, state)
        state["step"] += 1
        master = state.get(MASTER)
        if master is not None:
            if self.shares_master(p):
                if master.data_ptr() != p.data_ptr():
                    state[MASTER] = p.detach()
            elif self._seen.get(p) != _value_mark(p):
                take_changed_value(master, p)
        return state

    def _follow_dtype(self, p: Tensor, state: dict[str, Any]) -> None:
        """Adds a master to a parameter that became 16-bit since its last step; drops the master of an fp32 one."""
        if MASTER in state:
            del state[MASTER]
        else:
            self._create_state({p: ()})

    def _mark_seen(self, p: Tensor) -> None:
        if self.has_master(p) and not self.shares_master(p):
            self._seen[p] = _value_mark(p)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fills all gradients with zeros, or sets them to None; drops unsent gradients."""
        forget_unsent(parameters_of(self.param_groups))
        super().zero_grad(set_to_none=set_to_none)

    # ---- state

    def has_master(self, p: Tensor) -> bool:
        """Whether the state of ``p`` has an fp32 copy of its value."""
        return p.dtype != torch.float32

    def shares_master(self, p: Tensor) -> bool:
        """Whether that copy is the parameter itself."""
        return False

    def _state_device(self, p: Tensor) -> torch.device:
        return p.device

    def _create_state(self, wanted: Mapping[Tensor, Sequence[str]]) -> None:
        """Allocates missing arrays of parameters as zeros, and masters of their current values.

        Tensors made in one call are contiguous.
        """
        kinds: dict[tuple[torch.device, tuple[str, ...]], list[Tensor]] = {}
        for p, names in wanted.items():
            state = self._states.get(p, {})
            lacking = tuple(name for name in names if name not in state)
            if MASTER not in state and self.has_master(p) and not self.shares_master(p):
                lacking += (MASTER,)
            kinds.setdefault((self._state_device(p), lacking), []).append(p)
        for (device, lacking), members in kinds.items():
            self._allocate_state(members, lacking, device)
            self._note_new_state(members, lacking)

    def _allocate_state(
        self, parameters: Sequence[Tensor], names: tuple[str, ...], device: torch.device
    ) -> None:
        dtypes = [torch.float32 if name == MASTER else self._state_dtype for name in names]
        arrays = allocate([p.shape for p in parameters], dtypes, device)
        for k, p in enumerate(parameters):
            state = self._states.setdefault(p, {"step": 0})
            for name, array in zip(names, arrays, strict=True):
                state[name] = array[k]
            if MASTER in names:
                state[MASTER].copy_(p.detach())
            elif MASTER not in state and self.has_master(p):
                state[MASTER] = p.detach()
            self._mark_seen(p)

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """Returns the state of this rank's shards, or of full parameters.

        Args:
            gather: return every tensor as the full 1-D fp32 CPU tensor, the same on all ranks, loadable at any number
                of ranks; collective. Otherwise tensors are this rank's own, and load at the same layout only.

        Returns:
            The layout of `torch.optim.Optimizer.state_dict`, with ``is_whole`` and, for the state of one rank of
            several, ``layout``. `torch.load` reads a saved one with its defaults.

        Raises:
            CommunicationError: on GPUs, after a failure: the state may have been computed from incomplete data.
        """
        out: dict[str, Any] = super().state_dict()
        require_intact(f"{type(self).__name__}.state_dict()")
        if gather:
            out["state"] = gathered_state(self)
        elif (layout := layout_of(self)) is not None:
            out["layout"] = layout
        out["is_whole"] = bool(gather)
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state: of this rank at the same layout, or gathered; of this formula, offloaded or not.

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
        self._create_state({p: [n for n in self._arrays if n in entry] for p, entry in found.items()})
        for p, entry in found.items():
            state = self.state[p]
            state["step"] = entry["step"]
            for name in (*self._arrays, MASTER):
                if name in entry and name in state:
                    state[name].copy_(entry[name])
            self._mark_seen(p)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, **{name: getattr(self, name) for name in self._own_attributes()}}

    def _own_attributes(self) -> tuple[str, ...]:
        return _OWN


def _groups_of(parts: Sequence[Part]) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the number of updates of each part, and its options."""
    return [len(part.updates) for part in parts], [part.options for part in parts]


def _value_mark(p: Tensor) -> tuple[int, int]:
    """Returns a mark that changes with writes from outside: in place, by a load, or through ``data``."""
    return getattr(p, "_unversioned_writes", 0), p._version


def _check_bounds(
    pairs: Sequence[tuple[Tensor, Tensor]], states: Mapping[Tensor, Mapping[str, Any]], array: str
) -> None:
    """Refuses the state of a parameter whose shard now has other bounds; checks one array, as all are made together."""
    for p, _ in pairs:
        state = states.get(p)
        found = state.get(array) if state else None
        if found is not None and found.numel() != p.numel():
            raise RuntimeError(
                f"optimizer state: expected {p.numel()} elements for this rank's shard of a parameter, got "
                f"{found.numel()}: its shards got other bounds when it was put into a Block, or its Block "
                "converted to another dtype. Take the optimizer's state_dict(gather=True) before that and load it "
                "afterwards, or make a new optimizer"
            )


def _without(parameters: Sequence[Tensor], ids: set[int]) -> Sequence[Tensor]:
    return [p for p in parameters if id(p) not in ids] if ids else parameters


def _with_gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters that a step updates, with their gradients."""
    pairs = []
    for p in parameters:
        grad = gradient_of(p)
        if grad is None or not p.requires_grad or not p.numel():
            continue
        if grad.layout != torch.strided:
            raise RuntimeError(f"step: expected dense gradients, got one of layout {grad.layout}")
        if p.dtype not in _DTYPES:
            raise RuntimeError(f"step: expected float32, float16 or bfloat16 parameters, got {p.dtype}")
        pairs.append((p, grad.detach()))
    return pairs


def check_scale(scale: float) -> None:
    require_number("scale", scale)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale: expected a finite number above 0, got {scale}")
