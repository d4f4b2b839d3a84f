"""Activations that wait for their backward in the host's memory.

[Note: Activations on the host]
What a block's forward leaves for its backward is copied to pinned memory of the host while what follows computes, on a
stream of its own, and the device's memory is free as soon as nobody else refers to it: so the island keeps neither its
inputs nor its outputs, only where they are in the graph. When a block's backward begins, everything comes back that it
needs, and what the block before it in the forward needs starts to come back behind it.

What was modified in place after it was put away is refused as autograd refuses it: a tensor without memory that shares
the version of what it stands for remains.

Memory is moved, not tensors: what several saved tensors are views of is moved once. Parameters in the gathered buffer
cost nothing between the passes and are never moved; nor are buffers and arguments without gradient, which others keep
alive, and what is too small to be worth it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["CudaMover", "HostActivations", "HostStack", "Mover", "entrance", "without_memory"]


class Mover(Protocol):
    """Moves memory between a device and its host, behind what computes. All tensors are 1-D, of bytes."""

    device_type: str
    #: Less than this stays where it is.
    least_bytes: int

    def to_host(self, memory: torch.Tensor) -> torch.Tensor:
        """A copy on the host of what was computed until now."""

    def to_device(self, memory: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Starts to bring it back; the second result has what computes wait for it."""


