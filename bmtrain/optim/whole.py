"""Any optimizer over whole parameters, each updated by one rank, see [Note: Owners]."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._base.arguments import require_keys
from .._base.tensors import data_of, gradient_of
from .._ranks import context
from .._ranks.agree import failing_together, largest
from .._ranks.context import require_intact
from .._ranks.objects import allgather_objects
from ..parameter import whole_shape
from ._arrays import MASTER, check_layout, layout_of, numbered_parameters, take_changed_value, value_mark
from ._grad_stats import forget_unsent, parameters_of
from ._options import check_group, listed_parameters
from ._owners import Team, Transfer, is_here, owners_of
from ._untraced import UntracedOptimizer

__all__ = ["WholeOptimizer", "whole_matrix"]


def whole_matrix(cls: type[torch.optim.Optimizer], params: Iterable[Any], **options: Any) -> WholeOptimizer:
    """Makes an optimizer whose update needs whole parameters work on shards.

    Each parameter has one owner among the ranks that share it or, under tensor parallelism, its slices. In a step the
    owner gathers the gradient, steps ``cls`` over whole parameters, and sends the new values; it keeps the state of
    ``cls`` for the parameters that it owns, and their values in fp32. Parameters are divided by work and size. The
    results are the bits of ``cls`` in one process with the same gradients, on any number of ranks; a 16-bit parameter
    is the rounding of an fp32 one that ``cls`` updates.

    Args:
        cls: a `torch.optim.Optimizer`. Its update of a parameter must depend on that parameter, its gradient and the
            options only, not on other parameters.
        params: parameters, with names or without, or group dicts with options of ``cls``.
        options: further arguments of ``cls``.

    Returns:
        An optimizer with the groups of ``cls``, for schedules, `OptimManager` and checkpoints.
        ``state_dict(gather=True)`` has the form of ``cls.state_dict()`` over whole parameters.

    Raises:
        TypeError: ``cls`` is no optimizer class, or ``params`` has something else than parameters.
        ValueError: a step of ``cls`` needs a closure, as of `torch.optim.LBFGS`.

    Example:
        >>> model = bmtrain.nn.Linear(4, 3)
        >>> optimizer = bmtrain.optim.whole_matrix(torch.optim.Adafactor, model.parameters(), lr=0.01)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"cls: expected a subclass of torch.optim.Optimizer, got {cls!r:.80}")
    items = listed_parameters(params)
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"cls: expected an optimizer that steps by gradients, got {cls.__name__}, whose step evaluates a closure"
        )
    return WholeOptimizer(cls, items, options)


