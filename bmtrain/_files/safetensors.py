"""The safetensors format: a length, a JSON table, raw little-endian tensors. No code can be in it.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._base.atomic_file import AtomicFile
from .._base.tensors import bytes_of, in_host_memory
from ..errors import UnreadableFileError

_NAMES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
_OF_DTYPE = {dtype: name for name, dtype in _NAMES.items()}
_FILE_NAME = re.compile(r"[^/\0]{1,240}\.safetensors")  # beside the index
_MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation


class TensorPlace(NamedTuple):
    """Position of a tensor in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # in bytes, from the beginning of the file


class SafetensorsFile:
    """One file, whose table has been read and checked: the ``places`` of its tensors by name, and ``metadata``.

    Raises:
        UnreadableFileError: it is truncated, or its table is inconsistent.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        try:
            self.places, self.metadata = _read_table(self.path)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, UnreadableFileError):
                raise
            raise UnreadableFileError(f"{path}: not a safetensors file: {error}") from error

    def read(self, name: str, runs: Iterable[tuple[int, int]] | None = None) -> torch.Tensor:
        """Elements of a flattened tensor, 1-D, in newly allocated memory.

        ``runs`` has the (first element, number) of each run of elements, one after the other; None is all.
        """
        place = self.places[name]
        wanted = [(0, math.prod(place.shape))] if runs is None else list(runs)
        values = torch.empty(sum(count for _, count in wanted), dtype=place.dtype, device="cpu")
        if values.numel():
            out, done, end = bytes_of(values), 0, 0
            with open(self.path, "rb", buffering=0) as file:
                for begin, count in wanted:
                    file.seek(place.offset + begin * place.dtype.itemsize)
                    end += count * place.dtype.itemsize
                    while done < end:
                        got = file.readinto(out[done:end])
                        if not got:
                            raise UnreadableFileError(f"{self.path}: ends within tensor {name}")
                        done += got
            self.bytes_read += len(out)
        return values


def _read_table(path: Path) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    total = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > min(_MAX_HEADER, total - 8):
            raise UnreadableFileError(f"{path}: not a safetensors file, or cut short: {total} bytes")
        table = json.loads(file.read(length))
    metadata = table.pop("__metadata__", {})
    places: dict[str, TensorPlace] = {}
    runs = []
    for name, told in table.items():
        dtype, shape = _NAMES[told["dtype"]], tuple(told["shape"])
        begin, end = told["data_offsets"]
        size = math.prod(shape) * dtype.itemsize
        if any(not isinstance(n, int) or n < 0 for n in (*shape, begin, end)) or end - begin != size:
            raise UnreadableFileError(
                f"{path}: tensor {name}: {end - begin} bytes for shape {shape} of {dtype}"
            )
        runs.append((begin, end, name))
        places[name] = TensorPlace(dtype, shape, 8 + length + begin)
    at = 0
    for begin, end, name in sorted(runs):
        if begin != at:
            raise UnreadableFileError(f"{path}: tensor {name} does not follow the one before it")
        at = end
    if 8 + length + at != total:
        raise UnreadableFileError(f"{path}: expected {8 + length + at} bytes, got {total}: cut short?")
    return places, metadata


def locate_tensors(path: str | os.PathLike[str]) -> dict[str, SafetensorsFile]:
    """The file of each tensor: of one file, of an index, or of a folder that holds either."""
    found = Path(path)
    if found.is_dir():
        index, single = found / "model.safetensors.index.json", found / "model.safetensors"
        found = index if index.exists() else single
    if found.suffix != ".json":
        file = SafetensorsFile(found)
        return dict.fromkeys(file.places, file)
    try:
        weights: Mapping[str, str] = json.loads(found.read_text())["weight_map"]
        names = sorted(set(weights.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableFileError(f"{found}: not an index of safetensors files: {error}") from error
    if any(not isinstance(name, str) or not _FILE_NAME.fullmatch(name) for name in names):
        raise UnreadableFileError(f"{found}: expected names of files beside it, got {names}")
    files = {name: SafetensorsFile(found.parent / name) for name in names}
    for key, name in weights.items():
        if key not in files[name].places:
            raise UnreadableFileError(f"{found}: tensor {key} is not in {name}")
    return {key: files[name] for key, name in weights.items()}


def write_safetensors(
    path: str | os.PathLike[str],
    table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Writes a file, one tensor at a time; it appears when it is complete.

    ``tensors`` come in the order of ``table``, which has the dtype and shape of each by name. A dtype that the
    format does not have raises TypeError.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in table.items():
        if dtype not in _OF_DTYPE:
            raise TypeError(f"{name}: safetensors has no {dtype}")
        size = math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _OF_DTYPE[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 64)
    with AtomicFile(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in map(in_host_memory, tensors):
            if tensor.numel():
                file.write(bytes_of(tensor))


def write_folder(
    folder: Path,
    table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
    max_shard_size: int | None = None,
) -> None:
    """Writes ``model.safetensors``, or numbered files and an index that appears when all of them are there.

    ``read`` is called in the order of the table. No file is larger than ``max_shard_size`` bytes, unless one tensor is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shares = _shares(table, max_shard_size)
    names = ["model.safetensors"]
    if len(shares) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shares):05d}.safetensors" for i in range(len(shares))]
    index = folder / "model.safetensors.index.json"

    def tensors(name: str, share: list[str]) -> Iterator[torch.Tensor]:
        yield from map(read, share)
        if len(shares) > 1 and (folder / name).exists():
            index.unlink(missing_ok=True)  # of an earlier save: it would lead to files of both

    for name, share in zip(names, shares, strict=True):
        write_safetensors(folder / name, {key: table[key] for key in share}, tensors(name, share), metadata)
    if len(shares) > 1:
        weights = {key: name for name, share in zip(names, shares, strict=True) for key in share}
        told = {"total_size": sum(_nbytes(*described) for described in table.values())}
        with AtomicFile(index) as file:
            file.write(json.dumps({"metadata": told, "weight_map": weights}, indent=2).encode())
    # Of an earlier save: this library reads an index first, and transformers the file.
    (index if len(shares) == 1 else folder / "model.safetensors").unlink(missing_ok=True)


def _shares(table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], limit: int | None) -> list[list[str]]:
    """Names of the tensors of each file."""
    shares: list[list[str]] = [[]]
    filled = 0
    for name, described in table.items():
        size = _nbytes(*described)
        if limit is not None and shares[-1] and filled + size > limit:
            shares.append([])
            filled = 0
        shares[-1].append(name)
        filled += size
    return shares


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize
