"""Folders of ``torch.distributed.checkpoint``: any part of a tensor in them."""

from __future__ import annotations

import io
import itertools
import math
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._base.tensors import bytes_of, in_host_memory
from ..errors import UnreadableFileError
from .torch_table import DTYPES, STORAGES, numbers_of, unpickle

_LOCAL_HEADER = 30  # bytes of a record of a zip archive before its name
_DAMAGED = zipfile.BadZipFile, LookupError, TypeError, ValueError, RuntimeError, struct.error


class Box(NamedTuple):
    """A part of a tensor, and the archive that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int  # in bytes
    length: int


class BoxedTensor(NamedTuple):
    """A tensor and its parts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class _Found(NamedTuple):
    """Position of a box's elements in its file, and how they lie there."""

    position: int
    numel: int
    strides: tuple[int, ...]
    marks: dict[str, bool]  # "conj", "neg": what is to be done to the stored elements


class TorchFolder:
    """The files of a checkpoint.

    Args:
        folder: of the files.
        table: of :func:`read_table`.

    Attributes:
        places: the tensors by name.
        bytes_read: bytes read from the files so far.
    """

    def __init__(self, folder: Path, table: Mapping[str, Any]) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.places = {
            name: BoxedTensor(
                DTYPES[dtype],
                tuple(shape),
                tuple(Box(tuple(offsets), tuple(sizes), *rest) for offsets, sizes, *rest in boxes),
            )
            for name, (dtype, shape, boxes) in table["tensors"].items()
        }
        self._values: Mapping[str, tuple[str, int, int]] = table["values"]
        self._wanted: dict[Box, str] = {}  # the first tensor that needs it
        self._found: dict[Box, _Found] = {}

    @property
    def values(self) -> list[str]:
        """Names of values other than tensors."""
        return list(self._values)

    def check_sizes(self) -> None:
        """Raises FileNotFoundError or UnreadableFileError unless all files are there in full length."""
        ranges = [
            (box.file, box.begin + box.length, name) for name, t in self.places.items() for box in t.boxes
        ]
        ranges += [(file, begin + length, name) for name, (file, begin, length) in self._values.items()]
        sizes = {file: (self.folder / file).stat().st_size for file, _, _ in ranges}
        for file, end, name in sorted(ranges):
            if end > sizes[file]:
                raise UnreadableFileError(
                    f"{self.folder / file}: damaged from {name} on: expected at least {end} bytes, got {sizes[file]}"
                )

    def request(self, name: str, runs: Iterable[tuple[int, int]] | None = None) -> None:
        """Notes that elements of a flattened tensor will be read: (first, number) of each run, None for all."""
        for box, *_ in self._sources(name, runs):
            self._wanted.setdefault(box, name)

    def verify(self) -> None:
        """Opens the requested tensors: reads the headers of the archives, no elements."""
        for box, name in self._wanted.items():
            self._find(box, name)

    def read(self, name: str, runs: Iterable[tuple[int, int]] | None = None) -> torch.Tensor:
        """Elements of a flattened tensor, 1-D, in newly allocated memory; ``runs`` as for :meth:`request`."""
        place = self.places[name]
        wanted = [(0, math.prod(place.shape))] if runs is None else list(runs)
        values = torch.empty(sum(count for _, count in wanted), dtype=place.dtype, device="cpu")
        if not values.numel():
            return values
        out, size, done = bytes_of(values), place.dtype.itemsize, 0
        for box, first, count, to in self._sources(name, wanted):
            found = self._find(box, name)
            part = out[to * size : (to + count) * size]
            if _is_contiguous(box.sizes, found.strides) and not found.marks:
                self._read_into(box.file, found.position + first * size, part, name)
            else:
                elements = self._rearranged(box, found, place.dtype, name)[first : first + count]
                part[:] = bytes_of(elements)
            done += count
        if done != values.numel():
            raise UnreadableFileError(f"{self.folder}: {name}: its parts overlap")
        return values

    def value(self, name: str) -> Any:
        """A value that is not a tensor, made of tensors and plain Python values."""
        file, begin, length = self._values[name]
        data = bytearray(length)
        self._read_into(file, begin, memoryview(data), name)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise UnreadableFileError(
                f"{self.folder / file}: {name}: expected numbers, texts, lists and tensors alone: {first}"
            ) from None

    def _sources(
        self, name: str, runs: Iterable[tuple[int, int]] | None
    ) -> Iterator[tuple[Box, int, int, int]]:
        """Positions of elements: runs of (box, first element in it, number, number in the result)."""
        place = self.places[name]
        wanted = [(0, math.prod(place.shape))] if runs is None else list(runs)
        for box in place.boxes:
            starts, run = _runs_of(place.shape, box)
            to = 0
            for begin, count in wanted if run else []:
                for number in range(max(bisect_right(starts, begin) - 1, 0), len(starts)):
                    start = starts[number]
                    low, high = max(start, begin), min(start + run, begin + count)
                    if start >= begin + count:
                        break
                    if low < high:
                        yield box, number * run + low - start, high - low, to + low - begin
                to += count

    def _find(self, box: Box, name: str) -> _Found:
        if box not in self._found:
            source = f"{self.folder / box.file}: {name}"
            try:
                self._found[box] = self._open(box, self.places[name].dtype, source)
            except UnreadableFileError:
                raise
            except _DAMAGED as error:
                raise UnreadableFileError(
                    f"{source}: damaged: not a tensor of torch.save ({type(error).__name__}: {error})"
                ) from None
        return self._found[box]

    def _open(self, box: Box, dtype: torch.dtype, source: str) -> _Found:
        with open(self.folder / box.file, "rb", buffering=0) as file:
            window = _Window(file, box.begin, box.length)
            with zipfile.ZipFile(window) as archive:
                records = {record.filename: record for record in archive.infolist()}
            if any(record.compress_type != zipfile.ZIP_STORED for record in records.values()):
                raise UnreadableFileError(f"{source}: compressed")
            [described] = [name for name in records if name.endswith("/data.pkl")]
            told = unpickle(window.read_record(records[described]), source)
            (_, kind, key, _, _), offset, sizes, strides, *rest = told.args
            folder = described.removesuffix("data.pkl")
            order = records.get(f"{folder}byteorder")
            is_little = order is None or window.read_record(order) == b"little"
            record = records[f"{folder}data/{key}"]
            position = window.position_of(record)
            self.bytes_read += window.bytes_read
        names_dtype = told.name == "_rebuild_tensor_v3"
        given: Any = rest[2] if names_dtype else STORAGES.get(kind.name)
        numel = record.file_size // dtype.itemsize
        needed = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) + 1
        numbers_of([offset, *sizes, *strides])
        if tuple(sizes) != box.sizes or DTYPES[given] != dtype or not is_little:
            raise UnreadableFileError(
                f"{source}: damaged: expected {box.sizes} of {dtype}, got {tuple(sizes)} of {given}"
            )
        if needed > numel or position + record.file_size > box.length:
            raise UnreadableFileError(
                f"{source}: damaged: {record.file_size} bytes for {tuple(sizes)} of {dtype}"
            )
        at = box.begin + position + offset * dtype.itemsize
        return _Found(at, numel - offset, tuple(strides), dict(*rest[2 + names_dtype :]))

    def _rearranged(self, box: Box, found: _Found, dtype: torch.dtype, name: str) -> torch.Tensor:
        """The elements of a box that was saved in another order, or as a conjugate or a negative, flattened."""
        stored = torch.empty(found.numel, dtype=dtype, device="cpu")
        self._read_into(box.file, found.position, bytes_of(stored), name)
        elements = stored.as_strided(box.sizes, found.strides)
        elements = elements.conj() if found.marks.get("conj") else elements
        return in_host_memory(-elements if found.marks.get("neg") else elements).view(-1)

    def _read_into(self, file: str, at: int, out: memoryview, name: str) -> None:
        with open(self.folder / file, "rb", buffering=0) as opened:
            opened.seek(at)
            done = 0
            while done < len(out):
                got = opened.readinto(out[done:])
                if not got:
                    raise UnreadableFileError(f"{self.folder / file}: ends within {name}")
                done += got
        self.bytes_read += len(out)


