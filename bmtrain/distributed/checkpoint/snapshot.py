"""This rank's part of a checkpoint: runs of tensors, and values."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..._base.tensors import bytes_of, data_of, in_host_memory
from ..._engine.disk_tier import SealedArray
from ..._files.shared_state import encode
from ..._model.outline import outline_of
from ..._ranks.agree import broadcast_json
from ..._ranks.context import require_intact
from ..._shards.at_rest import show, stored_shard_of
from ..._shards.stage import StagedShardSpec
from ...global_var import context
from ...optim._arrays import MASTER, numbered_parameters
from ...optim._saved_states import SLICE_BYTES
from ...optim._sharded import ShardedOptimizer
from ...optim._state import MARKS
from ...optim.optim_manager import OptimManager
from ...optim.places import OnDisk
from ...parameter import DistributedParameter, whole_shape
from .manifest import dtype_name
from .spread import Spread, local_run, spread_of

__all__ = [
    "Run",
    "Snapshot",
    "optimizers_of",
    "own_name",
    "schedulers_of",
    "set_random_state",
    "take_snapshot",
]


@dataclass(frozen=True)
class Run:
    """A run of elements of one logical tensor, that this rank writes."""

    name: str
    spread: Spread
    part: int
    begin: int
    values: torch.Tensor  # 1-D

    def detached(self) -> Run:
        """The same, in host memory of its own."""
        return Run(self.name, self.spread, self.part, self.begin, self.values.to("cpu", copy=True))


@dataclass
class Snapshot:
    """State of one rank to be saved.

    Args:
        runs: tensors that it alone writes.
        replicas: whole tensors that every rank has, mostly the same: see :meth:`keep_what_differs`.
        values: JSON; rank 0's count.
        own: JSON, kept for each rank; of each optimizer, the numbers of parameters that it has state for.
        entries: by optimizer and parameter number, the state that is not in runs; the first rank that has it counts.
        lent: arrays on drives that hold some of the runs, and were not compared with their checksums yet.
        lends: whether there may be any.
    """

    runs: list[Run] = field(default_factory=list)
    replicas: list[Run] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    entries: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    lent: list[SealedArray] = field(default_factory=list)
    lends: bool = False

    def detach(self) -> None:
        """Copies all tensors, so that nothing in the snapshot changes with the model."""
        self.runs = [run.detached() for run in self.runs]

    def keep_what_differs(self) -> None:
        """Makes runs of the replicas: of all on rank 0, elsewhere of replicas whose bits differ. Collective."""
        rank = context().topology.rank
        mine = {run.name: zlib.crc32(bytes_of(in_host_memory(run.values))) for run in self.replicas}
        first = broadcast_json(mine, label="checkpoint.save")
        for run in self.replicas:
            if rank == 0:
                self.runs.append(run)
            elif first.get(run.name) != mine[run.name]:
                self.runs.append(Run(own_name(rank, run.name), run.spread, run.part, run.begin, run.values))
        self.replicas = []

    def add_value(self, name: str, value: Any, own: bool = False) -> dict[str, Any]:
        """A value as JSON; the tensors in it become runs, of rank 0 alone unless they are the rank's ``own``."""
        tensors: list[torch.Tensor] = []
        try:
            encoded = encode(value, tensors)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        if own or context().topology.rank == 0:
            self.runs += [_whole(f"{name}/{index}", tensor) for index, tensor in enumerate(tensors)]
        return {"is": encoded, "tensors": [f"{name}/{index}" for index in range(len(tensors))]}

    def add_shard(self, name: str, param: torch.Tensor, local: torch.Tensor) -> None:
        """A tensor that is sharded like ``param``, of which this rank has ``local``."""
        dtype_name(local.dtype)
        part, begin, count = local_run(param)
        spread = spread_of(param)
        if (count and _is_writer(param)) or (spread.numel == 0 and context().topology.rank == 0):
            self.runs.append(Run(name, spread, part, begin, local.detach().reshape(-1)))


