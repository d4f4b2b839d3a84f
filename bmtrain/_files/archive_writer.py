"""Model files as ``torch.save`` makes them, written one tensor at a time, with checksums of the written bytes."""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._base.atomic_file import AtomicFile
from .._base.tensors import bytes_of, in_host_memory

_ALIGNMENT = 64
_FOLDER = "archive"
_LOCAL_HEADER = 30 + 20  # bytes before the name: the fixed part, and (after it) the sizes as 64-bit numbers
_SLICE = 1 << 23


class _Stored:
    """A placeholder in the pickle for a tensor whose bytes are record ``number``."""

    def __init__(self, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.number, self.dtype, self.shape = number, dtype, shape


class _Storage:
    """A placeholder in the pickle for the record itself."""

    def __init__(self, stored: _Stored) -> None:
        self.stored = stored


class _Pickler(pickle.Pickler):
    """Writes the placeholders as torch writes tensors and storages."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        stored = obj.stored
        numel = math.prod(stored.shape)
        kinds: Any = torch.storage._dtype_to_storage_type_map()
        kind = getattr(torch, kinds[stored.dtype]) if stored.dtype in kinds else torch.UntypedStorage
        size = numel if stored.dtype in kinds else numel * stored.dtype.itemsize
        return ("storage", kind, str(stored.number), "cpu", size)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Stored):
            return NotImplemented
        stride = torch.empty(obj.shape, device="meta").stride()
        common: tuple[Any, ...] = (_Storage(obj), 0, obj.shape, stride, False, OrderedDict())
        if obj.dtype in torch.storage._dtype_to_storage_type_map():
            return torch._utils._rebuild_tensor_v2, common
        return torch._utils._rebuild_tensor_v3, (*common, obj.dtype)


def write_archive(
    path: str | os.PathLike[str],
    table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], torch.Tensor],
    ties: Mapping[str, str],
    order: list[str],
    metadata: Any = None,
) -> None:
    """Writes a state dict that plain ``torch.load`` reads; the file appears when it is complete.

    Args:
        table: dtype and shape of each tensor, by name.
        read: gives a tensor, on the host; called once for each.
        ties: further names, by name of the tensor that they share.
        order: all names in the order of the state dict.
        metadata: versions of the modules, as ``state_dict()`` has them.
    """
    stored = {name: _Stored(number, *entry) for number, (name, entry) in enumerate(table.items())}
    state: Any = OrderedDict((name, stored[ties.get(name, name)]) for name in order)
    if metadata is not None:
        state._metadata = metadata
    text = io.BytesIO()
    _Pickler(text, protocol=2).dump(state)
    with AtomicFile(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "data.pkl", memoryview(text.getvalue()))
        _add(archive, "byteorder", memoryview(b"little"))
        for name, entry in stored.items():
            values = in_host_memory(read(name))
            _add(archive, f"data/{entry.number}", bytes_of(values) if values.numel() else memoryview(b""))
        _add(archive, "version", memoryview(b"3\n"))


def _add(archive: zipfile.ZipFile, name: str, data: memoryview) -> None:
    """Adds one record, its bytes at a multiple of 64; ``zipfile`` computes the checksum."""
    record = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    begin = (archive.fp.tell() if archive.fp else 0) + _LOCAL_HEADER + len(record.filename)
    padding = (-begin - 4) % _ALIGNMENT
    record.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(record, "w", force_zip64=True) as opened:
        for at in range(0, len(data), _SLICE):
            opened.write(data[at : at + _SLICE])
