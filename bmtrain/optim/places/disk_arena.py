"""Arrays of optimizer state in a file, and the buffers through which they pass a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._C import DiskFile, DiskQueue, ShardedBuffer
from ..._engine.disk_shard import StoredShard
from ..._engine.disk_tier import SealedArray, aligned, sealed
from ..._engine.drives import Drives
from ...errors import DiskError
from .._updates import Update
from ..formulas import Part

Arrays = Sequence[tuple[str, torch.dtype]]
#: Names of arrays of a chunk that are not the optimizer's.
PARAMETER, GRADIENT = "parameter", "gradient"
#: In place of a gradient that is read from the drive.
IN_FILE = torch.empty(0)

#: Elements of a chunk: 2 MiB of an fp32 array, with which a drive is as fast as with more.
CHUNK = 1 << 19
#: Chunks of each drive that are read before they are needed; as many are being written after they were computed.
AHEAD = 2


class Arena:
    """The same arrays for one flat buffer of a block, in a file of their own; each array is laid out like the shard.

    Args:
        drives: one of which gets the file.
        arrays: names and dtypes.
        buffer: the flat buffer.
        stored: its parameters and gradients on the drive, which pass with the arrays.
        is_whole: whether it passes as a whole, for matrices. The state of its other parameters is in memory then.

    Raises:
        DiskError: the drive has no room.
    """

    def __init__(
        self,
        drives: Drives,
        arrays: Arrays,
        buffer: ShardedBuffer,
        stored: StoredShard | None,
        is_whole: bool,
    ) -> None:
        self.arrays = tuple(arrays)
        self.is_whole = is_whole
        self.buffer = buffer
        self.stored = stored
        self.numel = buffer.layout.partition
        self.dtypes = dict(arrays)
        self._sizes = [aligned(self.numel * dtype.itemsize) for dtype in self.dtypes.values()]
        offsets = list(accumulate(self._sizes, initial=0))
        self.file = drives.reserve(offsets.pop())
        self.offsets = dict(zip(self.dtypes, offsets, strict=True))
        self.mapping = self.file.map(0, self.file.nbytes)
        self.homes: dict[Tensor, Home] = {}
        #: Whether a step has written since the state was last shown.
        self.is_sealed = False

    def add(self, p: Any, is_whole: bool) -> Home:
        """Returns the place of ``p``, a parameter of the buffer, updated as a whole matrix or not."""
        spec = p._spec
        _, _, begin = spec.layout.local_part(spec.index, spec.group.rank)
        self.homes[p] = Home(self, p, begin, self.dtypes if is_whole or not self.is_whole else {})
        return self.homes[p]

    def sealed(self, check: Callable[[], None]) -> list[SealedArray]:
        """Returns the arrays, if all checksums of all of them are known."""
        found: list[SealedArray] = []
        for at, size in zip(self.offsets.values(), self._sizes, strict=True):
            found += sealed(self.file, at, self.mapping.tensor(at, size), check)
        return found if len(found) == len(self._sizes) else []

    def chunks(self) -> list[Chunk]:
        """Returns all that pass a step."""
        return [Chunk(self, number) for number in range(1 if self.is_whole else -(-self.numel // CHUNK))]


class Home:
    """The place of one parameter in an arena, with arrays or without."""

    def __init__(self, arena: Arena, p: Tensor, begin: int, arrays: Mapping[str, torch.dtype]) -> None:
        self.arena = arena
        self.begin = begin
        self.shape = p.shape
        self.tensors = {name: self._tensor(name, dtype) for name, dtype in arrays.items()}
        self._is_new = True  # so all zeros

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        at, nbytes = (
            self.arena.offsets[name] + self.begin * dtype.itemsize,
            self.shape.numel() * dtype.itemsize,
        )
        mapped = self.arena.mapping.tensor(at, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
        return mapped.view(dtype).view(self.shape)

    @property
    def end(self) -> int:
        return self.begin + self.shape.numel()

    def chunk_numbers(self) -> range:
        """Returns the chunks that hold elements of it; a whole arena is one, also where this rank has no elements."""
        return range(1) if self.arena.is_whole else range(self.begin // CHUNK, -(-self.end // CHUNK))

    def fits(self, p: Tensor, names: Sequence[str], dtypes: Sequence[torch.dtype]) -> bool:
        """Whether it has these arrays, for the parameter as it is now."""
        known = self.arena.dtypes if self.tensors else dict(zip(names, dtypes, strict=True))
        return self.is_of(p) and all(
            known.get(name) == dtype for name, dtype in zip(names, dtypes, strict=True)
        )

    def is_of(self, p: Any) -> bool:
        """Whether the parameter is still in the arena's flat buffer; conversions to other dtypes make new ones."""
        return self.shape == p.shape and any(b is self.arena.buffer for b in p._block.runtime().buffers)

    def zeroed(self, names: Sequence[str]) -> list[Tensor]:
        """Returns arrays, filled with zeros, for a new state."""
        self.unseal()
        found = [self.tensors[name] for name in names]
        if not self._is_new:
            for tensor in found:
                tensor.zero_()
        self._is_new = False
        return [tensor.detach() for tensor in found]  # references to the state's own tensors are counted

    def take_foreign(self, state: dict[str, Any]) -> None:
        """Copies arrays here that a user has put into the state, or an earlier home."""
        for name, own in self.tensors.items():
            if name in state and state[name].data_ptr() != own.data_ptr():
                self.unseal()
                state[name] = own.copy_(state[name]).detach()

    def unseal(self) -> None:
        """Called before a write: from then on the file holds other bytes than steps have written."""
        for number in self.chunk_numbers():
            for offset, nbytes in Chunk(self.arena, number).ranges().values():
                self.arena.file.unseal(offset, nbytes)