def _whole(name: str, tensor: torch.Tensor) -> Run:
    dtype_name(tensor.dtype)
    if tensor.is_meta:
        raise TypeError(f"{name}: expected a tensor with values, got one on the meta device")
    return Run(name, Spread(tuple(tensor.shape)), 0, 0, tensor.detach().reshape(-1))


def _is_writer(param: torch.Tensor) -> bool:
    """Whether this rank is the first of the ranks that hold the same elements of the parameter."""
    if not isinstance(param, DistributedParameter):
        return context().topology.rank == 0
    topology = context().topology
    if param._tp_mode and param._tp_split_dim < 0 and topology.tp_id != 0:
        return False
    if not param._spec.is_first_replica:
        return False
    is_stage = param._spec.group.name.startswith("pp_")
    return not is_stage or isinstance(param._spec, StagedShardSpec) or topology.stage_id == 0


def own_name(rank: int, name: str) -> str:
    """The name of a rank's own value of a tensor, if it differs from rank 0's."""
    return f"rank/{rank}/{name}"


def optimizers_of(optim: Any) -> list[Any]:
    """The optimizers in a user's argument: a manager, an optimizer, several, or None."""
    if optim is None:
        return []
    if isinstance(optim, OptimManager):
        return list(optim.optimizers)
    if hasattr(optim, "param_groups"):
        return [optim]
    optimizers = list(optim) if isinstance(optim, Iterable) and not isinstance(optim, str) else [optim]
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optim: expected an OptimManager or optimizers, got {type(optimizer).__name__}")
    return optimizers


def schedulers_of(optim: Any, schedulers: Iterable[Any]) -> list[Any]:
    """The manager's schedulers, followed by the given ``schedulers``."""
    managed = list(optim.lr_schedulers) if isinstance(optim, OptimManager) else []
    return managed + list(schedulers)


def take_snapshot(
    model: torch.nn.Module | None,
    optim: Any,
    schedulers: Iterable[Any],
    data: Any,
    extra: Any,
    *,
    lends: bool,
) -> Snapshot:
    """Collects, without copying a shard. Communicates only if a user's ``state_dict`` method does."""
    rank = context("checkpoint.save").topology.rank
    snapshot = Snapshot(lends=lends)
    if model is not None:
        snapshot.values["model"] = _add_model(snapshot, model)
    snapshot.values["optimizers"] = [
        _add_optimizer(snapshot, f"optimizers/{number}", optimizer)
        for number, optimizer in enumerate(optimizers_of(optim))
    ]
    snapshot.own["state"] = [list(entries) for entries in snapshot.entries]
    if isinstance(optim, OptimManager):
        names = ("loss_scale", "loss_scale_enabled", "steps_since_last_scale")
        snapshot.values["manager"] = {name: getattr(optim, name) for name in names}
    if rank == 0:
        states = [None if s is None else s.state_dict() for s in schedulers_of(optim, schedulers)]
        snapshot.values["schedulers"] = snapshot.add_value("schedulers", states)
        snapshot.values["extra"] = snapshot.add_value("extra", extra)
    snapshot.own["data"] = snapshot.add_value(f"data/{rank}", data, own=True)
    snapshot.own["random"] = snapshot.add_value(f"random/{rank}", random_state(), own=True)
    require_intact("checkpoint.save()")
    return snapshot


def _add_model(snapshot: Snapshot, model: torch.nn.Module) -> dict[str, Any]:
    """Describes the state dict: by key, the name of the stored tensor or the value."""
    outline = outline_of(model)
    keys: list[Any] = []
    stored: dict[int, str] = {}  # by identity: what has several keys is stored once
    for key, value in outline.entries.items():
        if not isinstance(value, torch.Tensor):
            keys.append([key, {"value": snapshot.add_value(f"value/{key}", value)}])
            continue
        name = stored.setdefault(id(value), f"model/{key}")
        keys.append([key, {"tensor": name}])
        if name != f"model/{key}":
            continue
        if isinstance(value, DistributedParameter):
            value.require_data(key)
            shard = stored_shard_of(value) if snapshot.lends else None
            arrays = [] if shard is None else shard.sealed_parameters()
            snapshot.lent += arrays
            if not arrays:
                show(value)
            snapshot.add_shard(name, value, data_of(value))
        else:
            snapshot.replicas.append(_whole(name, value))
    return {"keys": keys, "metadata": snapshot.add_value("metadata", outline.metadata)}


