"""State of optimizers by the names of the model's parameters, as ``get_optimizer_state_dict`` of torch has it."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .._base.tensors import place_of
from .._files.torch_folder import TorchFolder
from .._ranks.agree import failing_together
from .._ranks.objects import allgather_objects
from ..distributed.checkpoint.manifest import DTYPES, dtype_name
from ..distributed.checkpoint.snapshot import Run, Snapshot
from ..distributed.checkpoint.spread import Spread, spread_of
from ..global_var import context
from ..optim._arrays import MASTER, layout_of, numbered_parameters, take_changed_value
from ..optim._saved_states import SLICE_BYTES
from ..optim._state import load_optimizer_state
from ..parameter import DistributedParameter
from ..weights import Stored, runs_of

__all__ = ["Loading", "Names", "add_state", "key_of", "masters_of"]


#: Options of torch's optimizers that ours do not have, and that a plain program asks for: by name of the formula.
_TORCH = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}


class Names:
    """Names of the model's parameters; the first counts of one that has several."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._names: dict[Hashable, str] = {}
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                self._names.setdefault(key_of(value), key)

    def of(self, p: torch.Tensor) -> str:
        """Its name; ValueError for a parameter that is not the model's."""
        found = self._names.get(key_of(p))
        if found is None:
            raise ValueError(
                f"optim: expected parameters of the model, got one of shape {tuple(spread_of(p).shape)} that its state "
                "dict lacks"
            )
        return found


def key_of(tensor: torch.Tensor) -> Hashable:
    """A key, equal for a parameter and its entry in the outline of a state dict."""
    return id(tensor) if isinstance(tensor, DistributedParameter) else place_of(tensor)


# ---- saving


def masters_of(optimizers: Iterable[Any]) -> dict[Hashable, torch.Tensor]:
    """The present values in fp32 of this rank's 16-bit parameters, by `key_of`, where an optimizer has them."""
    found = {}
    for optimizer in optimizers:
        refuse_whole(optimizer)
        for p, state in optimizer.state.items():
            master = state.get(MASTER)
            if isinstance(master, torch.Tensor) and p.dtype != torch.float32:
                if not torch.equal(
                    master.to(p.dtype), p.detach().to(master.device)
                ):  # loaded after the last step
                    master = master.clone()
                    take_changed_value(master, p)
                found[key_of(p)] = master
    return found


def refuse_whole(optimizer: Any) -> None:
    """Raises ValueError for an optimizer of `whole_matrix`, whose state is not sharded like the parameters."""
    if getattr(optimizer, "_keeps_whole_state", False):
        raise ValueError(
            "optim: an optimizer of whole_matrix has state of whole parameters at their owners, which the format of "
            "torch.distributed.checkpoint cannot divide; use bmtrain.distributed.checkpoint"
        )


def add_state(
    snapshot: Snapshot,
    values: dict[tuple[Any, ...], Any],
    paths: dict[str, tuple[Any, ...]],
    key: tuple[str, ...],
    optimizers: Sequence[Any],
    names: Names,
) -> None:
    """Adds the optimizers' state, and on rank 0 the options of their groups. Collective.

    A trainable parameter without state gets zeros where others of its optimizer have some, as torch gives it.
    """
    described: list[dict[int, dict[str, _Described]]] = []
    states: list[dict[str, Any]] = []
    with failing_together("dcp.save"):
        states = [optimizer.state_dict() for optimizer in optimizers]
        described = [_describe(*both, names) for both in zip(optimizers, states, strict=True)]
    views = allgather_objects(described)
    with failing_together("dcp.save"):
        numbers = itertools.count()
        for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            agreed: dict[int, dict[str, _Described]] = {}
            for view in views:
                for number, entry in view[index].items():
                    agreed.setdefault(number, entry)
            blank = {k: (dtype, 0.0 if is_scalar else None) for e in agreed.values() for k, (dtype, n) in e.items()
                     for is_scalar in [n is not None]}  # fmt: skip
            for number, p in enumerate(numbered_parameters(optimizer)):
                for k, told in agreed.get(number, blank if p.requires_grad else {}).items():
                    path = (*key, "state", names.of(p), k)
                    paths[".".join(path)] = path
                    _add(snapshot, ".".join(path), p, state["state"].get(number, {}).get(k), *told)
            for group in optimizer.param_groups:
                number = next(numbers)
                if context().topology.rank == 0:
                    options = {**_options(optimizer, group), "params": [names.of(p) for p in group["params"]]}
                    values.update({(*key, "param_groups", number, k): told for k, told in options.items()})


