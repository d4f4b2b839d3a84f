"""Recognition of whole states, descriptions of states and their exchange, and conversion of old states.

Where the number of ranks does not divide a block's buffer into multiples of 128 bytes, its shards had other bounds
before partitions were rounded up ([Note: Aligned slices] in csrc/shard/buffer_spec.h). The old bounds follow from the
block, so that an old file loads at the layout it was saved at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._C import FlatLayout
from .._ranks.agree import gather_json
from .._shards.sharding import ShardSpec
from ..global_var import context
from ..parameter import DistributedParameter, whole_shape

#: Entries of torch's optimizers that are one number for a parameter, also for one of one element.
SCALARS = ("step", "mu_product", "eta", "mu")
#: Marks files of shards whose bounds are multiples of it.
SLICE_BYTES = FlatLayout.SLICE_BYTES


def bounds_before(p: Tensor) -> ShardSpec | None:
    """Returns the parameter's distribution before alignment, or None if it was the same."""
    return p._spec.before_alignment(p.element_size()) if isinstance(p, DistributedParameter) else None


def is_of_whole_parameters(state_dict: Mapping[str, Any], parameters: Iterable[tuple[Any, Tensor]]) -> bool:
    """Whether a state is gathered, or is the state of an optimizer of torch for a model that is not sharded.

    Args:
        state_dict: a state without ``is_whole`` is of the second kind, or of one rank, which is flat.
        parameters: parameters with their numbers.
    """
    if "is_whole" in state_dict:
        return bool(state_dict["is_whole"])
    parameters = list(parameters)
    shapes = [
        (value.shape, whole_shape(p))
        for number, p in parameters
        for key, value in state_dict["state"].get(number, {}).items()
        if isinstance(value, Tensor) and key not in SCALARS
    ]
    # Vectors may be whole on one rank alone; where bounds have moved, all ranks answer alike.
    is_told = any(len(a) > 1 for a, _ in shapes) or all(bounds_before(p) is None for _, p in parameters)
    return all(a == b for a, b in shapes) and bool(shapes) and is_told


def describe(value: Any, shape: Sequence[int]) -> dict[str, Any]:
    """Returns the description, for other ranks, of a state entry of a parameter whose shard has ``shape``."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == tuple(shape):
            return {"kind": "shard", "dtype": dtype}
        if value.dim() == 0:
            return {"kind": "scalar", "dtype": dtype, "value": value.item()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"kind": "plain", "value": value}
    return {"kind": "local"}  # an entry of unknown kind, kept per rank


def exchange(view: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the descriptions of all ranks, in rank order. Collective."""
    comm = context("OptimManager.state_dict(gather_opt=True)").world.comm
    return gather_json(view, "optimizer state", comm)


def at_present_bounds(
    state: Mapping[Any, Mapping[str, Any]], parameters: Iterable[tuple[Any, Tensor]]
) -> dict[Any, dict[str, Any]]:
    """Returns the entries of an unmarked file of this rank at current bounds. Collective if bounds have changed.

    Args:
        state: entries by parameter number; an entry without the old bounds is returned unchanged.
        parameters: parameters with their numbers, the same on all ranks.
    """
    moved = {
        number: (p, old)
        for number, p in parameters
        if isinstance(p, DistributedParameter) and (old := bounds_before(p)) is not None
    }
    result = {number: dict(entry) for number, entry in state.items()}
    if not moved:
        return result
    views = exchange(
        {
            str(number): {key: describe(value, (old.local_part[1],)) for key, value in state[number].items()}
            for number, (_, old) in moved.items()
            if number in state
        }
    )
    for number, (p, old) in moved.items():
        keys: dict[str, list[dict[str, Any]]] = {}
        for view in views:
            for key, description in view.get(str(number), {}).items():
                keys.setdefault(key, []).append(description)
        if not any(d["kind"] == "shard" for told in keys.values() for d in told):
            continue
        own = result.pop(number, {})
        entry = {key: _moved(p, old, own.get(key), keys[key]) for key in sorted(keys)}
        if p.numel():
            result[number] = entry
    return result


def _moved(p: DistributedParameter, old: ShardSpec, own: Any, told: list[dict[str, Any]]) -> Any:
    kinds = {description["kind"] for description in told}
    if kinds == {"shard"}:
        dtype = getattr(torch, told[0]["dtype"])
        local = own if isinstance(own, Tensor) else torch.empty(0, dtype=dtype, device=p.device)
        whole = old.gather(local.reshape(-1).to(context().device), p._label)
        return p._spec.slice_of(whole).clone().to(local.device)
    if own is not None or "local" in kinds:
        return own
    if "scalar" in kinds:
        return torch.tensor(told[0]["value"], dtype=getattr(torch, told[0]["dtype"]), device="cpu")
    return told[0]["value"]