def _is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _runs_of(shape: tuple[int, ...], box: Box) -> tuple[list[int], int]:
    """First elements, in the flattened tensor, of the runs that a box consists of, and the length of each."""
    last = len(shape) - 1  # the last dimension that the box does not fill
    while last > 0 and box.sizes[last] == shape[last]:
        last -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    run = math.prod(box.sizes[max(last, 0) :])
    base = sum(at * stride for at, stride in zip(box.offsets, strides, strict=True))
    steps = [range(0, box.sizes[dim] * strides[dim], strides[dim] or 1) for dim in range(max(last, 0))]
    return [base + sum(step) for step in itertools.product(*steps)], run


class _Window(io.RawIOBase):
    """A range of bytes of a file, as a file to read."""

    def __init__(self, file: io.RawIOBase, begin: int, length: int) -> None:
        self._file, self._begin, self._length = file, begin, length
        self._at = 0
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError(f"expected a position from 0, got {start + offset}")
        self._at = start + offset
        return self._at

    def position_of(self, record: zipfile.ZipInfo) -> int:
        """Where the bytes of a record of an archive begin."""
        self.seek(record.header_offset)
        name_length, extra_length = struct.unpack("<26x2H", self.read(_LOCAL_HEADER))
        begin: int = record.header_offset + _LOCAL_HEADER + name_length + extra_length
        return begin

    def read_record(self, record: zipfile.ZipInfo) -> bytes:
        """The bytes of a small record, without its checksum, which torch may have left out."""
        self.seek(self.position_of(record))
        return self.read(min(record.file_size, self._length)) or b""

    def readinto(self, buffer: Any) -> int:
        wanted = max(min(len(buffer), self._length - self._at), 0)
        self._file.seek(self._begin + self._at)
        got = self._file.readinto(memoryview(buffer)[:wanted]) or 0
        self._at += got
        self.bytes_read += got
        return got
