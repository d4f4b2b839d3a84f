"""Reading parts of tensors out of a checkpoint, each byte only after its checksum."""

from __future__ import annotations

import mmap
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..._base.tensors import bytes_of
from ..._files.shared_state import DistributedTensorWrapper, decode
from ...errors import UnreadableFileError
from ...global_var import context
from ...parameter import DistributedParameter
from .manifest import CHUNK, DTYPES, Manifest, Piece, StoredTensorInfo
from .snapshot import own_name
from .spread import Spread, local_run, spread_of

__all__ = ["Reader", "StoredTensor"]


class Reader:
    """The files of a checkpoint, mapped to memory when they are needed.

    All ranges to read are requested first; :meth:`verify` then checks them; only afterwards may they be read.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self.checkpoint = checkpoint
        self.manifest = manifest
        self.bytes_verified = 0
        self._pieces: dict[str, list[list[Piece]]] = {}
        self._wanted: dict[tuple[int, int], str] = {}  # (file, chunk) -> the first tensor that needs it
        self._verified: set[tuple[int, int]] = set()
        self._maps: dict[int, mmap.mmap] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def info(self, name: str) -> StoredTensorInfo:
        """Position of a tensor in the files."""
        found = self.manifest.tensors.get(name)
        if found is None:
            raise UnreadableFileError(f"{self.checkpoint}: tensor {name} is not in the manifest")
        return found

    # ---- what is needed, and whether it is intact

    def request(self, name: str, spread: Spread, part: int, begin: int, count: int) -> None:
        """Notes that elements of a slice under ``spread`` of the tensor will be read."""
        size = DTYPES[self.info(name).dtype].itemsize
        for file, offset, num, _ in self._sources(name, spread, part, begin, count):
            last = (offset + num * size - 1) // CHUNK
            for chunk in range(offset // CHUNK, last + 1):
                self._wanted.setdefault((file, chunk), name)

    def request_whole(self, name: str) -> None:
        """Notes that the tensor will be read."""
        shape = tuple(self.info(name).shape)
        self.request(name, Spread(shape), 0, 0, Spread(shape).numel)

    def verify(self) -> None:
        """Reads all that was requested and compares checksums. The files stay open, and may be removed."""
        for index in sorted({file for file, _ in self._wanted}):
            file = self.manifest.files[index]
            path = self.checkpoint / file.name
            handle = os.open(path, os.O_RDONLY)
            try:
                for chunk in sorted(chunk for known, chunk in self._wanted if known == index):
                    if (index, chunk) not in self._verified:
                        self._verify_chunk(handle, index, chunk)
                if index not in self._maps:
                    self._maps[index] = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(handle)

    def _verify_chunk(self, handle: int, index: int, chunk: int) -> None:
        file = self.manifest.files[index]
        length = min(CHUNK, file.size - chunk * CHUNK)
        crc32 = 0
        at = chunk * CHUNK
        while length:
            data = os.pread(handle, length, at)
            if not data:
                break
            crc32 = zlib.crc32(data, crc32)
            at, length = at + len(data), length - len(data)
            self.bytes_verified += len(data)
        if length or crc32 != file.crc32[chunk]:
            raise UnreadableFileError(
                f"{self.checkpoint / file.name}: damaged at tensor {self._wanted[index, chunk]}: bytes "
                f"{chunk * CHUNK} to {min((chunk + 1) * CHUNK, file.size)} do not have the checksum of the manifest"
            )
        self._verified.add((index, chunk))

    # ---- reading

    def read(self, name: str, spread: Spread, part: int, begin: int, count: int) -> torch.Tensor:
        """Elements of a slice under ``spread``, 1-D, on the host. All have been requested and verified."""
        dtype = DTYPES[self.info(name).dtype]
        values = torch.empty(count, dtype=dtype, device="cpu")
        if not count:
            return values
        out = bytes_of(values)
        size = dtype.itemsize
        for file, offset, num, to in self._sources(name, spread, part, begin, count):
            end = offset + num * size
            if any((file, chunk) not in self._verified for chunk in range(offset // CHUNK, -(-end // CHUNK))):
                raise RuntimeError(f"{name}: read before it was verified")
            out[to * size : (to + num) * size] = self._maps[file][offset:end]
        return values

    def read_whole(self, name: str) -> torch.Tensor:
        """The tensor, on the host. It has been requested and verified."""
        shape = tuple(self.info(name).shape)
        return self.read(name, Spread(shape), 0, 0, Spread(shape).numel).view(shape)

    def _sources(
        self, name: str, spread: Spread, part: int, begin: int, count: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Positions of elements: runs of (file, offset in bytes, number of elements, number in the result)."""
        info = self.info(name)
        if tuple(info.shape) != spread.shape:
            raise ValueError(f"{name}: expected shape {spread.shape}, the checkpoint has {tuple(info.shape)}")
        size = DTYPES[info.dtype].itemsize
        stored = info.spread
        to = 0
        for saved_part, first, num in _translate(spread, stored, part, begin, count):
            pieces = self._pieces_of(name)[saved_part]
            at = bisect_right(pieces, first, key=lambda piece: piece.begin) - 1
            while num:
                piece = pieces[at]
                skip = first - piece.begin
                length = min(piece.num - skip, num)
                yield piece.file, piece.offset + skip * size, length, to
                first, num, to, at = first + length, num - length, to + length, at + 1

    def _pieces_of(self, name: str) -> list[list[Piece]]:
        if name not in self._pieces:
            info = self.info(name)
            self._pieces[name] = [
                sorted((p for p in info.pieces if p.part == part and p.num), key=lambda p: p.begin)
                for part in range(info.parts)
            ]
        return self._pieces[name]

    # ---- values

    def request_value(self, told: Any) -> None:
        """Notes that the tensors in a value will be read."""
        for name in told["tensors"]:
            self.request_whole(name)

    def value(self, told: Any) -> Any:
        """A value that :meth:`Snapshot.add_value` described."""
        return decode(told["is"], [self.read_whole(name) for name in told["tensors"]])

    def own_or_shared(self, name: str, same_world: bool) -> str:
        """The name of this rank's own value of a replica, if it had one and the ranks are as many; else of rank 0's."""
        own = own_name(context().topology.rank, name)
        return own if same_world and own in self.manifest.tensors else name