class Chunk:
    """Elements of an arena that are in memory together, and the updates that meet them."""

    def __init__(self, arena: Arena, number: int) -> None:
        self.arena = arena
        self.begin = number * CHUNK
        self.end = arena.numel if arena.is_whole else min(self.begin + CHUNK, arena.numel)
        self.pieces: list[tuple[Part, Update, Home]] = []

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def label(self) -> str:
        """The label of the first parameter's block, for messages."""
        for p, home in self.arena.homes.items():
            if home.end > self.begin:
                runtime = p._block.runtime()  # type: ignore[attr-defined]
                return str(runtime.label)
        return "a block"

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Returns offset and length in the file, by the names of the arrays."""
        return {
            name: (
                self.arena.offsets[name] + self.begin * dtype.itemsize,
                aligned(self.numel * dtype.itemsize),
            )
            for name, dtype in self.arena.dtypes.items()
        }

    def transfers(self) -> list[_Span]:
        """Returns the arrays that pass through memory in a step."""
        spans = [
            _Span(name, self.arena.file, offset, nbytes, self.arena.dtypes[name], True)
            for name, (offset, nbytes) in self.ranges().items()
        ]
        stored = self.arena.stored
        if stored is None or not self.pieces:
            return spans
        dtype = self.arena.buffer.shard.dtype
        passing = [(PARAMETER, stored.parameters, True)]
        if any(update.grad is IN_FILE for _, update, _ in self.pieces):
            passing.append((GRADIENT, stored.gradients, False))
        for name, array, is_written in passing:
            if array is not None:
                begin, end = (n * dtype.itemsize for n in (self.begin, self.end))
                nbytes = aligned(end - begin)
                memory = (
                    array.memory[begin : begin + nbytes]
                    if stored.is_taken and array.memory is not None
                    else None
                )
                spans.append(_Span(name, array.file, array.offset + begin, nbytes, dtype, is_written, memory))
        return spans

    def parts(self, arrays: dict[str, Tensor]) -> list[Part]:
        """Returns the updates of these elements.

        Args:
            arrays: the chunk in memory.
        """
        parts: list[Part] = []
        for origin, update, home in self.pieces:
            first, last = max(self.begin, home.begin), min(self.end, home.end)
            of_param, of_chunk = (slice(first - at, last - at) for at in (home.begin, self.begin))
            param = arrays[PARAMETER][of_chunk] if PARAMETER in arrays else update.param[of_param]
            grad = arrays[GRADIENT][of_chunk] if update.grad is IN_FILE else update.grad[of_param]
            state: dict[str, Any] = {}
            for name, value in update.state.items():
                if name in home.tensors:
                    state[name] = arrays[name][of_chunk]
                elif name == "step":
                    state[name] = value
                else:  # in memory, or the parameter itself
                    is_own = value.data_ptr() != update.param.data_ptr()
                    state[name] = value.view(-1)[of_param] if is_own else param
            piece = Update(param, grad, state, update.is_fresh, update.source)
            if parts and parts[-1].numbers is origin.numbers:
                parts[-1].updates.append(piece)
            else:
                parts.append(origin._replace(updates=[piece]))
        return parts


def failure_of(name: str, chunk: Chunk, error: DiskError) -> DiskError:
    """Returns the failure of a transfer of the array ``name``, with the chunk's label."""
    what = {PARAMETER: "parameters", GRADIENT: "gradients"}.get(name, "optimizer state")
    return DiskError(f"{what} of {chunk.label}: {error}")


