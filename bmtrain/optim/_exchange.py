"""Exchange of descriptions of optimizer states between ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
    ctx = context("OptimManager.state_dict(gather_opt=True)")
    world = ctx.world
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
