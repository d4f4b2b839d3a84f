"""Random numbers that the layers of a pipeline draw.

[Note: Random numbers of stages]
Layers of each stage draw numbers of their own: one generator state on all stages would give the layers of all stages
the same masks of dropout, unlike one process.

In a loop over virtual shards each micro-batch is a shard, and draws what it would draw in one process: the state of its
rank's generators follows it from stage to stage, behind its activations, and returns to its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._base.generators import (
    PACKED_BYTES,
    kept_generators,
    own_numbers,
    packed_generators,
    unpack_generators,
)
from .._ranks.context import Group
from .._shards.stage import collect_batches, hand_out
from ..global_var import context
from .engine import current_engine


class Numbers:
    """Generators in one pass of a pipeline. See [Note: Random numbers of stages]."""

    def __init__(self, pipe: Group, device: torch.device) -> None:
        self._pipe = pipe
        self._device = device
        self._follow = current_engine(context()).virtual.is_open
        self._states: dict[int, torch.Tensor] = {}  # by micro-batch

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Context manager for a pass. Collective over the pipe group."""
        pipe, device = self._pipe, self._device
        if not self._follow:
            with own_numbers(pipe.rank, device):
                yield
            return
        begin = collect_batches(pipe, packed_generators(device)[None], target=0)
        self._states = {} if begin is None else dict(enumerate(begin))
        with kept_generators(device):
            yield
        ends = [self._states[micro] for micro in range(pipe.size)] if pipe.rank == pipe.size - 1 else None
        own = torch.empty(PACKED_BYTES, dtype=torch.uint8, device=device)
        unpack_generators(hand_out(pipe, ends, pipe.size - 1, own))

    @contextmanager
    def of_micro(self, micro: int) -> Iterator[None]:
        """Context manager for the forward of a micro-batch on this stage."""
        if self._follow:
            unpack_generators(self._states[micro])
        yield
        if self._follow:
            self._states[micro] = packed_generators(self._device)

    def to_send(self, micro: int) -> list[torch.Tensor]:
        """Returns what is sent to the next stage behind a micro-batch."""
        return [self._states[micro]] if self._follow else []

    def to_receive(self, micro: int) -> list[torch.Tensor]:
        """Returns memory for what comes from the previous stage behind a micro-batch."""
        if self._follow:
            self._states[micro] = torch.empty(PACKED_BYTES, dtype=torch.uint8, device=self._device)
        return self.to_send(micro)
