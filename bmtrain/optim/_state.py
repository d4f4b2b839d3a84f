"""State of any optimizer over shards: local, or gathered for any number of ranks.

This library's optimizers gather their own state. Optimizers of ``torch.optim`` do not know shards; here every tensor of
their state with the shape of its parameter's shard is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..global_var import rank
from ..parameter import DistributedParameter, gather_flat, shard_of, whole_shape
from ._arrays import MASTER, numbered_parameters, warn_of_large_state
from ._owners import is_here
from ._saved_states import (
    SCALARS,
    SLICE_BYTES,
    at_present_bounds,
    bounds_before,
    describe,
    exchange,
    is_of_whole_parameters,
)

#: Keys that detect a load at another layout or on another rank.
MARKS = "shard_sizes", "slice_bytes", "rank"


def optimizer_state(optimizer: Any, gather: bool) -> dict[str, Any]:
    """Returns the state dict of an optimizer, of this rank or (collective) gathered to full tensors.

    The state of a torch optimizer over shards gets more keys, which torch ignores: ``is_whole``, and for the state of
    one rank the keys of :func:`mark_rank`.
    """
    if getattr(optimizer, "_bmtrain_optimizer", False):
        state: dict[str, Any] = optimizer.state_dict(gather=gather)
        return state
    state = mark_rank(optimizer, optimizer.state_dict())
    if not gather or "is_whole" not in state:
        return state
    whole = {"is_whole": True, "state": _gather(state["state"], numbered_parameters(optimizer))}
    return {**{key: value for key, value in state.items() if key not in MARKS}, **whole}


def mark_rank(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Hook of an optimizer of torch that gives its state: marks one of shards, which fits this rank and layout only."""
    parameters = numbered_parameters(optimizer)
    if not any(isinstance(p, DistributedParameter) for p in parameters):
        return state
    marks = dict(zip(MARKS, ([p.numel() for p in parameters], SLICE_BYTES, rank()), strict=True))
    return {**state, "is_whole": False, **marks}


def load_optimizer_state(optimizer: Any, state: dict[str, Any], loss_scale: float) -> None:
    """Loads a state of :func:`optimizer_state`; a gathered one, or one of whole parameters, on any number of ranks.

    Args:
        optimizer: over the same parameters.
        state: not modified, and no tensor of it is shared.
        loss_scale: the manager's loss scale when it was saved; the unit of 16-bit moments, see `_unscale_moments`.

    Raises:
        ValueError: the state of one rank is loaded at another layout.
    """
    if getattr(optimizer, "_bmtrain_optimizer", False):
        optimizer.load_state_dict(_unscale_moments(state, loss_scale))
        return
    parameters = numbered_parameters(optimizer)
    whole, is_aligned = is_of_whole_parameters(state, enumerate(parameters)), "slice_bytes" in state
    _check_rank(state, parameters)
    entries_of = state["state"]
    if not (whole or is_aligned):
        entries_of = at_present_bounds(entries_of, enumerate(parameters))
    loaded = _cut_entries(entries_of, parameters, whole)
    optimizer.load_state_dict({"state": loaded, "param_groups": state["param_groups"]})


def take_whole_state(optimizer: Any, state: dict[str, Any]) -> dict[str, Any] | None:
    """Hook of an optimizer of torch that loads a state: cuts one of whole parameters to this rank's shards."""
    parameters = numbered_parameters(optimizer)
    _check_rank(state, parameters)
    whole = is_of_whole_parameters(state, enumerate(parameters))
    if not (whole or any(MASTER in entries for entries in state["state"].values())):
        return None
    return {**state, "state": _cut_entries(state["state"], parameters, whole)}


def _check_rank(state: Mapping[str, Any], parameters: list[Tensor]) -> None:
    """Raises ValueError for the state of another rank, or of another layout."""
    sizes = [_size_of_shard(p, "slice_bytes" in state) for p in parameters]
    saved_sizes, saved_rank = state.get("shard_sizes", sizes), state.get("rank", rank())
    is_same = saved_rank == rank() or all(p.numel() == whole_shape(p).numel() for p in parameters)
    if saved_sizes != sizes or not is_same:
        raise ValueError(
            f"the optimizer state of one rank fits only this rank and the layout it was saved at: rank {saved_rank}, "
            f"shards of {saved_sizes} elements, got rank {rank()} with {sizes}; save OptimManager.state_dict("
            "gather_opt=True), which fits all"
        )


