"""Choice of the parameters whose optimizer state stays on the run device under offloading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._ranks import context

#: Largest share of a device's memory that the library fills.
_FULL = 0.85


def choose_residents(
    parameters: Sequence[Tensor], fraction: float | None, bytes_of: Any, budget: int
) -> tuple[set[int], float]:
    """Returns the parameters whose state stays on the device, and their share of the blocks.

    The blocks that are used first are chosen, as there is the least time to update them on the host.

    Args:
        parameters: the candidates, in forward order.
        fraction: share of the blocks; 1 includes the parameters outside blocks. None: as many as fit.
        bytes_of: returns the size of a parameter's state.
        budget: available bytes, for None.

    Returns:
        ids of parameters, and their share of the blocks.
    """
    blocks, outside = _by_block(parameters)
    if fraction is None:
        chosen = _first_that_fit(blocks, bytes_of, budget)
        left = budget - sum(bytes_of(p) for block in chosen for p in block)
        takes_all = len(chosen) == len(blocks) and sum(map(bytes_of, outside)) <= left
    else:
        chosen = blocks[: math.ceil(fraction * len(blocks))]
        takes_all = fraction == 1
    residents = {id(p) for block in chosen for p in block}
    if takes_all:
        residents.update(map(id, outside))
    return residents, len(chosen) / len(blocks) if blocks else float(takes_all)


def _first_that_fit(blocks: list[list[Tensor]], bytes_of: Any, budget: int) -> list[list[Tensor]]:
    used = 0
    for number, block in enumerate(blocks):
        used += sum(map(bytes_of, block))
        if used > budget:
            return blocks[:number]
    return blocks


def _by_block(parameters: Iterable[Any]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Returns the parameters of each block, in the order of first parameters, and the parameters outside blocks."""
    blocks: dict[int, list[Tensor]] = {}
    outside: list[Tensor] = []
    for p in parameters:
        block = getattr(p, "_block", None)
        runtime = None if block is None else block.runtime()
        (outside if runtime is None else blocks.setdefault(id(runtime), [])).append(p)
    return list(blocks.values()), outside


def spare_bytes(device: torch.device) -> int:
    """Returns the device memory unused by this process at its peak and by other processes; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    spare = int(_FULL * total) - others - torch.cuda.max_memory_allocated(device)
    current = context.current()
    # Over NCCL a rank has its card to itself, and may see no other.
    sharers = 1
    if current is not None and current.backend == "gloo":
        sharers = -(-current.local_size // torch.cuda.device_count())
    return max(spare, 0) // sharers
