"""Folders of ``torch.distributed.checkpoint``, written by torch's own writer from each rank's values."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

Path_ = tuple[Any, ...]  # keys of nested dicts and lists; joined by dots they are the name


@dataclass(frozen=True)
class Part:
    """A box of a tensor, which this rank writes.

    Args:
        path: of the tensor, see `Path_`.
        dtype, shape: of the whole tensor.
        offsets, sizes: of the box.
        read: returns its elements, on the host, in the order of the box.
    """

    path: Path_
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def boxes_of(
    shape: tuple[int, ...], begin: int, end: int, at: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that a run of a flattened tensor consists of, in the order of its elements.

    Example:
        >>> list(boxes_of((3, 4), 2, 12))  # the end of the first row, and the two others
        [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    if not shape or begin == end:
        yield (*at, *[0] * len(shape)), (*[1] * len(at), *shape)
        return
    row = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(begin, row), divmod(end, row)
    if first == last:
        yield from boxes_of(shape[1:], skipped, rest, (*at, first))
        return
    if skipped:
        yield from boxes_of(shape[1:], skipped, row, (*at, first))
        first += 1
    if first < last:
        yield (*at, first, *[0] * (len(shape) - 1)), (*[1] * len(at), last - first, *shape[1:])
    if rest:
        yield from boxes_of(shape[1:], 0, rest, (*at, last))


class _Planner(DefaultSavePlanner):
    """Hands the writer the data of an item."""

    def __init__(self, reads: Mapping[MetadataIndex, Callable[[], Any]]) -> None:
        super().__init__()
        self._reads = reads

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._reads[write_item.index]()


@dataclass(frozen=True)
class _Written:
    """Contribution of one rank to the table."""

    paths: dict[str, Path_]
    items: list[WriteItem]
    results: Any


def write_part(
    folder: Path, rank: int, world_size: int, parts: Iterable[Part], values: Mapping[Path_, Any]
) -> _Written:
    """Writes the file of one rank; the result can be pickled, and is for :func:`write_table`.

    Raises:
        OSError: the file cannot be written, for example to a full disk.
    """
    items: list[WriteItem] = []
    reads: dict[MetadataIndex, Callable[[], Any]] = {}
    paths: dict[str, Path_] = {}
    for part in parts:
        name = _name(part.path)
        index = MetadataIndex(name, part.offsets)
        box = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
        data = TensorWriteData(box, TensorProperties(dtype=part.dtype), torch.Size(part.shape))
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        paths[name], reads[index] = part.path, part.read
    for path, value in values.items():
        index = MetadataIndex(_name(path))
        items.append(WriteItem(index, WriteItemType.BYTE_IO))
        paths[index.fqn], reads[index] = path, _saving(value)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(rank == 0)
    plans = [SavePlan([]) for _ in range(world_size)]
    plans[rank] = writer.prepare_local_plan(SavePlan(items))
    plan = writer.prepare_global_plan(plans)[rank]
    try:
        results = writer.write_data(plan, _Planner(reads)).wait()
    except RuntimeError as error:  # torch fails to complete the file that it could not write
        if isinstance(error.__context__, OSError):
            raise OSError(error.__context__.errno, error.__context__.strerror, str(folder)) from None
        raise
    return _Written(paths, items, results)


def write_table(folder: Path, written: Iterable[_Written]) -> None:
    """Completes a checkpoint whose parts all ranks have written. For rank 0."""
    contents: dict[str, Any] = {}
    paths: dict[str, Path_] = {}
    results = []
    for one in written:
        paths.update(one.paths)
        results.append(one.results)
        for item in one.items:
            data = item.tensor_data
            if data is None:
                contents[item.index.fqn] = BytesStorageMetadata()
                continue
            whole = TensorStorageMetadata(data.properties, data.size, [])
            contents.setdefault(item.index.fqn, whole).chunks.append(data.chunk)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(contents, planner_data=paths), results)


def _name(path: Path_) -> str:
    return ".".join(map(str, path))


def _saving(value: Any) -> Callable[[], io.BytesIO]:
    def save() -> io.BytesIO:
        stream = io.BytesIO()
        torch.save(value, stream)
        return stream

    return save
