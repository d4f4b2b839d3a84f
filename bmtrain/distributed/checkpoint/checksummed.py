"""The bytes of one rank's file and their checksums: written, or shared with a file on the same drive."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress

from ..._base.atomic_file import NamedFile
from ..._engine.disk_tier import SealedArray
from ...errors import DiskError
from .manifest import CHUNK
from .snapshot import Run

__all__ = ["Checksummed"]

_SLICE = 1 << 23  # bytes given to the operating system at once
_FICLONERANGE = 0x4020940D  # of linux/fs.h


class Checksummed:
    """Writes to a file and keeps a checksum of each chunk of it.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, file: NamedFile) -> None:
        self._file = file
        self._crc32: list[int] = []
        self._running = 0
        self.size = 0

    def write(self, data: memoryview) -> None:
        self._add(data)
        for begin in range(0, len(data), _SLICE):
            rest = data[begin : begin + _SLICE]
            while len(rest):
                rest = rest[self._file.write(rest) :]

    def _add(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            end = at + min(CHUNK - self.size % CHUNK, len(data) - at)
            self._running = zlib.crc32(data[at:end], self._running)
            self.size += end - at
            at = end
            if self.size % CHUNK == 0:
                self._crc32.append(self._running)
                self._running = 0

    def finish(self) -> list[int]:
        return self._crc32 + ([self._running] if self.size % CHUNK else [])

    # ---- arrays of a disk tier

    def append_arrays(self, arrays: Iterable[SealedArray], runs: Iterable[Run], ranks: int) -> dict[str, int]:
        """Appends the arrays that hold runs, and returns the offsets of these runs in the file, by name.

        Their bytes are shared (reflinks). Where the filesystem cannot do that, they are written, and compared.

        Args:
            ranks: the most that save to the same drive.

        Raises:
            DiskError: the bytes of an array differ from the written ones.
        """
        known = sorted({array.mapping.data_ptr(): array for array in arrays}.items())
        held: dict[int, list[Run]] = {}
        for run in runs:
            begin = run.values.data_ptr()
            number = bisect_right(known, begin, key=lambda pair: pair[0]) - 1
            if run.values.numel() and number >= 0 and begin < known[number][0] + known[number][1].nbytes:
                held.setdefault(number, []).append(run)
        drive = os.fstatvfs(self._file.fileno())
        room = drive.f_bavail * drive.f_frsize // ranks  # later steps write to other blocks than these
        offsets: dict[str, int] = {}
        for number, members in held.items():
            address, array = known[number]
            room -= array.nbytes
            offset = self._clone(array) if room >= 0 else None
            if offset is None:
                offset = self._copy(array)
            offsets.update((run.name, offset + run.values.data_ptr() - address) for run in members)
        return offsets

    def _clone(self, array: SealedArray) -> int | None:
        """Shares an array at the start of a chunk; returns its offset, or None where the filesystem refuses."""
        gap = -self.size % CHUNK
        offset, source = self.size + gap, (array.file.fileno(), array.offset, array.nbytes)
        try:
            fcntl.ioctl(self._file, _FICLONERANGE, struct.pack("qQQQ", *source, offset))
        except OSError:
            return None
        self._add(memoryview(bytes(gap)))  # a hole
        self._crc32 += array.crc32
        if array.nbytes % CHUNK:
            self._running = self._crc32.pop()
        self.size += array.nbytes
        self._file.seek(self.size)
        return offset

    def _copy(self, array: SealedArray) -> int:
        """Reads an array and writes it at the start of a chunk; returns its offset."""
        self.write(memoryview(bytes(-self.size % CHUNK)))
        offset, number, read = self.size, len(self._crc32), 1
        buffer = memoryview(mmap.mmap(-1, _SLICE))  # aligned, as reads around the page cache need it
        while read and (at := self.size - offset) < array.nbytes:
            part, read = buffer[: array.nbytes - at], 0
            with suppress(OSError):
                read = os.preadv(array.file.fileno(), [part], array.offset + at)
            self.write(part[:read])
        if self.finish()[number:] != array.crc32:
            array.check()  # names the bytes
            raise DiskError(
                f"{array.file.name}: cannot read the bytes at offset {array.offset} as they were written"
            )
        return offset