#: Of an entry of a state: the dtype and, of one number for the whole parameter, that.
_Described = tuple[str, "float | None"]


def _describe(optimizer: Any, state: dict[str, Any], names: Names) -> dict[int, dict[str, _Described]]:
    """This rank's state, by parameter number and key."""
    found: dict[int, dict[str, _Described]] = {}
    for number, p in enumerate(numbered_parameters(optimizer)):
        for k, value in state["state"].get(number, {}).items():
            if k == MASTER or value is None:
                continue
            if isinstance(value, (int, float)):
                told: _Described = "float32", float(value)
            elif isinstance(value, torch.Tensor) and value.dim() == 0:
                told = dtype_name(value.dtype), value.item()
            elif isinstance(value, torch.Tensor) and value.shape == p.shape:
                told = dtype_name(value.dtype), None
            else:
                kind = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(
                    f"optim: {k} of {names.of(p)}: expected a number or a tensor of the parameter's shape, which the "
                    f"format of torch.distributed.checkpoint can divide, got {kind}; use bmtrain.distributed.checkpoint"
                )
            found.setdefault(number, {})[k] = told
    return found


def _add(
    snapshot: Snapshot, name: str, p: torch.Tensor, own: torch.Tensor | None, dtype: str, number: float | None
) -> None:
    is_writer = context().topology.rank == 0
    if number is not None:
        if is_writer:
            value = torch.tensor([number], dtype=DTYPES[dtype], device="cpu")
            snapshot.runs.append(Run(name, Spread(()), 0, 0, value))
        return
    value = torch.zeros(p.shape, dtype=DTYPES[dtype], device="cpu") if own is None else own
    if isinstance(p, DistributedParameter):
        snapshot.add_shard(name, p, value)
    elif is_writer:
        snapshot.runs.append(Run(name, Spread(tuple(p.shape)), 0, 0, value.detach().reshape(-1)))


