"""The memory file of a rank: its shards, optimizer state, gradients and journal, which its keeper maps too."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .._C import ShardedBuffer, StepJournal
from .._engine.engine import current_engine
from .._ranks.context import Context
from ..parameter import DistributedParameter

_LINE = 64  # bytes
#: Distance between the arrays of a state: those of large shards would map to the same cache sets without it.
_SKEW = 133 * _LINE
_MARK_BYTES = 16
_WIDEST = 8  # bytes of a gradient's element


class Places(NamedTuple):
    """Offsets in a memory file, in bytes.

    Attributes:
        values: of each parameter.
        states: of the arrays of each parameter of each optimizer, in the order of `arrays_of`.
        first_pieces: their places in the journal.
        message: of the gradients, up to the journal.
        journal: of the journal, up to the end.
        num_pieces: number of pieces in the journal.
    """

    values: Sequence[int]
    states: Sequence[Sequence[int]]
    first_pieces: Sequence[int]
    message: int
    journal: int
    num_pieces: int


class Layout:
    """Assignment of offsets to the arrays of a rank.

    Attributes:
        places: the offsets.
        buffers: the buffers of Blocks, with the offsets of their shards.
        alone: parameters outside of Blocks, with their offsets.
        nbytes: size of the file.
    """

    def __init__(
        self,
        ctx: Context,
        params: Sequence[DistributedParameter],
        arrays: Sequence[tuple[int, DistributedParameter, tuple[str, ...]]],
    ) -> None:
        self.nbytes = _LINE  # the mark
        values: dict[int, int] = {}
        self.buffers: list[tuple[ShardedBuffer, int]] = []
        for buffer in (buffer for block in current_engine(ctx).blocks for buffer in block.buffers):
            offset = self._take(buffer.shard.nbytes)
            self.buffers.append((buffer, offset))
            for index, p in enumerate(buffer.parameters):
                values[id(p)] = offset + int(buffer.local_view(index).storage_offset()) * p.element_size()
        self.alone = [(p, self._take(p.nbytes)) for p in params if id(p) not in values]
        values.update((id(p), offset) for p, offset in self.alone)
        states: list[list[int]] = [[] for _ in arrays]
        for k in range(max((len(names) for _, _, names in arrays), default=0)):
            self._take(_SKEW)
            for (_, p, names), offsets in zip(arrays, states, strict=True):
                if k < len(names):
                    offsets.append(self._take(4 * p.numel()))
        message = self._take(8 * (1 + len(params)) + sum(_WIDEST * p.numel() + 8 for p in params))
        first_pieces = [0, *accumulate(StepJournal.num_pieces_of(p.numel()) for _, p, _ in arrays)]
        num_pieces = first_pieces.pop()
        journal = self._take(StepJournal.nbytes(num_pieces))
        own = [values[id(p)] for p in params]
        self.places = Places(own, states, first_pieces, message, journal, num_pieces)

    def _take(self, nbytes: int) -> int:
        begin = self.nbytes
        self.nbytes += -(-nbytes // _LINE) * _LINE
        return begin


class MemoryFile:
    """A mapped memory file. Pages that nothing was written to take no memory.

    Args:
        descriptor: the open file; closed here.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    @classmethod
    def new(cls, nbytes: int) -> tuple[MemoryFile, int]:
        """Returns a new file of zeros, and its descriptor for other processes. Raises OSError."""
        descriptor = os.memfd_create("bmtrain", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            return cls(os.dup(descriptor)), descriptor
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def of_process(cls, process: int, descriptor: int, mark: str) -> MemoryFile | None:
        """Maps the file that a process has open; None if that is not possible, or it is another file.

        In another PID namespace the same number may be of another process.
        """
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            if not os.readlink(path).startswith("/memfd:bmtrain"):
                return None
            file = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except (OSError, ValueError):
            return None
        return file if file.mark() == mark else None

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a 1-D tensor, with a storage of its own: `torch.save` writes whole storages."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def between(self, begin: int, end: int) -> Tensor:
        """Returns bytes."""
        return self.tensor(begin, end - begin, torch.uint8)

    def make_mark(self) -> str:
        """Writes a random mark to the file, and returns it: another process may have a file of the same number."""
        self._map[:_MARK_BYTES] = os.urandom(_MARK_BYTES)
        return self.mark()

    def mark(self) -> str:
        return self._map[:_MARK_BYTES].hex()