def in_turns(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Returns chunks in an order in which each drive has its share of every part of the list."""
    by_drive: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_drive.setdefault(chunk.arena.file.name, []).append(chunk)
    ends = [((n + 1) / len(own), chunk) for own in by_drive.values() for n, chunk in enumerate(own)]
    return [chunk for _, chunk in sorted(ends, key=lambda pair: pair[0])]


class _Span(NamedTuple):
    """One array of a chunk, in a file."""

    name: str
    file: DiskFile
    offset: int
    nbytes: int
    dtype: torch.dtype
    is_written: bool
    memory: Tensor | None = None  # with its values, which no read needs to bring


class _Buffer(NamedTuple):
    """One array of the chunk in a slot."""

    number: int
    memory: Tensor


class Stream:
    """Buffers for a few chunks, and the order in which these pass.

    Args:
        num_arrays: the most that a chunk has.
        drives: which all move chunks at one time.
    """

    def __init__(self, num_arrays: int, drives: Drives) -> None:
        self.num_arrays = num_arrays
        self._drives = drives
        self._ahead = AHEAD * len(drives.directories)
        count = (2 * self._ahead + 1) * num_arrays
        self.queue = DiskQueue(
            os.environ.get("BMTRAIN_DISK_IO", "auto"), count, CHUNK * torch.float32.itemsize
        )
        buffers = [_Buffer(n, self.queue.buffer(n)) for n in range(count)]
        self._slots = [buffers[n : n + num_arrays] for n in range(0, count, num_arrays)]
        self._chunks: dict[int, Chunk] = {}  # of the last transfers
        self._spans: list[list[_Span]] = [[] for _ in self._slots]
        self._leaving: set[int] = set()  # slots that are being written

    @property
    def nbytes(self) -> int:
        return sum(buffer.memory.numel() for slot in self._slots for buffer in slot)

    def check(self, arena: Arena) -> None:
        """Compares the contents of the file with the values that steps have written.

        Raises:
            DiskError: it differs, or cannot be read.
        """
        chunks = iter(arena.chunks())
        self.let_pass(lambda: next(chunks, None), None, lambda chunk: None)

    def let_pass(
        self,
        take: Callable[[], Chunk | None],
        compute: Callable[[list[Part]], None] | None,
        written: Callable[[Chunk], None],
    ) -> None:
        """Reads chunks, has their parts computed, and writes them.

        Args:
            take: returns the next chunk, or None if there is none at present.
            compute: computes parts; None: the chunks are only read.
            written: called with each chunk once it is in the file.

        Raises:
            DiskError: a chunk cannot be read or written, or differs from the values written.
        """
        self._written = written
        num_slots = len(self._slots)
        begun, ended = 0, 0  # chunks that are read, and computed
        try:
            while (chunk := take()) is not None or ended < begun:
                if chunk is not None:
                    self._read(begun % num_slots, chunk)
                    begun += 1
                if chunk is None or begun - ended > self._ahead:
                    slot = ended % num_slots
                    self._wait(slot)
                    if compute is not None:
                        compute(self._chunks[slot].parts(self._arrays(slot)))
                        self._write(slot)
                    ended += 1
            for number in range(begun, begun + num_slots):  # in the order in which they were written
                self._wait(number % num_slots)
        except BaseException:
            self._drain()
            raise
        finally:
            self._chunks.clear()  # which refer to tensors of the step
            del self._written

    def _read(self, slot: int, chunk: Chunk) -> None:
        self._wait(slot)
        self._chunks[slot], self._spans[slot] = chunk, chunk.transfers()
        for buffer, span in zip(self._slots[slot], self._spans[slot], strict=False):
            if span.memory is None:
                self.queue.read(buffer.number, span.file, span.offset, span.nbytes)
        self._note_start(slot, is_write=False)

    def _write(self, slot: int) -> None:
        for buffer, span in zip(self._slots[slot], self._spans[slot], strict=False):
            if span.is_written:
                self.queue.write(buffer.number, span.file, span.offset, span.nbytes, span.memory)
        self._leaving.add(slot)
        self._note_start(slot, is_write=True)

    def _note_start(self, slot: int, *, is_write: bool) -> None:
        observer = self._drives.observer
        if observer is not None:
            observer.transferring(
                self._slots[slot], f"state of {self._chunks[slot].label}", is_write=is_write
            )

    def _arrays(self, slot: int) -> dict[str, Tensor]:
        chunk = self._chunks[slot]
        return {
            span.name: (buffer.memory if span.memory is None else span.memory)[
                : chunk.numel * span.dtype.itemsize
            ].view(span.dtype)
            for buffer, span in zip(self._slots[slot], self._spans[slot], strict=False)
        }

    def _wait(self, slot: int) -> None:
        for buffer, span in zip(self._slots[slot], self._spans[slot], strict=False):
            try:
                self.queue.wait(buffer.number)
            except DiskError as error:
                raise failure_of(span.name, self._chunks[slot], error) from None
        if self._drives.observer is not None:
            self._drives.observer.transferred(self._slots[slot])
        if slot in self._leaving:
            self._leaving.remove(slot)
            self._written(self._chunks.pop(slot))

    def _drain(self) -> None:
        self._leaving.clear()
        for slot in self._slots:
            for buffer in slot:
                with suppress(DiskError):
                    self.queue.wait(buffer.number)
