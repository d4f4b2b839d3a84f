"""Host memory through which gradients and parameters of a GPU pass. See staged_copies.h, [Note: Updates of parameters
on a device]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._unseen import data_of
from ._ahead import SentBlock
from ._arrays import MASTER
from ._elementwise import Update
from ._host_step import Ranges, ranges_of

__all__ = ["SLOTS", "Staged", "Staging"]

#: Updates whose gradients or parameters are in host memory at the same time: one that is computed, the one after it,
#: whose gradients arrive, and the one before it, whose parameters return.
SLOTS = 3

_GROUP = 16  # elements; as those of states are aligned, so that neighbours stay neighbours


class Staged(NamedTuple):
    """Host memory of one update's gradients and parameters, in the order of the updates."""

    slot: int
    gradients: list[Tensor]
    parameters: list[Tensor]
    sent: _C.SentGradients | None

    def ranges(self, updates: Sequence[Update], names: Sequence[str], first: int) -> Ranges:
        """What is to be computed of ``updates``, which are number ``first`` and those after it here."""
        last = first + len(updates)
        states = [u.state for u in updates]
        rounds = updates[0].param.dtype != torch.float32
        return ranges_of(updates, names)._replace(
            weights=[state[MASTER] for state in states],
            rounded=self.parameters[first:last] if rounds else [],
            grads=self.gradients[first:last],
        )


class Staging:
    """The slots of one device.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self.lane = _C.StagingLane(device, SLOTS)
        self._pinned = device.type == "cuda"
        # Apart, since gradients of one update may arrive while the parameters of the one that had the slot before are
        # still read.
        self._gradients = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(SLOTS)]
        self._parameters = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(SLOTS)]
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Of the slots."""
        return sum(memory.numel() for memory in (*self._gradients, *self._parameters))

    def allocate(self, nbytes: int) -> Tensor:
        """Host memory that the device reaches, of bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def send_number(self, number: Tensor) -> _C.SentNumber:
        """Lets a number of the device come to the host."""
        wide = number.detach().to(torch.float64).reshape(())
        return _C.SentNumber(self.lane, wide, self.allocate(wide.element_size()).view(torch.float64).view(()))

    def place(self, updates: Sequence[Update], sent: SentBlock | None) -> Staged:
        """Space in the next slot, for what is not ``sent`` already."""
        slot, self._next = self._next, (self._next + 1) % SLOTS
        gradients = (
            self._views(self._gradients, slot, [u.grad for u in updates]) if sent is None else sent.on_host
        )
        parameters = self._views(self._parameters, slot, [u.param for u in updates])
        return Staged(slot, gradients, parameters, None if sent is None else sent.copy)

    def _views(self, memories: list[Tensor], slot: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in the memory of a slot, one after the other."""
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

    def attach(self, update: _C.OffloadUpdate, updates: Sequence[Update], staged: Staged) -> None:
        """Lets ``update``, which computes in ``staged``, take gradients from the device and give parameters back."""
        update.stage(
            self.lane,
            staged.slot,
            [u.grad for u in updates],
            staged.gradients,
            [data_of(u.param) for u in updates],
            staged.parameters,
            # Of fp32 parameters it is the master itself that goes back.
            [u.state[MASTER] if u.param.dtype == torch.float32 else None for u in updates],
            staged.sent,
        )


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() // _GROUP) * _GROUP * tensor.element_size()