def _translate(
    spread: Spread, stored: Spread, part: int, begin: int, count: int
) -> Iterator[tuple[int, int, int]]:
    """A run of a slice under one spread as runs of slices under another."""
    if (spread.dim, spread.parts) == (stored.dim, stored.parts):
        if count:
            yield part, begin, count
        return
    for first, length in spread.to_whole(part, begin, count):
        yield from stored.from_whole(first, length)


class StoredTensor(DistributedTensorWrapper):
    """A tensor of a checkpoint, as ``load_state_dict`` sees it: each rank reads its part when it is needed."""

    def __init__(self, reader: Reader, name: str, whole_name: str) -> None:
        info = reader.info(name)
        self._reader = reader
        self._name = name
        self._whole_name = whole_name
        self._tensor = None
        self.shape = torch.Size(info.shape)
        self.dtype = DTYPES[info.dtype]

    def request_for(self, target: torch.Tensor | None) -> None:
        """Requests the elements that are read to load ``target``."""
        if isinstance(target, DistributedParameter):
            self._reader.request(self._name, spread_of(target), *local_run(target))
        else:
            self._reader.request_whole(self._whole_name)

    def broadcast(self) -> torch.Tensor:
        """The full tensor on the run device; every rank reads it."""
        return self._reader.read_whole(self._whole_name).to(context().device)

    def part_of(self, param: DistributedParameter) -> torch.Tensor:
        """This rank's part."""
        part = self._reader.read(self._name, spread_of(param), *local_run(param))
        return part.to(context().device, param.dtype)
