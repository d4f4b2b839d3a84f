"""Transfer of gradients of offloaded updates to the host inside backward.

The copies are described in csrc/optim/sent_gradients.h, [Note: Gradients sent ahead].

[Note: Changes of a sent gradient]
A step uses the copy of a gradient if the gradient is unchanged since it was sent. In between it could be changed by

- the engine, in another reduction of the block, which it reports (`Gradients.listeners`);
- code that reads ``.grad``: it gets the tensor itself, whose memory can be written undetected (``p.grad.data``). The
  attribute is ours (`DistributedParameter.grad`); reading it drops the copy, and so does setting it. Only functions of
  the library that change nothing read the gradient without this (`gradient_of`);
- code that holds the tensor, or an alias, from before: references are counted, and if there are any nothing is sent;
- autograd, through a graph that leads to the shard itself, or an in-place operation: detected by the version counter.

Clipping multiplies gradients by a number on the device; that number is sent after them (`copies_of`, `_grad_stats`). A
dropped copy costs only time: the step copies again, as it copies gradients that were not sent. Each rank decides by
itself; no message and no bit depends on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...._base.host_memory import available_bytes
from ...._base.tensors import gradient_of
from ...._C import SentGradients, SentNumber, StagingLane, lead_graphs_to
from ...._engine.block_state import BlockState
from ...._engine.engine import current_engine
from ...._ranks import context
from ..._updates import Update
from .references import gradients_are_unheld

#: Largest share of the host memory free at the first step for page-locked copies of gradients.
_SHARE_OF_HOST = 0.25
#: Largest gap, in bytes, between gradients that are copied as one run.
_GAP = 1 << 15
_ALIGNMENT = 512  # bytes


class _WayToHost(Protocol):
    """The methods of :class:`~bmtrain.optim.places.overlap.staging.Staging` for gradients in flight."""

    lane: StagingLane

    def allocate(self, nbytes: int) -> Tensor: ...

    def send_number(self, number: Tensor) -> SentNumber: ...


class SentBlock(NamedTuple):
    """Gradients of one block in host memory, or in flight to it, in the order of the updates.

    Attributes:
        copy: the copies.
        on_host: where the gradients are, or will be.
        storages: the memory of the device that the copies refer to, once for each reference.
    """

    copy: SentGradients
    on_host: list[Tensor]
    storages: list[int]


class SentAhead:
    """Gradients that one optimizer sends ahead from one device.

    It learns from the first steps the blocks, and how many reductions each has between two steps: it sends after the
    last. Host memory is allocated for as many blocks, from the first on, as fit in a quarter of the free memory.
    """

    def __init__(self, staging: _WayToHost) -> None:
        self._staging = staging
        self._shares: weakref.WeakKeyDictionary[BlockState, _Share] = weakref.WeakKeyDictionary()
        self._left: int | None = None  # bytes that more blocks may take

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(share.nbytes for share in self._shares.values())

    def reduced(self, runtime: BlockState) -> None:
        """The gradients of a block have reached its shards; further backwards may follow before the step."""
        share = self._shares.get(runtime)
        if share is None:
            return
        share.drop()
        share.num_reductions += 1
        if share.num_reductions >= share.num_expected and share.may_send(runtime):
            share.send(runtime)

    def take(self, runtime: BlockState, updates: Sequence[Update]) -> SentBlock | None:
        """Returns the copies of the gradients of ``updates``, or None if the gradients have changed."""
        share = self._shares.get(runtime)
        return None if share is None else share.take(updates)

    def learn(self, runtime: BlockState, updates: Sequence[Update], local_size: int) -> None:
        """Allocates host memory for the gradients of a block, with their sizes in this step."""
        known = self._shares.get(runtime)
        if known is not None and known.fits(updates):
            return
        if self._left is None:
            self._left = int(_SHARE_OF_HOST * available_bytes()) // local_size
        if known is not None:
            self._left += known.nbytes
            del self._shares[runtime]
        share = _Share(self._staging, updates)
        if share.nbytes <= self._left:
            self._left -= share.nbytes
            share.allocate()
            self._shares[runtime] = share
            runtime.engine.gradients.listeners.add(self)

    def end_step(self) -> None:
        """Ends the step: the next backward belongs to another one."""
        for share in self._shares.values():
            share.drop()
            share.num_expected = max(share.num_reductions, 1)
            share.num_reductions = 0

    def forget(self) -> None:
        """Drops all copies: gradients are zeroed."""
        for share in self._shares.values():
            share.drop()
            share.num_reductions = 0


def copies_of(parameters: Sequence[Tensor]) -> list[_Share]:
    """Returns the current copies that cover only gradients of ``parameters``."""
    current = context.current()
    if current is None:
        return []
    if not any(isinstance(user, SentAhead) for user in current_engine(current).gradients.listeners):
        return []
    copies = {id(copy): copy for p in parameters if (copy := getattr(p, "_sent", None)) is not None}
    members = set(map(id, parameters)) if copies else set()
    return [
        copy
        for copy in copies.values()
        if copy.is_current() and all(id(p) in members for p in copy.parameters)
    ]


class _Share:
    """The parameters of one block that the optimizer updates, and host memory for their gradients.

    Gradients that are neighbours on the device are neighbours here, so that few copies move them.
    """

    def __init__(self, staging: _WayToHost, updates: Sequence[Update]) -> None:
        self.staging = staging
        self.parameters: tuple[Any, ...] = tuple(u.param for u in updates)
        self.num_reductions = 0  # since the last step
        self.num_expected = 1
        #: Device memory that a pending copy refers to.
        self.storages: list[int] = []
        self._shapes = [(u.grad.shape, u.grad.dtype) for u in updates]
        self._offsets, self._end = _offsets([u.grad for u in updates])
        self._memory: Tensor | None = None
        self._on_host: list[Tensor] = []
        self._copy: SentGradients | None = None
        self._marks: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of host memory: torch rounds page-locked allocations to a power of two."""
        return 1 << max(self._end - 1, 1).bit_length()

    def fits(self, updates: Sequence[Update]) -> bool:
        return len(updates) == len(self.parameters) and all(
            u.param is p and (u.grad.shape, u.grad.dtype) == kind
            for u, p, kind in zip(updates, self.parameters, self._shapes, strict=True)
        )

    def allocate(self) -> None:
        self._memory = self.staging.allocate(self._end)
        self._on_host = [
            self._memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for begin, (shape, dtype) in zip(self._offsets, self._shapes, strict=True)
        ]

    # ---- sending

    def may_send(self, runtime: BlockState) -> bool:
        """Whether the gradients are complete, and expected to stay unchanged."""
        return not (
            runtime.open_calls
            or runtime.pending
            or runtime.engine.virtual.is_open
            or any(p._accumulated_hooks for p in self.parameters)
            or lead_graphs_to(list(self.parameters))
        )

    @torch.no_grad()
    def send(self, runtime: BlockState) -> None:
        """Starts the copies, unless a gradient has other references."""
        gradients = [gradient_of(p) for p in self.parameters]
        for gradient, (shape, dtype) in zip(gradients, self._shapes, strict=True):
            if gradient is None or gradient.shape != shape or gradient.dtype != dtype:
                return
            if not gradient.is_contiguous() or gradient.device != self.parameters[0].device:
                return
        runs = self._runs(gradients)
        del gradients, gradient  # these would count as references
        if not gradients_are_unheld(self.parameters, runtime):
            return
        on_device, on_host = [], []
        for first, begin, nbytes in runs:
            gradient = gradient_of(self.parameters[first])
            assert gradient is not None
            assert self._memory is not None
            size = nbytes // gradient.element_size()
            on_device.append(gradient.as_strided((size,), (1,), gradient.storage_offset()))
            on_host.append(self._memory[begin : begin + nbytes].view(gradient.dtype))
        self.storages = [tensor.untyped_storage()._cdata for tensor in on_device]
        self._copy = SentGradients(self.staging.lane, on_device, on_host)
        self._marks = self._present_marks()
        for p in self.parameters:
            p._sent = self

    def _runs(self, gradients: Sequence[Any]) -> list[tuple[int, int, int]]:
        """Returns the copies, each as the number of its first gradient, its place in host memory, its bytes."""
        runs: list[tuple[int, int, int]] = []
        last_storage, last_shift = None, 0
        for number, (gradient, begin) in enumerate(zip(gradients, self._offsets, strict=True)):
            end = begin + gradient.numel() * gradient.element_size()
            storage = gradient.untyped_storage()._cdata
            shift = gradient.storage_offset() * gradient.element_size() - begin
            if runs and (storage, shift) == (last_storage, last_shift):
                first, run_begin, nbytes = runs[-1]
                if 0 <= begin - (run_begin + nbytes) <= _GAP:
                    runs[-1] = first, run_begin, end - run_begin
                    continue
            runs.append((number, begin, end - begin))
            last_storage, last_shift = storage, shift
        return runs

    def _present_marks(self) -> list[tuple[int, int]]:
        return [_mark(gradient_of(p)) for p in self.parameters]

    # ---- validity of the copy

    def is_current(self) -> bool:
        """Whether gradients were sent, and none has changed since."""
        return self._copy is not None and self._present_marks() == self._marks

    def multiply_by(self, factor: Tensor, numbers: dict[int, SentNumber]) -> None:
        """Records a factor by which the gradients are multiplied next; `note_change` must follow.

        Args:
            factor: one number on the device.
            numbers: copies of this factor that were sent already, by channel.
        """
        assert self._copy is not None
        key = id(self.staging)
        if key not in numbers:
            numbers[key] = self.staging.send_number(factor)
        self._copy.scale(numbers[key])

    def note_change(self) -> None:
        """Records that the gradients have been multiplied."""
        self._marks = self._present_marks()

    def take(self, updates: Sequence[Update]) -> SentBlock | None:
        copy = self._copy
        if copy is None:
            return None
        if not self.fits(updates) or [_mark(u.grad) for u in updates] != self._marks:
            self.drop()
            return None
        sent = SentBlock(copy, self._on_host, self.storages)
        self._forget()
        return sent

    def drop(self) -> None:
        """Discards the copy."""
        if self._copy is not None:
            self._copy.drop()
            self._forget()

    def _forget(self) -> None:
        self._copy = None
        self.storages = []
        for p in self.parameters:
            if p._sent is self:
                p._sent = None


def _mark(gradient: Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (gradient.data_ptr(), gradient._version)


def _offsets(gradients: Sequence[Tensor]) -> tuple[list[int], int]:
    """Returns the offsets of gradients in host memory, in bytes, and the end of the last."""
    offsets: list[int] = []
    before: Tensor | None = None
    end = 0
    for gradient in gradients:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if before is not None and _address(before) == _address(gradient):
            gap = gradient.data_ptr() - before.data_ptr() - before.numel() * before.element_size()
            if 0 <= gap <= _GAP:
                begin = end + gap
        offsets.append(begin)
        end = begin + gradient.numel() * gradient.element_size()
        before = gradient
    return offsets, end


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
