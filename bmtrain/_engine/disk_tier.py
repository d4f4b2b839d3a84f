"""Transfers between a drive and the parameters and gradients of blocks.

[Note: Blocks on a drive]
A shard of parameters or of gradients that lives on a drive has one storage for its whole life, as a gathered buffer has
([Note: The gathered storage] in csrc/shard). At rest a mapping of the file is under it, so everything that reads or
writes the shard works as usual, with the page cache as memory. While a block needs it, memory of a small pool is
under it, which transfers fill and empty around the page cache:

- before a gather: its parameters are read, and the parameters of the next two calls, in the learnt order, ahead;
- when the gradients of a block have reached its shard: they are written, while the blocks before it run backward,
  unless an update inside the backward takes them (`optim/places/disk_later.py`);
- in a step: chunks of parameters, gradients and state pass together (`optim/places/disk.py`).

So memory holds a few blocks, however many there are. Checksums compare bytes that are read with the bytes that were
written. A version counter, or an access to ``param.data`` or ``param.grad``, shows that a user may have written to the
mapping; its bytes are taken as they are then.

A failure of a drive is noticed by one rank. It is raised by all of them, before the next gather or update.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._base.tensors import storage_references
from .._C import SEAL_BYTES, BufferPool, DiskFile, DiskQueue
from ..errors import DiskError
from .drives import Drives

_ALIGNMENT = 4096  # bytes, of csrc/disk
_LEAST = 1 << 20  # bytes of a buffer of the pool that starts at a page, and of a piece
_PIECES = 8  # of a transfer, which threads move at the same time
_SLOTS = 64  # pieces in transfer
#: Gradient shards that are being written while others are computed.
LEAVING = 2
#: Blocks that are read before their gather starts.
AHEAD = 2
_IDLE = 2  # buffers of the pool of one size


class _Block(Protocol):
    def fetch(self) -> None: ...

    def forget(self) -> None: ...


class _Gradients(Protocol):
    def rest_gradients(self) -> None: ...


class DiskTier:
    """The queue of a process's transfers and the memory that they use.

    Args:
        drives: where files are made.
        is_pinned: whether memory is page-locked, for copies between it and a device.
    """

    def __init__(self, drives: Drives, *, is_pinned: bool) -> None:
        self.drives = drives
        self._is_pinned = is_pinned
        self._pinned: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.pool = BufferPool(_IDLE, bool(int(os.environ.get("BMTRAIN_POISON_BUFFERS", "0"))))
        self.queue = DiskQueue(os.environ.get("BMTRAIN_DISK_IO", "auto"), _SLOTS, 0)
        self._free = list(range(_SLOTS))
        self._under_way: deque[Transfer] = deque()
        self._leaving: deque[_Gradients] = deque()
        self._ahead: Sequence[_Block] = ()
        self.precedes_updates = False  # which happen inside the backward

    @property
    def nbytes(self) -> int:
        """Bytes of memory, in use or idle."""
        stats = self.pool.stats()
        return stats["bytes_in_use"] + stats["bytes_idle"] + sum(memory.nbytes for memory in self._pinned)

    def take(self, nbytes: int) -> Tensor:
        """Returns bytes of memory that start at a page."""
        if self._is_pinned:  # torch keeps what is freed, and reuses it when copies are done
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            if memory.data_ptr() % _ALIGNMENT:  # small allocations share a page
                memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=True)
                memory = memory[-memory.data_ptr() % _ALIGNMENT :][:nbytes]
            self._pinned.add(memory)
            return memory
        return self.pool.acquire(max(nbytes, _LEAST))[:nbytes]

    def slot(self) -> int:
        """Returns a free slot of the queue; waits for the oldest transfer if there is none."""
        while not self._free:
            self._under_way.popleft().complete()
        return self._free.pop()

    def begin(self, transfer: Transfer) -> None:
        self._under_way.append(transfer)

    def end(self, transfer: Transfer, slots: list[int]) -> None:
        self._free += slots
        with suppress(ValueError):
            self._under_way.remove(transfer)

    @contextmanager
    def updates_inside(self) -> Iterator[None]:
        """Context manager for a backward in which blocks are updated."""
        self.precedes_updates = True
        try:
            yield
        finally:
            self.precedes_updates = False

    # ---- reads ahead and writes behind

    def look_ahead(self, running: Any, upcoming: Iterable[tuple[Any, Any]]) -> None:
        """Reads the parameters of a block that is called and of the next ones, and drops reads for others.

        Args:
            running: the block.
            upcoming: the calls expected after it, see `Schedule.upcoming`.
        """
        known = running, *(block for _, block in islice(upcoming, AHEAD))
        blocks = [block for block in known if hasattr(block, "fetch")]
        self.forget(blocks)
        self._ahead = blocks
        for block in blocks:
            block.fetch()

    def forget(self, kept: Sequence[_Block] = ()) -> None:
        """Drops reads for others than the blocks ``kept``."""
        for block in self._ahead:
            if block not in kept:
                block.forget()
        self._ahead = ()

    def note_leaving(self, gradients: _Gradients) -> None:
        """Called when gradients begin to be written; waits for those before the latest."""
        self._leaving.append(gradients)
        self.settle(LEAVING)

    def note_return(self, gradients: _Gradients) -> None:
        """Called when another reduction adds to gradients that were written: their memory is in use again."""
        with suppress(ValueError):
            self._leaving.remove(gradients)

    def settle(self, number: int = 0) -> None:
        """Waits until all gradients are written, except for ``number`` blocks."""
        while len(self._leaving) > number:
            self._leaving.popleft().rest_gradients()


def tier_of(engine: Any) -> DiskTier:
    """Returns the tier of a process with drives; makes it for the first user."""
    if engine.tier is None:
        engine.tier = DiskTier(engine.drives, is_pinned=engine.device.type == "cuda")
    tier: DiskTier = engine.tier
    return tier


class Transfer:
    """A transfer between a range of a file and memory, in a few pieces."""

    def __init__(
        self, tier: DiskTier, file: DiskFile, offset: int, memory: Tensor, label: str, *, is_write: bool
    ) -> None:
        self._tier = tier
        self._slots: list[int] = []
        self.error: DiskError | None = None
        move = tier.queue.write if is_write else tier.queue.read
        piece = max(_LEAST, -(-memory.numel() // (_PIECES * SEAL_BYTES)) * SEAL_BYTES)  # which no piece cuts
        for begin in range(0, memory.numel(), piece):
            slot, part = tier.slot(), memory[begin : begin + piece]
            move(slot, file, offset + begin, part.numel(), part)
            self._slots.append(slot)
        tier.begin(self)
        if tier.drives.observer is not None:
            tier.drives.observer.transferring(self, label, is_write=is_write)

    def complete(self) -> None:
        """Waits for its end; a failure is kept."""
        slots, self._slots = self._slots, []
        for slot in slots:
            try:
                self._tier.queue.wait(slot)
            except DiskError as error:
                self.error = self.error or error
        self._tier.end(self, slots)
        if self._tier.drives.observer is not None:
            self._tier.drives.observer.transferred(self)


class SealedArray(NamedTuple):
    """An array at rest, of whose bytes all checksums are known.

    Attributes:
        file, offset: the place of its bytes.
        mapping: the bytes.
        crc32: of each ``SEAL_BYTES``, which are the chunks of a checkpoint.
        check: compares the bytes with these.
    """

    file: DiskFile
    offset: int
    mapping: Tensor
    crc32: list[int]
    check: Callable[[], None]

    @property
    def nbytes(self) -> int:
        return self.mapping.numel()


def sealed(file: DiskFile, offset: int, mapping: Tensor, check: Callable[[], None]) -> list[SealedArray]:
    """Returns the array, unless a checksum is missing or it is smaller than the bytes under one."""
    crc32 = file.seals(offset, mapping.numel()) if mapping.numel() >= SEAL_BYTES else []
    return [SealedArray(file, offset, mapping, crc32, check)] if crc32 else []


class StoredArray:
    """A flat array in a range of a file, see [Note: Blocks on a drive].

    Args:
        tier: moves it.
        file: has the range, zeros at first.
        offset: of the range.
        nbytes: of the array.
        label: for messages.
        put: puts memory under the array's storage.

    Attributes:
        memory: with the array's values, or about to get them; None at rest.
        is_in_use: whether `memory` is under the storage.
    """

    def __init__(
        self,
        tier: DiskTier,
        file: DiskFile,
        offset: int,
        nbytes: int,
        label: str,
        put: Callable[[Tensor], Any],
    ) -> None:
        self._tier = tier
        self.file = file
        self.offset = offset
        self.nbytes = aligned(nbytes)
        self.label = label
        self._put = put
        self.mapping = file.map(offset, self.nbytes).tensor(0, self.nbytes)
        self._references = storage_references(self.mapping)  # while no storage has it
        self.memory: Tensor | None = None
        self.is_in_use = False
        self._transfer: Transfer | None = None
        self._is_zero = False

    def leave(self) -> Tensor:
        """Leaves memory or mapping to others, who keep it; returns what takes its place, without contents."""
        if self.is_in_use:
            self.memory = self._tier.take(self.nbytes)
            return self.memory
        self.rest()
        self.file, self.offset = self._tier.drives.reserve(self.nbytes), 0
        self.mapping = self.file.map(0, self.nbytes).tensor(0, self.nbytes)
        self._references = storage_references(self.mapping)
        return self.mapping

    @property
    def is_held(self) -> bool:
        """Whether the mapping is under a storage, of the array or of tensors that a user keeps."""
        return storage_references(self.mapping) > self._references

    def unseal(self) -> None:
        """Called where a user may have written to the mapping."""
        self.file.unseal(self.offset, self.nbytes)
        self._is_zero = False

    def zero(self) -> None:
        """Makes an array at rest zeros."""
        self.file.zero(self.offset, self.nbytes)
        self._is_zero = True

    def fetch(self) -> None:
        """Starts to read it, unless it is in memory."""
        if self.memory is None:
            self.memory = self._tier.take(self.nbytes)
            if self._is_zero:
                self.memory.zero_()
            else:
                self._start(is_write=False)

    def take(self) -> None:
        """Puts memory without contents under the storage."""
        if self.memory is None:
            self.memory = self._tier.take(self.nbytes)
        self._use()

    def arrive(self) -> None:
        """Reads it and waits. A failure, or bytes that differ from the written ones, is noted in the tier."""
        self.fetch()
        self.wait()
        self._use()

    def check(self) -> None:
        """Compares the bytes at rest with the written ones.

        Raises:
            DiskError: they differ, or cannot be read.
        """
        self.rest()
        self.fetch()
        self.rest()
        self._tier.drives.check()

    def _use(self) -> None:
        if not self.is_in_use:
            self.is_in_use = True
            self._put(self.memory)  # type: ignore[arg-type]

    def send(self) -> None:
        """Starts to write it; it stays in memory until `rest`."""
        assert self.memory is not None
        self._is_zero = False
        self._start(is_write=True)

    def _start(self, *, is_write: bool) -> None:
        assert self.memory is not None
        tier, place = self._tier, (self.file, self.offset, self.memory)
        self._transfer = Transfer(tier, *place, self.label, is_write=is_write)

    def rest(self) -> None:
        """Waits until it is written, if it is, and frees its memory."""
        self.wait()
        if self.is_in_use:
            self.is_in_use = False
            self._put(self.mapping.detach())  # a storage of its own counts as a reference
        self.memory = None

    def wait(self) -> None:
        """Waits until it is read or written."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.complete()
            if transfer.error is not None:
                self._tier.drives.note(DiskError(f"{self.label}: {transfer.error}"))


def aligned(nbytes: int) -> int:
    """Returns the length of the pages that ``nbytes`` take."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