class WholeOptimizer(UntracedOptimizer):
    """The optimizer that :func:`whole_matrix` returns."""

    _bmtrain_optimizer = True
    _keeps_whole_state = True
    owner_bytes = 0  # of whole gradients, in the last step

    def __init__(self, cls: type[torch.optim.Optimizer], items: list[Any], options: dict[str, Any]) -> None:
        groups = list(map(_listed, items if items and isinstance(items[0], dict) else [{"params": items}]))
        self._members = _Members([_parameter(item) for group in groups for item in group["params"]])
        self._inner = cls([self._members.stand_in(group) for group in groups], **options)
        super().__init__(groups, self._inner.defaults)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options(inner))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its parameters get owners of their own."""
        if hasattr(self, "param_groups") and len(self.param_groups) == len(self._inner.param_groups):
            param_group = _listed(param_group)
            self._members.add([_parameter(item) for item in param_group["params"]])
            self._inner.add_param_group(self._members.stand_in(param_group))
        super().add_param_group(param_group)

    def owns(self, p: Tensor) -> bool:
        """Whether this rank updates ``p``."""
        return p in self._members.masters

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1.0) -> Any:
        """Updates every parameter that has a gradient. Collective.

        Args:
            closure: re-evaluates the model; called first, with gradients enabled.
            scale: factor of the gradients.

        Returns:
            The result of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_groups()
        ready = [p for p in self._parameters() if p.requires_grad and gradient_of(p) is not None]
        transfers = [_Step(p, self._members) for p in ready if is_here(p)]
        self._members.update_values(self._parameters())  # of all: on another stage one may have no gradient
        torch.autograd.graph.increment_version(ready)
        for transfer in transfers:
            transfer.gather()
        for transfer in transfers:
            transfer.set_gradient(scale)
        gradients = [master.grad for master in self._members.masters.values() if master.grad is not None]
        self.owner_bytes = sum(gradient.nbytes for gradient in gradients)
        has_peers = context.current() is not None
        with failing_together(f"{type(self._inner).__name__}.step") if has_peers else nullcontext():
            self._inner.step()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options(inner))
        for transfer in transfers:
            transfer.scatter()
        for transfer in transfers:
            transfer.finish()
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fills all gradients with zeros, or sets them to None; drops unsent gradients."""
        forget_unsent(parameters_of(self.param_groups))
        super().zero_grad(set_to_none=set_to_none)

    # ---- state

    @property
    def state(self) -> Any:
        """State of the parameters that this rank owns, of the whole parameter each, with its value."""
        found: dict[Tensor, dict[str, Any]] = {}
        if "_inner" in self.__dict__:
            for p, master in self._members.masters.items():
                if entry := self._inner.state.get(master):
                    found[p] = {**entry, MASTER: master.detach()}
        return found

    @state.setter
    def state(self, value: Any) -> None:
        pass  # torch's constructor sets an empty one

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """Returns the state of this rank's parameters, or of all.

        Args:
            gather: the state of all ranks, on the CPU, the same on all, in the form of the class over whole
                parameters; collective. Otherwise of the parameters that this rank owns.
        """
        require_intact(f"{type(self._inner).__name__}.state_dict()")
        self._follow_groups()
        gone = self._members.masters.keys() - set(self._parameters())  # their state stays, as in torch
        kept = {self._members.masters[p]: self._inner.state.pop(self._members.masters[p], {}) for p in gone}
        try:
            state = self._inner.state_dict()
        finally:
            self._inner.state.update((master, entry) for master, entry in kept.items() if entry)
        entries = {
            number: dict(state["state"][number])
            for number, p in enumerate(self._parameters())
            if self.owns(p) and number in state["state"]
        }
        for number, p in enumerate(self._parameters()):
            if number in entries and p.dtype != torch.float32:
                entries[number][MASTER] = self._members.masters[p].detach()
        out = {**state, "state": entries, "is_whole": gather}
        if gather and context.current() is not None:
            merged: dict[int, Any] = {}
            for found in allgather_objects(_on_host(entries)):
                merged = {**found, **merged}
            out["state"] = dict(sorted(merged.items()))
        elif (layout := layout_of(self)) is not None:  # type: ignore[arg-type]
            out["layout"] = layout
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state: of this rank at the same layout, gathered (also from an optimizer over shards), or of the
        class over whole parameters.

        Raises:
            ValueError: groups do not match, or it is of one rank at another layout; nothing changed.
        """
        require_keys("state_dict", state_dict, ("state", "param_groups"))
        self._follow_groups()
        check_layout(state_dict.get("layout"), layout_of(self))  # type: ignore[arg-type]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = self._parameters()
        mine: dict[Any, Any] = {}
        masters: dict[Tensor, Tensor] = {}
        for number, p in zip(numbers, parameters, strict=False):
            entry = dict(state_dict["state"].get(number, ()))
            master = entry.pop(MASTER, None)
            if entry and self.owns(p):
                entry = copy.deepcopy(entry)  # torch keeps the tensors that it loads
                mine[number] = {name: _shaped(value, whole_shape(p)) for name, value in entry.items()}
                if master is not None:
                    masters[p] = master
        self._inner.load_state_dict({"state": mine, "param_groups": state_dict["param_groups"]})
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options(inner))
        self._members.load(masters)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"an optimizer of whole_matrix over {type(self._inner).__name__} has state of this rank's parameters: copy "
            "or save its state_dict(gather=True)"
        )

    def _parameters(self) -> list[Tensor]:
        return numbered_parameters(self)

    def _follow_groups(self) -> None:
        """Gives the groups of the class the options and members of these, which a script may have changed."""
        if new := [p for p in self._parameters() if p not in self._members.owners]:
            self._members.add(new)
        self._inner.param_groups[:] = map(self._members.stand_in, self.param_groups)


