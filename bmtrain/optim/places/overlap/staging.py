"""Host memory for copies of a GPU's gradients and parameters. See staged_copies.h, [Note: Updates of parameters on a
device]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...._base.tensors import data_of
from ...._C import OffloadUpdate, SentGradients, SentNumber, StagingLane
from ..._arrays import MASTER
from ..._updates import Ranges, Update
from ..ranges import ranges_of
from .ahead import SentBlock

#: Updates whose gradients or parameters are in host memory at the same time: one that is computed, the one after it,
#: whose gradients arrive, and the one before it, whose parameters return.
SLOTS = 3

_GROUP = 16  # elements; as those of states are aligned, so that neighbours stay neighbours


class Staged(NamedTuple):
    """Host memory of one update's gradients and parameters, in the order of the updates."""

    slot: int
    gradients: list[Tensor]
    parameters: list[Tensor]
    sent: SentGradients | None

    def ranges(self, updates: Sequence[Update], names: Sequence[str], first: int) -> Ranges:
        """Returns the ranges to compute for ``updates``, the first of which has number ``first`` here."""
        last = first + len(updates)
        states = [u.state for u in updates]
        rounds = updates[0].param.dtype != torch.float32
        return ranges_of(updates, names)._replace(
            weights=[state[MASTER] for state in states],
            rounded=self.parameters[first:last] if rounds else [],
            grads=self.gradients[first:last],
        )


class Staging:
    """The slots of one device."""

    def __init__(self, device: torch.device) -> None:
        self.lane = StagingLane(device, SLOTS)
        self._pinned = device.type == "cuda"
        # Separate, since gradients of one update may arrive while the parameters of the slot's previous update are
        # still read.
        self._gradients = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(SLOTS)]
        self._parameters = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(SLOTS)]
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(memory.numel() for memory in (*self._gradients, *self._parameters))

    def allocate(self, nbytes: int) -> Tensor:
        """Allocates page-locked host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def send_number(self, number: Tensor) -> SentNumber:
        """Starts the copy of a number to the host."""
        wide = number.detach().to(torch.float64).reshape(())
        return SentNumber(self.lane, wide, self.allocate(wide.element_size()).view(torch.float64).view(()))

    def place(self, updates: Sequence[Update], sent: SentBlock | None) -> Staged:
        """Returns space in the next slot, for gradients that are not ``sent`` already."""
        slot, self._next = self._next, (self._next + 1) % SLOTS
        gradients = (
            self._views(self._gradients, slot, [u.grad for u in updates]) if sent is None else sent.on_host
        )
        parameters = self._views(self._parameters, slot, [u.param for u in updates])
        return Staged(slot, gradients, parameters, None if sent is None else sent.copy)

    def _views(self, memories: list[Tensor], slot: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Returns consecutive tensors in the memory of a slot."""
        ends, end = [], 0
        for tensor in like:
            end += _padded(tensor)
            ends.append(end)
        if memories[slot].numel() < end:
            memories[slot] = self.allocate(end)
        places = [
            memories[slot][end - _padded(tensor) :][: tensor.numel() * tensor.element_size()]
            for end, tensor in zip(ends, like, strict=True)
        ]
        return [
            place.view(tensor.dtype).view(tensor.shape) for place, tensor in zip(places, like, strict=True)
        ]

    def attach(self, update: OffloadUpdate, updates: Sequence[Update], staged: Staged) -> None:
        """Makes ``update`` copy gradients from the device to ``staged``, and parameters back."""
        update.stage(
            self.lane,
            staged.slot,
            [u.grad for u in updates],
            staged.gradients,
            [data_of(u.param) for u in updates],
            staged.parameters,
            # For fp32 parameters the master itself is copied back.
            [u.state[MASTER] if u.param.dtype == torch.float32 else None for u in updates],
            staged.sent,
        )


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() // _GROUP) * _GROUP * tensor.element_size()
