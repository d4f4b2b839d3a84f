"""Offloading of activations to host memory between forward and backward.

[Note: Activations on the host]
Tensors that a block's forward saves for backward are copied to pinned host memory on a stream of their own, while later
blocks compute. The device memory is freed when it has no other references: so the island keeps neither its inputs nor
its outputs, only their positions in the graph. When a block's backward begins, its tensors are copied back, and the
copies for the preceding block are started behind them.

In-place modification of an offloaded tensor raises as in autograd: a tensor without memory that shares its version
counter remains.

Storages are moved, not tensors: the storage of several saved views is moved once. It is moved when the forward has
ended, not when autograd saves a tensor: only then nothing writes to it any more. Versions could not show earlier that
memory is unchanged, as several tensors of one storage may have version counters of their own (`unsafe_chunk`, `.data`).
Parameters in the gathered buffer cost nothing between the passes and are never moved; nor are buffers and arguments
without gradient, which other references keep alive, and small tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from .._base.tree import detached


class Mover(Protocol):
    """Moves memory between a device and its host, overlapped with compute. All tensors are 1-D, of bytes."""

    device_type: str
    #: Smaller storages stay on the device.
    least_bytes: int

    def to_host(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the host, made after the work queued so far."""

    def to_device(self, memory: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Starts a copy to the device; calling the second result makes the compute stream wait for it."""


class CudaMover:
    """Copies on a stream that overlaps with the compute stream."""

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
        memory.record_stream(self._stream)  # not reused before it has been read
        return host

    def to_device(self, memory: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        computing = torch.cuda.current_stream(self._device)
        back = torch.empty(memory.shape, dtype=memory.dtype, device=self._device)
        self._stream.wait_stream(computing)  # after earlier uses of this memory
        with torch.cuda.stream(self._stream):
            back.copy_(memory, non_blocking=True)
            arrived = self._stream.record_event()
        back.record_stream(self._stream)
        return back, lambda: torch.cuda.current_stream(self._device).wait_event(arrived)


class _Piece:
    """A storage on the host, with a copy on the device while it is needed there."""

    __slots__ = ("_arrived", "_back", "_mover", "_origin", "host")

    def __init__(self, memory: torch.Tensor, mover: Mover) -> None:
        self._mover = mover
        # While it is kept, no other storage has the same address.
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


class _Packed:
    """Representation of a saved tensor.

    Attributes:
        tensor: the tensor itself, or one without memory once its storage was moved.
        version: version of the tensor when it was saved.
        piece: its storage, if that was moved.
        offset, stride: position of the tensor in its storage.
    """

    __slots__ = ("__weakref__", "offset", "piece", "stride", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.piece: _Piece | None = None
        self.offset = 0
        self.stride: tuple[int, ...] = ()

    def move_to(self, piece: _Piece) -> None:
        """Leaves the tensor's memory to ``piece``."""
        self.piece = piece
        self.offset, self.stride = int(self.tensor.storage_offset()), self.tensor.stride()
        self.tensor = without_memory(self.tensor)

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a detached tensor of the same shape and dtype that shares the version counter, without memory."""
    stand_in = tensor.detach()
    stand_in.data = tensor.detach().new_empty(()).expand(tensor.shape)
    return stand_in


class _Entrance(torch.autograd.Function):
    """Maps a leaf without memory to its value: gradient accumulators would keep the memory of their leaves."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def entrance(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a leaf without memory that receives the gradient, and the tensor to use in place of ``tensor``."""
    leaf = without_memory(tensor).requires_grad_()
    inner: torch.Tensor = _Entrance.apply(leaf, tensor.detach())
    return leaf, detached(tensor, inner)


class HostActivations:
    """Tensors that one forward of a block saves for its backward, in host memory.

    Args:
        label: names the block in errors.
        mover: of the compute device.
        is_parameter: whether a tensor lies in the block's gathered buffers.
        others: tensors that other references keep alive.
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
        self._pieces: dict[int, _Piece] = {}  # by storage
        self._saved: list[
            weakref.ref[_Packed]
        ] = []  # saved by the running forward; autograd may have dropped some

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(piece.host.nbytes for piece in self._pieces.values())

    def put(self, tensor: torch.Tensor) -> Any:
        """Returns a handle of ``tensor`` for :meth:`take`, to be called when the forward has ended."""
        if self._is_parameter(tensor):
            return tensor
        packed = _Packed(tensor)
        self._move(packed)
        return packed

    def _move(self, packed: _Packed) -> None:
        if not self._is_worth_moving(packed.tensor):
            return
        storage = packed.tensor.untyped_storage()
        if storage._cdata not in self._pieces:
            memory = torch.empty(0, dtype=torch.uint8, device=packed.tensor.device).set_(storage)
            self._pieces[storage._cdata] = _Piece(memory, self._mover)
        packed.move_to(self._pieces[storage._cdata])

    def _is_worth_moving(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device.type == self._mover.device_type
            and _has_memory(tensor)
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= self._mover.least_bytes
            and tensor.untyped_storage()._cdata not in self._others
        )

    def take(self, packed: Any) -> torch.Tensor:
        """Returns the tensor, on the device."""
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
        """Returns ``result`` with its tensors replaced by handles for :meth:`take_all`."""
        return tree_map_only(torch.Tensor, self.put, result)

    def take_all(self, result: Any) -> Any:
        """Returns the original tree on the device, or None if one of its tensors was written to since."""
        if not all(leaf.is_unchanged for leaf in tree_leaves(result) if isinstance(leaf, _Packed)):
            return None
        return tree_map_only(_Packed, self.take, result)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager for the forward; it collects the tensors that autograd saves."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, self.take):
            yield
        for packed in (reference() for reference in self._saved):
            if packed is not None:
                self._move(packed)
        self._saved = []

    def _save(self, tensor: torch.Tensor) -> Any:
        if self._is_parameter(tensor):
            return tensor
        packed = _Packed(tensor)
        self._saved.append(weakref.ref(packed))
        return packed

    def bring_back(self) -> None:
        """Starts the copies to the device in reverse order, the order of backward."""
        for piece in reversed(self._pieces.values()):
            piece.fetch()

    def drop(self, *, for_good: bool) -> None:
        """Frees the copies on the device; ``for_good`` also frees the host memory."""
        for piece in self._pieces.values():
            piece.drop_copy()
        if for_good:
            self._pieces.clear()


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


class HostStack:
    """Stack of the forwards whose activations are on the host; backward pops in reverse order."""

    def __init__(self) -> None:
        self._stack: list[weakref.ref[HostActivations]] = []

    def push(self, activations: HostActivations) -> None:
        """Adds a forward that has ended."""
        self._stack.append(weakref.ref(activations))

    def bring_back(self, activations: HostActivations) -> None:
        """Starts the copies for a backward that begins, and for the preceding forward, which follows."""
        activations.bring_back()
        known = [one for one in (reference() for reference in self._stack) if one is not None]
        place = next((i for i, one in enumerate(known) if one is activations), 0)
        if place:
            known[place - 1].bring_back()
        self._stack = [weakref.ref(one) for one in known]

    def pop(self, activations: HostActivations) -> None:
        """Removes a forward that needs its activations no more."""
        self._stack = [one for one in self._stack if one() not in (None, activations)]