class _Members:
    """The parameters, their owners, and at the owner a whole parameter in fp32 for each.

    Attributes:
        owners: group ranks.
        masters: whole parameters, where this rank is the owner.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.owners: dict[Tensor, int] = {}
        self.masters: dict[Tensor, torch.nn.Parameter] = {}
        self._seen: dict[Tensor, tuple[int, int]] = {}
        self._stand_ins: dict[Tensor, torch.nn.Parameter] = {}
        self.add(parameters)

    def add(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            if not isinstance(p, Tensor):
                raise TypeError(f"params: expected parameters, got {p!r:.80} ({type(p).__name__})")
        work = [_work(whole_shape(p)) for p in parameters]
        self.owners.update(zip(parameters, owners_of(work, list(map(Team, parameters))), strict=True))
        for p in parameters:
            is_owner = is_here(p) and Transfer(p, self.owners[p]).is_owner
            dtype = torch.float32 if p.dtype.itemsize < 4 else p.dtype
            value = torch.zeros(whole_shape(p), dtype=dtype, device=p.device if is_owner else "meta")
            self._stand_ins[p] = torch.nn.Parameter(value, p.requires_grad)
            if is_owner:
                self.masters[p] = self._stand_ins[p]
        with torch.no_grad():
            self.update_values(parameters)

    def stand_in(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the group with whole parameters in place of shards; others' are on the meta device."""
        members = [self._stand_ins[_parameter(item)] for item in group["params"]]
        names = [item[0] for item in group["params"] if isinstance(item, tuple)]
        return {**group, "params": list(zip(names, members, strict=True)) if names else members}

    def update_values(self, parameters: Sequence[Tensor]) -> None:
        """Gathers the values that have changed since the last step, on any rank. Collective."""
        marks = [is_here(p) and self._seen.get(p) != value_mark(p) for p in parameters]
        if context.current() is not None:
            marks = largest(marks, "optimizer")
        changed = [p for p, has_changed in zip(parameters, marks, strict=True) if has_changed and is_here(p)]
        transfers = [Transfer(p, self.owners[p]) for p in changed]
        for p, transfer in zip(changed, transfers, strict=True):
            transfer.gather(data_of(p).reshape(-1))
        for p, transfer in zip(changed, transfers, strict=True):
            value = transfer.whole()
            if p in self.masters:
                master, value = self.masters[p].detach(), value.view(whole_shape(p))
                if p.dtype.itemsize < 4:
                    take_changed_value(master, value)
                else:
                    master.copy_(value)
            self.mark(p)

    def mark(self, p: Tensor) -> None:
        """Notes that the owner knows the value of ``p``."""
        self._seen[p] = value_mark(p)

    def load(self, masters: dict[Tensor, Tensor]) -> None:
        """Loads fp32 values; the next step replaces them where parameters have other values."""
        for p, value in masters.items():
            self.masters[p].detach().copy_(value.view(whole_shape(p)))
        self._seen.clear()


class _Step:
    """One parameter in a step."""

    def __init__(self, p: Tensor, members: _Members) -> None:
        self._param, self._members = p, members
        self._transfer = Transfer(p, members.owners[p])

    def gather(self) -> None:
        gradient = gradient_of(self._param)
        assert gradient is not None
        self._transfer.gather(gradient.detach().reshape(-1))

    def set_gradient(self, scale: float) -> None:
        """Gives the whole gradient to the owner's parameter."""
        whole = self._transfer.whole()
        if self._transfer.is_owner:
            master = self._members.masters[self._param]
            gradient = whole.view(master.shape).to(master)
            master.grad = gradient if scale == 1 else gradient / scale

    def scatter(self) -> None:
        """Posts the new values."""
        value = None
        if self._transfer.is_owner:
            master = self._members.masters[self._param]
            master.grad = None
            value = master.detach().to(self._param.dtype).reshape(-1)
        self._transfer.scatter(value, self._param.dtype)

    def finish(self) -> None:
        """Writes the new values."""
        target = data_of(self._param)
        target.copy_(self._transfer.part().view(target.shape))
        self._members.mark(self._param)


def _shaped(value: Any, shape: torch.Size) -> Any:
    """Returns a tensor of an optimizer over shards, the elements of a parameter in one dimension, in its shape."""
    is_flat = isinstance(value, Tensor) and value.dim() == 1 and value.numel() == shape.numel()
    return value.view(shape) if is_flat else value


def _parameter(item: Any) -> Any:
    return item[1] if isinstance(item, tuple) else item


def _listed(group: Any) -> dict[str, Any]:
    check_group(group)
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _work(shape: torch.Size) -> int:
    """Returns an estimate of the cost of an update: products with a matrix of each side."""
    return shape.numel() * sum(shape) if len(shape) > 1 else shape.numel()


def _on_host(value: Any) -> Any:
    """Returns a copy in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value)) if type(value) in (list, tuple) else value
    return value