class CudaMover:
    """By a stream that overlaps with the one that computes."""

    device_type = "cuda"
    least_bytes = 1 << 16

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, memory: torch.Tensor) -> torch.Tensor:
        host = torch.empty(memory.shape, dtype=memory.dtype, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(memory, non_blocking=True)
        memory.record_stream(self._stream)  # nobody else gets it before it has been read
        return host

    def to_device(self, memory: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        computing = torch.cuda.current_stream(self._device)
        back = torch.empty(memory.shape, dtype=memory.dtype, device=self._device)
        self._stream.wait_stream(computing)  # whoever had this memory before is done with it
        with torch.cuda.stream(self._stream):
            back.copy_(memory, non_blocking=True)
            arrived = self._stream.record_event()
        back.record_stream(self._stream)
        return back, lambda: torch.cuda.current_stream(self._device).wait_event(arrived)


class _Piece:
    """Memory on the host, and while it is needed on the device."""

    __slots__ = ("_arrived", "_back", "_mover", "_origin", "host")

    def __init__(self, memory: torch.Tensor, mover: Mover) -> None:
        self._mover = mover
        # As long as it is kept, no other storage has the same address.
        self._origin = StorageWeakRef(memory.untyped_storage())
        self.host = mover.to_host(memory)
        self._back: torch.Tensor | None = None
        self._arrived: Callable[[], None] | None = None

    def fetch(self) -> None:
        if self._back is None:
            self._back, self._arrived = self._mover.to_device(self.host)

    def on_device(self) -> torch.Tensor:
        self.fetch()
        if self._arrived is not None:
            self._arrived()
            self._arrived = None
        assert self._back is not None
        return self._back

    def drop_copy(self) -> None:
        self._back = self._arrived = None


@dataclass(frozen=True)
class _Packed:
    """Stands for a tensor.

    Args:
        tensor: itself if it stays where it is, else without memory.
        version: when it was put.
        piece: its memory, if that was moved.
        offset, stride: where in it the tensor lies.
    """

    tensor: torch.Tensor
    version: int
    piece: _Piece | None = None
    offset: int = 0
    stride: tuple[int, ...] = ()

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor of the same shape, dtype and version, now and later, that keeps no memory alive."""
    stand_in = tensor.detach()
    stand_in.data = tensor.detach().new_empty(()).expand(tensor.shape)
    return stand_in


class _Entrance(torch.autograd.Function):
    """From a leaf without memory to its value: accumulators keep their leaves, and so would keep the memory."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def entrance(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf without memory that gets the gradient, and what stands for ``tensor`` inside."""
    leaf = without_memory(tensor).requires_grad_()
    inner: torch.Tensor = _Entrance.apply(leaf, tensor.detach())
    return leaf, inner


class HostActivations:
    """What one forward of a block leaves for its backward.

    Args:
        label: names the block in errors.
        mover: of the device that computes.
        is_parameter: whether a tensor lies in the block's gathered buffers.
        others: what others keep alive.
    """

    def __init__(
        self,
        label: str,
        mover: Mover,
        is_parameter: Callable[[torch.Tensor], bool],
        others: Iterable[torch.Tensor],
    ) -> None:
        self._label = label
        self._mover = mover
        self._is_parameter = is_parameter
        self._others = {tensor.untyped_storage()._cdata for tensor in others if _has_memory(tensor)}
        self._pieces: dict[tuple[int, int], _Piece] = {}  # by storage and version

    @property
    def nbytes(self) -> int:
        """On the host."""
        return sum(piece.host.nbytes for piece in self._pieces.values())

    def put(self, tensor: torch.Tensor) -> Any:
        """What :meth:`take` wants in place of ``tensor``."""
        if self._is_parameter(tensor):
            return tensor
        if not self._is_worth_moving(tensor):
            return _Packed(tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        if key not in self._pieces:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._pieces[key] = _Piece(memory, self._mover)
        piece, offset, stride = self._pieces[key], int(tensor.storage_offset()), tensor.stride()
        return _Packed(without_memory(tensor), tensor._version, piece, offset, stride)

    def _is_worth_moving(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.device.type == self._mover.device_type
            and _has_memory(tensor)
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= self._mover.least_bytes
            and tensor.untyped_storage()._cdata not in self._others
        )

    def take(self, packed: Any) -> torch.Tensor:
        """The tensor, on the device."""
        if not isinstance(packed, _Packed):
            parameter: torch.Tensor = packed
            return parameter
        if not packed.is_unchanged:
            raise RuntimeError(
                f"{self._label}: a tensor of shape {tuple(packed.tensor.shape)} needed for the gradient has been "
                f"modified by an inplace operation (version {packed.tensor._version}, expected {packed.version})"
            )
        if packed.piece is None:
            return packed.tensor
        memory = packed.piece.on_device()
        like = torch.empty(0, dtype=packed.tensor.dtype, device=memory.device)
        return like.set_(memory.untyped_storage(), packed.offset, packed.tensor.shape, packed.stride)

    def put_all(self, result: Any) -> Any:
        """``result`` with what :meth:`take_all` wants in place of its tensors."""
        return tree_map_only(torch.Tensor, self.put, result)

    def take_all(self, result: Any) -> Any:
        """What was put, on the device; None if something has written to it since."""
        if not all(leaf.is_unchanged for leaf in tree_leaves(result) if isinstance(leaf, _Packed)):
            return None
        return tree_map_only(_Packed, self.take, result)

    def saving(self) -> Any:
        """While it lasts, everything that autograd saves is put here."""
        return torch.autograd.graph.saved_tensors_hooks(self.put, self.take)

    def bring_back(self) -> None:
        """Starts to bring everything back, the last that was put first: backward wants it so."""
        for piece in reversed(self._pieces.values()):
            piece.fetch()

    def drop(self, *, for_good: bool) -> None:
        """Frees the copies on the device; ``for_good`` also those on the host."""
        for piece in self._pieces.values():
            piece.drop_copy()
        if for_good:
            self._pieces.clear()


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


class HostStack:
    """Forwards whose activations are on the host, in their order; backward goes the other way."""

    def __init__(self) -> None:
        self._stack: list[weakref.ref[HostActivations]] = []

    def push(self, activations: HostActivations) -> None:
        """A forward has ended."""
        self._stack.append(weakref.ref(activations))

    def bring_back(self, activations: HostActivations) -> None:
        """The backward of a forward begins: it needs its own, and the one after it those of the forward before."""
        activations.bring_back()
        known = [one for one in (reference() for reference in self._stack) if one is not None]
        place = next((i for i, one in enumerate(known) if one is activations), 0)
        if place:
            known[place - 1].bring_back()
        self._stack = [weakref.ref(one) for one in known]

    def pop(self, activations: HostActivations) -> None:
        """Nothing of it is needed any more."""
        self._stack = [one for one in self._stack if one() not in (None, activations)]
