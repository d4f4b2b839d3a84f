"""The table of contents of a checkpoint: JSON that describes every byte of it, with checksums."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from ...errors import UnreadableFileError
from .spread import Spread

__all__ = ["CHUNK", "DTYPES", "FORMAT", "Manifest", "Piece", "ShardFile", "StoredTensorInfo", "dtype_name"]

FORMAT = 1
CHUNK = 1 << 18  # bytes under one checksum: what is read at least to trust one byte

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16",
        "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    )
    if hasattr(torch, name)
}  # fmt: skip

_HEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n"manifest": ')
_TAIL = b"}\n"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a manifest; TypeError for one that cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"expected a tensor of one of {', '.join(DTYPES)}, got {dtype}")
    return name


class Piece(NamedTuple):
    """A run of elements in a file."""

    file: int  # number of the file
    offset: int  # in bytes
    part: int  # which slice of the tensor, see Spread
    begin: int  # first element in the slice
    num: int  # number of elements


@dataclass(frozen=True)
class ShardFile:
    """One rank's file; ``crc32`` has one checksum for each ``CHUNK`` bytes of it."""

    name: str
    size: int
    crc32: list[int]


@dataclass(frozen=True)
class StoredTensorInfo:
    """Position of one logical tensor."""

    dtype: str
    shape: list[int]
    dim: int
    parts: int
    pieces: list[Piece]

    @property
    def spread(self) -> Spread:
        return Spread(tuple(self.shape), self.dim, self.parts)


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Args:
        step: number of finished steps.
        save: names this one act of saving; part of the names of its files.
        world_size, tp_size, pipe_size, ep_size: of the run that saved.
        files: by rank.
        tensors: by name.
        values: everything that is not a tensor, the same for all ranks.
        ranks: the values of each rank alone.
    """

    step: int
    save: str
    world_size: int
    tp_size: int
    pipe_size: int
    files: list[ShardFile]
    tensors: dict[str, StoredTensorInfo]
    values: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    format: int = FORMAT
    ep_size: int = 1

    def to_bytes(self) -> bytes:
        """The text of the file, with its own checksum."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        head = f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",\n"manifest": '
        return head.encode() + body + _TAIL

    @classmethod
    def from_bytes(cls, text: bytes, source: str) -> Manifest:
        """Reads and checks the text; ``source`` is what errors call it."""
        head = _HEAD.match(text)
        if head is None or not text.endswith(_TAIL):
            raise UnreadableFileError(f"{source}: damaged: not the text of a manifest, or cut short")
        body = text[head.end() : -len(_TAIL)]
        if hashlib.sha256(body).hexdigest().encode() != head[1]:
            raise UnreadableFileError(f"{source}: damaged: its checksum does not match its text")
        try:
            return cls.from_json(json.loads(body))
        except UnreadableFileError as error:
            raise UnreadableFileError(f"{source}: {error}") from None
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise UnreadableFileError(
                f"{source}: not a manifest of this library: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Manifest:
        """Reads what :func:`dataclasses.asdict` made, and checks that it makes sense."""
        if told["format"] != FORMAT:
            raise UnreadableFileError(f"format {told['format']}: this version reads format {FORMAT}")
        files = [ShardFile(**file) for file in told["files"]]
        for file in files:
            _check_file(file)
        tensors = {
            name: StoredTensorInfo(**{**tensor, "pieces": [Piece(*piece) for piece in tensor["pieces"]]})
            for name, tensor in told["tensors"].items()
        }
        for name, tensor in tensors.items():
            _check_tensor(name, tensor, files)
        manifest = cls(**{**told, "files": files, "tensors": tensors})
        _check_numbers("the manifest", manifest.step)
        _check_numbers("the manifest", manifest.world_size, manifest.tp_size, manifest.pipe_size, least=1)
        _check_numbers("the manifest", manifest.ep_size, least=1)
        is_known = isinstance(manifest.values, dict) and isinstance(manifest.ranks, list)
        if not (
            is_known and isinstance(manifest.save, str) and all(isinstance(r, dict) for r in manifest.ranks)
        ):
            raise UnreadableFileError("values: expected a table, and one for each rank")
        return manifest


def _check_numbers(owner: str, *numbers: Any, least: int = 0) -> None:
    for number in numbers:
        if type(number) is not int or number < least:
            raise UnreadableFileError(f"{owner}: expected a number of at least {least}, got {number!r:.80}")


def _check_file(file: ShardFile) -> None:
    if not re.fullmatch(r"shard-[0-9a-z-]+\.bin", file.name):
        raise UnreadableFileError(f"{file.name!r} is not the name of a shard")
    _check_numbers(file.name, file.size, *file.crc32)
    if len(file.crc32) != -(-file.size // CHUNK):
        raise UnreadableFileError(
            f"{file.name}: {len(file.crc32)} checksums do not go with {file.size} bytes"
        )


def _check_tensor(name: str, tensor: StoredTensorInfo, files: list[ShardFile]) -> None:
    if tensor.dtype not in DTYPES:
        raise UnreadableFileError(f"tensor {name}: unknown dtype {tensor.dtype!r}")
    _check_numbers(f"tensor {name}", *tensor.shape, tensor.parts)
    _check_numbers(f"tensor {name}", tensor.dim, least=-1)
    size = DTYPES[tensor.dtype].itemsize
    whole = tensor.spread.part_numel
    runs: dict[int, list[tuple[int, int]]] = {}
    for file, offset, part, begin, count in tensor.pieces:
        _check_numbers(f"tensor {name}", file, offset, part, begin, count)
        if offset + count * size > files[file].size:
            raise UnreadableFileError(f"tensor {name}: goes beyond the end of {files[file].name}")
        if part >= tensor.parts:
            raise UnreadableFileError(f"tensor {name}: a piece of slice {part} of {tensor.parts}")
        runs.setdefault(part, []).append((begin, count))
    if whole and len(runs) < tensor.parts:
        raise UnreadableFileError(f"tensor {name}: pieces of {len(runs)} of {tensor.parts} slices")
    for slice_runs in runs.values():
        end = 0
        for begin, count in sorted(slice_runs):
            if begin != end:
                break
            end += count
        if end != whole:
            raise UnreadableFileError(f"tensor {name}: its pieces make {end} of {whole} elements")