def _options(optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
    """A group's options, and those with which torch's optimizer does the same."""
    own = {k: value for k, value in group.items() if k != "params"}
    if not getattr(optimizer, "_bmtrain_optimizer", False) or not group["params"]:
        return own
    alike = _TORCH.get(getattr(optimizer.formula_of(group["params"][0]), "name", ""))
    if alike is not None:
        own = {**alike([torch.zeros(1)]).param_groups[0], **own}
    if "decoupled_weight_decay" in own:
        kinds = _decays(optimizer, group)
        if own["weight_decay"] and len(kinds) > 1:
            raise ValueError(
                "optim: a group decays its 16-bit parameters as AdamW and its fp32 ones as Adam, which torch's "
                "optimizers cannot continue: make the optimizer with decoupled=True or False, or groups of one dtype"
            )
        own["decoupled_weight_decay"] = any(kinds)
    return own


def _decays(optimizer: Any, group: dict[str, Any]) -> set[bool]:
    """Whether weight decay is decoupled, for the parameters of a group of ours."""
    return {
        optimizer.formula_of(p).numbers_of(group, is_low=p.dtype != torch.float32, scale=1.0)["decoupled"]
        for p in group["params"]
    }


# ---- loading


class Loading:
    """One act of loading an optimizer. First :meth:`check`, which changes nothing, then :meth:`apply`.

    Args:
        optimizer: over parameters of the model.
        source: the files.
        values: their values other than tensors, by name.
        prefix: of the names of the optimizer's state.
        names: of the model's parameters.
        given: the stored weights, by name.
    """

    def __init__(
        self,
        optimizer: Any,
        source: TorchFolder,
        values: Mapping[str, Any],
        prefix: str,
        names: Names,
        given: Mapping[str, Any],
    ) -> None:
        refuse_whole(optimizer)
        self._optimizer = optimizer
        self._source = source
        self._values = values
        self._names = names
        self._given = given
        self._is_ours = bool(getattr(optimizer, "_bmtrain_optimizer", False))
        self._options: dict[str, dict[str, Any]] = {}  # by name of a parameter
        self._stored: dict[str, dict[str, str]] = {}  # by name of a parameter: key -> name in the files
        self._groups: list[dict[str, Any]] = []
        groups: dict[str, dict[str, Any]] = {}
        for name in (*source.places, *values):
            kind, _, rest = (
                name.removeprefix(prefix).partition(".") if name.startswith(prefix) else ("", "", "")
            )
            owner, _, key = rest.rpartition(".")
            if kind == "state":
                self._stored.setdefault(owner, {})[key] = name
            elif kind == "param_groups":
                groups.setdefault(owner, {})[key] = self._value(name)
        for owner, options in groups.items():  # by number, or (flattened) by name of a parameter
            members = options.pop("params", None) if owner.isdecimal() else [owner]
            self._options.update(dict.fromkeys(members or (), options))

    def _value(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        value = self._source.read(name).view(self._source.places[name].shape)
        return value.item() if value.numel() == 1 else value

    def check(self) -> None:
        """Requests the state from the files; raises ValueError if it does not fit."""
        self._groups = [
            self._group(number, group) for number, group in enumerate(self._optimizer.param_groups)
        ]
        for p in numbered_parameters(self._optimizer):
            name = self._names.of(p)
            for stored in self._stored.get(name, {}).values():
                if stored in self._values:
                    continue
                shape, expected = self._source.places[stored].shape, tuple(spread_of(p).shape)
                if shape not in ((), expected):
                    raise ValueError(
                        f"{stored}: expected shape {expected}, as its parameter has, or (), got {shape}"
                    )
                self._source.request(stored, runs_of(p) if shape else None)

    def _group(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] | None = None
        for p in group["params"]:
            name = self._names.of(p)
            told = self._options.get(name)
            if told is None:
                raise ValueError(f"the checkpoint holds no state of an optimizer of {name}")
            if found is not None and told != found:
                differing = sorted(k for k in found.keys() | told.keys() if found.get(k) != told.get(k))
                raise ValueError(
                    f"group {number} of the optimizer: {name} has another {', '.join(differing)} in the checkpoint "
                    "than the parameters before it: make groups as there"
                )
            found = told
        options = {k: value for k, value in (found or {}).items() if k in group}
        if self._is_ours and found is not None:
            self._check_formula({**group, **options}, found)
        return {**group, **options}

    def _check_formula(self, group: dict[str, Any], told: dict[str, Any]) -> None:
        if told.get("amsgrad"):
            raise ValueError(
                "the checkpoint is of amsgrad=True: use torch.optim.Adam or AdamW, also over shards"
            )
        decoupled = told.get("decoupled_weight_decay")
        if (
            decoupled is not None
            and group.get("weight_decay")
            and _decays(self._optimizer, group) != {decoupled}
        ):
            kind = "decoupled, as AdamW's" if decoupled else "added to the gradient, as Adam's"
            raise ValueError(
                f"the weight decay of the checkpoint is {kind}, the optimizer's is not: make it "
                f"with decoupled={decoupled}"
            )

    def apply(self) -> None:
        """Loads; the model has been loaded before."""
        state: dict[int, dict[str, Any]] = {}
        for number, p in enumerate(numbered_parameters(self._optimizer)):
            name = self._names.of(p)
            entry = {key: self._read(stored, p) for key, stored in self._stored.get(name, {}).items()}
            weight = self._given.get(name)
            if entry and self._has_master(p) and isinstance(weight, Stored):
                entry[MASTER] = self._read(weight.name, p).float()
            if entry:
                state[number] = entry
        numbers = iter(range(len(numbered_parameters(self._optimizer))))
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self._groups]
        bounds = {"layout": layout_of(self._optimizer), "slice_bytes": SLICE_BYTES}  # the present ones
        loaded = {"state": state, "param_groups": groups, "is_whole": False, **bounds}
        load_optimizer_state(self._optimizer, loaded, 1.0)

    def _has_master(self, p: torch.Tensor) -> bool:
        return self._is_ours and p.dtype != torch.float32 and self._optimizer.has_master(p)

    def _read(self, stored: str, p: torch.Tensor) -> Any:
        if stored in self._values:
            return self._values[stored]
        if not self._source.places[stored].shape:
            return self._source.read(stored).view(())
        return self._source.read(stored, runs_of(p)).view(p.shape)
