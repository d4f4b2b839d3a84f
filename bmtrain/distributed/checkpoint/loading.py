"""Loading a checkpoint: everything is read, checked and compared before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..._model.check import check_model_state
from ..._model.outline import outline_of
from ..._ranks.agree import broadcast_json, failing_together, on_all_ranks, on_rank_0
from ...global_var import context
from ...optim._arrays import check_names, layout_of, numbered_parameters
from ...optim._saved_states import SLICE_BYTES, bounds_before
from ...optim._state import load_optimizer_state
from ...optim.optim_manager import OptimManager
from ...parameter import whole_shape
from .layout import check_sizes, read_manifest
from .manifest import DTYPES, Manifest
from .reader import Reader, StoredTensor
from .snapshot import optimizers_of, schedulers_of, set_random_state
from .spread import local_run, spread_of

__all__ = ["Loading", "open_manifest"]

_LABEL = "checkpoint.load"


def open_manifest(checkpoint: Path) -> Manifest:
    """The manifest as rank 0 reads it, on every rank; all files are there on all ranks. Collective."""
    body = on_rank_0(lambda: read_manifest(checkpoint), _LABEL)
    text = broadcast_json(body.to_bytes().decode() if body is not None else "", label=_LABEL)
    manifest = Manifest.from_bytes(text.encode(), str(checkpoint))
    on_all_ranks(lambda: check_sizes(checkpoint, manifest), _LABEL)
    return manifest


class Loading:
    """One act of loading. First :meth:`check`, which changes nothing, then :meth:`apply`."""

    def __init__(
        self,
        reader: Reader,
        model: torch.nn.Module | None,
        optim: Any,
        schedulers: Iterable[Any],
        strict: bool,
        random: bool,
    ) -> None:
        topology = context().topology
        self._reader = reader
        self._values = reader.manifest.values
        self._model = model
        self._optim = optim
        self._optimizers = optimizers_of(optim)
        self._schedulers = schedulers_of(optim, schedulers)
        self._strict = strict
        self._random = random
        manifest = reader.manifest
        self.same_layout = all(
            getattr(manifest, size) == getattr(topology, size)
            for size in ("world_size", "tp_size", "pipe_size", "ep_size")
        )
        own = manifest.ranks[topology.rank % manifest.world_size]
        self._random_state = own["random"]
        self._had_state: list[list[str]] | None = own.get("state")  # None: of weights alone
        self._data = [own_values["data"] for own_values in manifest.ranks]
        self._state: _StoredState | None = None

    def check(self) -> None:
        """Checks that everything can be loaded, and reads every byte of it once. Collective."""
        with failing_together(_LABEL):
            self._request_all()
        on_all_ranks(self._reader.verify, _LABEL)

    def _request_all(self) -> None:
        if self._model is not None:
            self._request_model(self._model)
        if self._optimizers:
            self._request_optimizers()
        if self._schedulers:
            schedulers = self._values["schedulers"]
            self._reader.request_value(schedulers)
            _check_number("schedulers", len(schedulers["is"]["list"]), len(self._schedulers))
        self._reader.request_value(self._values["extra"])
        if self._random and self._random_state is not None:
            self._reader.request_value(self._random_state)
        for told in self._data:
            self._reader.request_value(told)

    def _request_model(self, model: torch.nn.Module) -> None:
        told = self._values.get("model")
        if told is None:
            raise ValueError(f"{self._reader.checkpoint}: holds no model (it was saved without one)")
        entries: dict[str, Any] = {}
        for key, entry in told["keys"]:
            name = entry.get("tensor")
            if name is None:
                self._reader.request_value(entry["value"])
                entries[key] = entry["value"]
            else:
                entries[key] = StoredTensor(
                    self._reader, name, self._reader.own_or_shared(name, self.same_layout)
                )
        outline = outline_of(model)
        check_model_state(model, outline.entries, entries, self._strict)
        for key, entry in entries.items():
            if isinstance(entry, StoredTensor):
                entry.request_for(outline.entries.get(key))
        self._state = _StoredState(self._reader, entries, told["metadata"])

    def _request_optimizers(self) -> None:
        told = self._values["optimizers"]
        _check_number("optimizers", len(told), len(self._optimizers))
        if isinstance(self._optim, OptimManager):
            if "manager" not in self._values:
                raise ValueError("the checkpoint holds optimizers, but was saved without an OptimManager")
            self._optim._check_resumable(self._values["manager"])
        for number, (saved, optimizer) in enumerate(zip(told, self._optimizers, strict=True)):
            parameters = numbered_parameters(optimizer)
            shapes = [list(whole_shape(p)) for p in parameters]
            if saved["shapes"] != shapes:
                raise ValueError(
                    f"optimizer {number}: saved over parameters of shapes {saved['shapes']}, got {shapes}"
                )
            is_of_shards = any(
                "shard" in told for entry in saved["entries"].values() for told in entry.values()
            )
            if (
                is_of_shards
                and getattr(optimizer, "_keeps_whole_state", False)
                and context().topology.world_size > 1
            ):
                raise ValueError(
                    f"optimizer {number}: saved by {saved['class']}, whose state is of shards, got an optimizer of "
                    f"whole_matrix; load into {saved['class']}, and its state_dict(gather=True) into the other"
                )
            # One of whole_matrix() has no formula: its state is of the optimizer that it wraps.
            if hasattr(optimizer, "formula_of") and not saved["groups"]["tensors"]:
                names = {k: _arrays_of(entry) for k, entry in saved["entries"].items() if entry}
                check_names(optimizer, self._reader.value(saved["groups"]), names)
            self._reader.request_value(saved["groups"])
            self._reader.request_value(saved["others"])
            for index, entry in self._own_entries(number):
                for key, described in entry.items():
                    self._request_state(parameters[index], described, f"{number}, parameter {index}: {key}")

    def _own_entries(self, optimizer: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """By parameter number, all state but that which only other ranks had, of parameters that are not shared."""
        loader = self._optimizers[optimizer]
        parameters = numbered_parameters(loader) if getattr(loader, "_keeps_whole_state", False) else None
        for index, entry in self._values["optimizers"][optimizer]["entries"].items():
            replicas = [told for told in entry.values() if "replica" in told]
            if self.same_layout and self._had_state is not None:
                is_here = not replicas or index in self._had_state[optimizer]
            else:
                stored = self._reader.manifest.tensors
                is_here = all(told["of_shard"] or told["replica"] in stored for told in replicas)
            if is_here and (parameters is None or loader.owns(parameters[int(index)])):
                yield int(index), entry

    def _request_state(self, p: torch.Tensor, described: dict[str, Any], label: str) -> None:
        if "shard" in described:
            self._reader.request(described["shard"], spread_of(p), *local_run(p))
        elif "replica" in described:
            has_moved = "slice_bytes" not in described and bounds_before(p) is not None
            if described["of_shard"] and (has_moved or not self.same_layout):
                raise ValueError(
                    f"optimizer {label} is not sharded like its parameter: it loads at the same layout only"
                )
            self._reader.request_whole(self._reader.own_or_shared(described["replica"], self.same_layout))
        elif "value" in described:
            self._reader.request_value(described["value"])

    def apply(self) -> None:
        """Loads. Collective."""
        with failing_together(_LABEL):
            if self._model is not None and self._state is not None:
                self._model.load_state_dict(self._state, strict=self._strict)
            if isinstance(self._optim, OptimManager):
                self._optim._resume(self._values["manager"])
            for number, optimizer in enumerate(self._optimizers):
                load_optimizer_state(optimizer, self._optimizer_state(number, optimizer), 1.0)
            if self._schedulers:
                states = self._reader.value(self._values["schedulers"])
                for scheduler, state in zip(self._schedulers, states, strict=True):
                    if scheduler is not None and state is not None:
                        scheduler.load_state_dict(state)
            if self._random and self._random_state is not None:
                set_random_state(self._reader.value(self._random_state))

    def extra(self) -> Any:
        """Values that the user added."""
        return self._reader.value(self._values["extra"])

    def data(self) -> list[Any]:
        """The position in the data of every rank that saved."""
        return [self._reader.value(told) for told in self._data]

    def number_of_data(self) -> int | None:
        """The number of this rank's position in `data`, or of the one that another number of ranks all saved."""
        saved, own = self._data, context().topology
        if len(saved) == own.world_size:
            return own.rank
        return 0 if all(told == saved[0] for told in saved) else None

    def _optimizer_state(self, number: int, optimizer: Any) -> dict[str, Any]:
        parameters, saved = numbered_parameters(optimizer), self._values["optimizers"][number]
        state = {
            index: {key: self._read_state(parameters[index], told) for key, told in entry.items()}
            for index, entry in self._own_entries(number)
        }
        others = self._reader.value(saved["others"])
        groups = self._reader.value(saved["groups"])
        bounds = {"layout": layout_of(optimizer), "slice_bytes": SLICE_BYTES}  # the present ones
        return {**others, "state": state, "param_groups": groups, "is_whole": False, **bounds}

    def _read_state(self, p: torch.Tensor, described: dict[str, Any]) -> Any:
        if "shard" in described:
            return self._reader.read(described["shard"], spread_of(p), *local_run(p))
        if "scalar" in described:
            dtype, value = described["scalar"]
            return torch.tensor(value, dtype=DTYPES[dtype], device="cpu")
        if "replica" in described:
            return self._reader.read_whole(self._reader.own_or_shared(described["replica"], self.same_layout))
        return self._reader.value(described["value"])


def _arrays_of(entry: dict[str, Any]) -> list[str]:
    """Returns the names of a parameter's arrays of state; the number of steps is none, also where it is a tensor."""
    kinds = {"shard", "replica"}
    return [
        key
        for key, told in entry.items()
        if key != "step" and (kinds & told.keys() or told.get("value", {}).get("tensors"))
    ]


def _check_number(kind: str, saved: int, given: int) -> None:
    if saved != given:
        raise ValueError(f"expected {saved} {kind}, as the checkpoint holds, got {given}")


class _StoredState(Mapping[str, Any]):
    """The model's state dict; its tensors are read when a module takes them."""

    def __init__(self, reader: Reader, entries: dict[str, Any], metadata: Any) -> None:
        self._reader = reader
        self._entries = entries
        self._metadata = reader.value(metadata) if not metadata["tensors"] else None

    def __getitem__(self, key: str) -> Any:
        entry = self._entries[key]
        return entry if isinstance(entry, StoredTensor) else self._reader.value(entry)

    def __iter__(self) -> Any:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def copy(self) -> _StoredState:
        """Itself, which is immutable."""
        return self