_HANDLED = ("state", "param_groups", "layout", "is_whole")  # keys of an optimizer's state dict


def _add_optimizer(snapshot: Snapshot, name: str, optimizer: Any) -> dict[str, Any]:
    rank = context().topology.rank
    state = _state_of(snapshot, optimizer)
    keeps_whole = getattr(optimizer, "_keeps_whole_state", False)  # of a parameter, at its owner
    parameters = numbered_parameters(optimizer)
    entries: dict[str, dict[str, Any]] = {}
    for number, entry in state["state"].items():
        described = entries.setdefault(json_key(number), {})
        p = parameters[number]
        is_shard = isinstance(p, DistributedParameter)
        for key, value in entry.items():
            full = f"{name}/{number}/{key}"
            is_master = key == MASTER and p.is_cpu and p.dtype is torch.float32
            if not isinstance(value, torch.Tensor) or keeps_whole:
                described[key] = {"value": snapshot.add_value(own_name(rank, full), value, own=True)}
            elif is_shard and value.dim() == 0:
                described[key] = {"scalar": [dtype_name(value.dtype), value.item()]}
            elif value.data_ptr() == p.data_ptr() and (value.numel() or is_master):
                continue  # a master that is the parameter itself, also where a rank holds no element
            elif is_shard and value.shape == p.shape:
                described[key] = {"shard": full}
                snapshot.add_shard(full, p, value)
            else:
                described[key] = {"replica": full, "of_shard": is_shard, "slice_bytes": SLICE_BYTES}
                snapshot.replicas.append(_whole(full, value))
    snapshot.entries.append(entries)
    handled = _HANDLED if getattr(optimizer, "_bmtrain_optimizer", False) else (*_HANDLED, *MARKS)
    others = {key: value for key, value in state.items() if key not in handled}
    return {
        "class": type(optimizer).__name__,
        "groups": snapshot.add_value(f"{name}/groups", state["param_groups"]),
        "others": snapshot.add_value(f"{name}/others", others),
        "shapes": [list(whole_shape(p)) for p in parameters],
    }


def _state_of(snapshot: Snapshot, optimizer: Any) -> dict[str, Any]:
    """Returns the state dict; none but the library's own code sees lent arrays in it."""
    place = getattr(optimizer, "_place", None)
    lending: AbstractContextManager[list[SealedArray]] = nullcontext([])
    hooks = "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"
    is_own = getattr(type(optimizer), "state_dict", None) is ShardedOptimizer.state_dict
    if (
        snapshot.lends
        and is_own
        and isinstance(place, OnDisk)
        and not any(getattr(optimizer, h) for h in hooks)
    ):
        lending = place.lending()
    with lending as arrays:
        snapshot.lent += arrays
        state: dict[str, Any] = optimizer.state_dict()
    return state


def json_key(number: Any) -> str:
    """The number of a parameter as a key of a JSON object."""
    if not isinstance(number, int):
        raise TypeError(f"optim: expected parameters to be numbered in the state dict, got key {number!r}")
    return str(number)


def random_state() -> dict[str, Any]:
    """The states of all random number generators of this process that the library seeds."""
    version, internal, spare = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "state": torch.tensor(internal, device="cpu"), "spare": spare},
    }
    device = context().device
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        if kind == "MT19937":
            words = torch.tensor(keys.astype("int64"), device="cpu")
            state["numpy"] = {
                "state": words,
                "position": int(position),
                "gauss": [int(has_gauss), float(gauss)],
            }
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Continues from what :func:`random_state` returned; generators that are not here are left out."""
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["spare"]))
    device = context().device
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        told = state["numpy"]
        words = numpy.array(told["state"].tolist(), dtype="uint32")
        numpy.random.set_state(("MT19937", words, told["position"], *told["gauss"]))
