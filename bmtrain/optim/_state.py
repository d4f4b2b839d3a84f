"""State of any optimizer over shards: of this rank, or gathered so that it can be cut again elsewhere.

This library's optimizers gather their own state. Those of ``torch.optim`` know nothing of shards; here every
tensor of their state that is shaped like the shard of its parameter is gathered for them.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from ..global_var import context
from ..parameter import DistributedParameter, gather_flat, shard_of

__all__ = ["load_optimizer_state", "optimizer_state"]


def optimizer_state(optimizer: Any, gather: bool) -> dict[str, Any]:
    """Return the state dict of an optimizer, of this rank or (collective) gathered to full tensors.

    A torch optimizer over shards gets two more keys, which torch ignores: ``is_whole``, and for the state of
    one rank ``shard_sizes``, by which a load at another layout is recognised.
    """
    if getattr(optimizer, "_bmtrain_optimizer", False):
        state: dict[str, Any] = optimizer.state_dict(gather=gather)
        return state
    state = optimizer.state_dict()
    parameters = _parameters(optimizer)
    if not any(isinstance(p, DistributedParameter) for p in parameters):
        return state
    if not gather:
        return {**state, "is_whole": False, "shard_sizes": [p.numel() for p in parameters]}
    return {**state, "is_whole": True, "state": _gather(state["state"], parameters)}


def load_optimizer_state(optimizer: Any, state: dict[str, Any], loss_scale: float) -> None:
    """Load what :func:`optimizer_state` returned, here or on another number of ranks if it was gathered.

    Args:
        optimizer: over the same parameters.
        state: not modified, and no tensor of it is shared.
        loss_scale: the manager's at the time of saving; the unit of 16-bit moments, see `_unscale_moments`.

    Raises:
        ValueError: the state of one rank is loaded at another layout.
    """
    if getattr(optimizer, "_bmtrain_optimizer", False):
        optimizer.load_state_dict(_unscale_moments(state, loss_scale))
        return
    parameters = _parameters(optimizer)
    sizes = [p.numel() for p in parameters]
    saved_sizes = state.get("shard_sizes", sizes)
    if saved_sizes != sizes:
        raise ValueError(
            f"the optimizer state of one rank fits only the layout it was saved at: shards of {saved_sizes} "
            f"elements, got parameters of {sizes}; save with gather_opt=True to change the number of ranks"
        )
    whole = bool(state.get("is_whole", False))
    loaded: dict[Any, Any] = {}
    for index, entries in state["state"].items():
        p = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        loaded[index] = {
            key: _cut(p, value, whole) if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
    optimizer.load_state_dict({"state": loaded, "param_groups": state["param_groups"]})


def _parameters(optimizer: Any) -> list[Tensor]:
    """In the order of the numbers that torch gives them in a state dict."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _cut(p: Tensor | None, value: Tensor, whole: bool) -> Tensor:
    """This rank's part of a loaded tensor, in memory of its own: torch keeps what it is given."""
    if whole and isinstance(p, DistributedParameter) and value.shape == (math.prod(p._tp_original_shape),):
        value = shard_of(p, value)
    return value.clone()


def _gather(state: dict[Any, Any], parameters: list[Tensor]) -> dict[Any, Any]:
    """Full tensors in place of shards.

    An optimizer has no state for a parameter of which this rank holds no element, so the ranks first tell
    each other what they have; then all of them gather the same tensors in the same order.
    """
    gathered: dict[Any, Any] = {
        index: dict(entries) for index, entries in state.items() if not _is_sharded(index, parameters)
    }
    views = _exchange(
        {
            str(index): {key: _describe(value, parameters[index]) for key, value in entries.items()}
            for index, entries in state.items()
            if _is_sharded(index, parameters)
        }
    )
    for index, p in enumerate(parameters):
        described: dict[str, dict[str, Any]] = {}
        for view in views:
            for key, description in view.get(str(index), {}).items():
                if description["kind"] == "shard" or key not in described:
                    described[key] = description
        own = state.get(index, {})
        if described:
            gathered[index] = {key: _whole(p, own.get(key), described[key]) for key in sorted(described)}
    return gathered


def _is_sharded(index: Any, parameters: list[Tensor]) -> bool:
    return isinstance(index, int) and isinstance(parameters[index], DistributedParameter)


def _describe(value: Any, p: Tensor) -> dict[str, Any]:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == p.shape:
            return {"kind": "shard", "dtype": dtype}
        if value.dim() == 0:
            return {"kind": "scalar", "dtype": dtype, "value": value.item()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"kind": "plain", "value": value}
    return {"kind": "local"}  # something of the optimizer's own, kept as this rank has it


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


def _exchange(view: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's view, in rank order. Collective."""
    ctx = context("OptimManager.state_dict(gather_opt=True)")
    world = ctx.groups["zero"]
    data = torch.frombuffer(bytearray(json.dumps(view).encode()), dtype=torch.uint8)
    sizes = torch.empty(world.size, dtype=torch.int64, device=ctx.device)
    world.comm.all_gather(sizes, torch.tensor([data.numel()], device=ctx.device), "optimizer state").wait()
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=ctx.device)
    padded[: data.numel()] = data.to(ctx.device)
    texts = torch.empty(world.size * longest, dtype=torch.uint8, device=ctx.device)
    world.comm.all_gather(texts, padded, "optimizer state").wait()
    rows = texts.reshape(world.size, longest).cpu()
    return [
        json.loads(bytes(row[:size].tolist()).decode())
        for row, size in zip(rows, sizes.tolist(), strict=True)
    ]


def _unscale_moments(state: dict[str, Any], loss_scale: float) -> dict[str, Any]:
    """Bring moments of older files to units of the true gradient.

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
