"""Exchange of descriptions of optimizer states between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._ranks.agree import gather_json
from ..global_var import context


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