def _cut_entries(state: Mapping[Any, Any], parameters: list[Tensor], whole: bool) -> dict[Any, Any]:
    loaded: dict[Any, Any] = {}
    for index, entries in state.items():
        p = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        if p is not None and not is_here(p):
            continue  # as before a load: the number of its steps would stand still
        loaded[index] = {
            key: _cut(p, value, whole and key not in SCALARS) if isinstance(value, Tensor) else value
            for key, value in entries.items()
            if key != MASTER  # of this library's optimizers; torch would keep its value through later steps
        }
    return loaded


def _size_of_shard(p: Tensor, is_aligned: bool) -> int:
    before = None if is_aligned else bounds_before(p)
    return p.numel() if before is None else before.local_part[1]


def _cut(p: Tensor | None, value: Tensor, whole: bool) -> Tensor:
    """Returns a copy of this rank's part of a loaded tensor: torch keeps the tensors it loads."""
    whole_shapes = () if p is None else (whole_shape(p), (whole_shape(p).numel(),))
    if whole and isinstance(p, DistributedParameter) and value.shape in whole_shapes:
        value = shard_of(p, value)
    return value.clone()


def _gather(state: dict[Any, Any], parameters: list[Tensor]) -> dict[Any, Any]:
    """Returns the state with full tensors in place of shards.

    An optimizer has no state for a parameter of which this rank holds no element, so the ranks first exchange
    descriptions of their entries; then all of them gather the same tensors in the same order.
    """
    gathered: dict[Any, Any] = {
        index: dict(entries) for index, entries in state.items() if not _is_sharded(index, parameters)
    }
    views = exchange(
        {
            str(index): {key: describe(value, parameters[index].shape) for key, value in entries.items()}
            for index, entries in state.items()
            if _is_sharded(index, parameters)
        }
    )
    agreed: list[dict[str, dict[str, Any]]] = [{} for _ in parameters]
    for index, described in enumerate(agreed):
        for view in views:
            for key, description in view.get(str(index), {}).items():
                if description["kind"] == "shard" or key not in described:
                    described[key] = description
    warn_of_large_state(
        sum(_whole_bytes(p, described) for p, described in zip(parameters, agreed, strict=True))
    )
    for index, (p, described) in enumerate(zip(parameters, agreed, strict=True)):
        own = state.get(index, {})
        if described:
            gathered[index] = {key: _whole(p, own.get(key), described[key]) for key in sorted(described)}
    return gathered


def _whole_bytes(p: Tensor, described: dict[str, dict[str, Any]]) -> int:
    dtypes: list[torch.dtype] = [
        getattr(torch, value["dtype"]) for value in described.values() if value["kind"] == "shard"
    ]
    return sum(dtype.itemsize for dtype in dtypes) * math.prod(whole_shape(p))


def _is_sharded(index: Any, parameters: list[Tensor]) -> bool:
    return isinstance(index, int) and isinstance(parameters[index], DistributedParameter)


def _whole(p: Tensor, own: Any, description: dict[str, Any]) -> Any:
    if description["kind"] == "shard":
        dtype = getattr(torch, description["dtype"])
        local = own if isinstance(own, Tensor) else torch.zeros(p.shape, dtype=dtype, device=p.device)
        return gather_flat(p, local)
    if own is not None or description["kind"] == "local":
        return own
    if description["kind"] == "scalar":
        return torch.tensor(description["value"], dtype=getattr(torch, description["dtype"]), device="cpu")
    return description["value"]


def _unscale_moments(state: dict[str, Any], loss_scale: float) -> dict[str, Any]:
    """Converts moments of older files to units of the true gradient.

    The GPU Adam of the versions up to 1.0.1 kept ``exp_avg`` in fp16, as the moment of the scaled gradient,
    and an ``exp_avg_sq`` that carries the scale once.
    """
    if not any(_has_scaled_moments(entries) for entries in state["state"].values()):
        return state
    converted = {
        index: {**entries, **{key: entries[key].float() / loss_scale for key in ("exp_avg", "exp_avg_sq")}}
        if _has_scaled_moments(entries)
        else entries
        for index, entries in state["state"].items()
    }
    return {**state, "state": converted}


def _has_scaled_moments(entries: dict[str, Any]) -> bool:
    moment = entries.get("exp_avg")
    return isinstance(moment, Tensor) and moment.dtype == torch.float16
