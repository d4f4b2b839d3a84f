"""The table of a folder of ``torch.distributed.checkpoint``, read without running code of it.

``.metadata`` is a pickled table of boxes: each is a part of a tensor, written by ``torch.save`` into a range of bytes
of a file ``__R_K.distcp``. Here a pickle makes inert records only.
"""

from __future__ import annotations

import errno
import io
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import UnreadableFileError

METADATA = ".metadata"

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
DTYPES = {
    name: getattr(torch, name)
    for name in (*STORAGES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
}
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
_KNOWN = {
    "torch": {"Size", *STORAGES},
    "torch.storage": {"UntypedStorage"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor_v3"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "collections": {"OrderedDict"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}  # fmt: skip
_FILE_NAME = re.compile(r"[^/\\\0]{1,255}")


class _Record:
    """Description of a pickled object, in place of the object."""

    name: str

    def __new__(cls, *args: Any) -> _Record:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes records of the classes of the format, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        if name not in _KNOWN.get(module, ()):
            raise UnreadableFileError(
                f"contains {module}.{name}, which could only be restored by running code"
            )
        return type(name, (_Record,), {"name": name})  # a new one, so that nothing of a pickle outlives it

    def persistent_load(self, pid: Any) -> Any:
        return pid


def unpickle(data: bytes, source: str) -> Any:
    """Records of a pickle; UnreadableFileError for any other class, and for a damaged one."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except UnreadableFileError as error:
        raise UnreadableFileError(f"{source}: {error}") from None
    except Exception as error:  # a damaged pickle may fail in any way
        raise UnreadableFileError(
            f"{source}: damaged: not a readable pickle ({type(error).__name__}: {error})"
        ) from None


def read_table(folder: Path) -> dict[str, Any]:
    """The table of contents as JSON: ``tensors`` and ``values``, by name, and the ``paths`` of names in nested dicts.

    Raises:
        FileNotFoundError: there is none.
        UnreadableFileError: it is damaged, or has been written by a plug-in that transforms bytes.
    """
    path = folder / METADATA
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, "no complete checkpoint of torch.distributed.checkpoint: no such file", str(path)
        ) from None
    root = unpickle(data, str(path))
    try:
        return _table_of(root)
    except UnreadableFileError as error:
        raise UnreadableFileError(f"{path}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UnreadableFileError(
            f"{path}: not a table of a checkpoint: {type(error).__name__}: {error}"
        ) from None


def _table_of(root: Any) -> dict[str, Any]:
    fields = _fields(root, "Metadata")
    ranges: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for index, info in fields["storage_data"].items():
        told, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        name = _text(told["fqn"])
        if place.get("transform_descriptors"):
            raise UnreadableFileError(
                f"{name}: written with the extension {place['transform_descriptors']!r:.80}"
            )
        file = _text(place["relative_path"])
        if not _FILE_NAME.fullmatch(file) or file in (".", ".."):
            raise UnreadableFileError(f"{name}: {file!r:.80} is not the name of a file beside it")
        offset = told.get("offset")
        range_ = file, *numbers_of([place["offset"], place["length"]])
        ranges[name, None if offset is None else numbers_of(offset)] = range_  # type: ignore[assignment]
    tensors, values = {}, {}
    for name, told in fields["state_dict_metadata"].items():
        if told.name == "BytesStorageMetadata":
            values[_text(name)] = ranges[name, None]
        else:
            tensors[_text(name)] = _tensor(name, _fields(told, "TensorStorageMetadata"), ranges)
    paths = fields.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    return {"tensors": tensors, "values": values, "paths": {name: paths.get(name) for name in tensors}}


def _tensor(name: str, told: Mapping[str, Any], ranges: Mapping[Any, Any]) -> tuple[Any, ...]:
    properties = told["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if dtype not in DTYPES:
        raise UnreadableFileError(f"{name}: unknown dtype {dtype!r:.80}")
    shape = numbers_of(told["size"])
    boxes = []
    for chunk in told["chunks"]:
        sides = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = numbers_of(sides["offsets"]), numbers_of(sides["sizes"])
        if not len(offsets) == len(sizes) == len(shape) or any(
            at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise UnreadableFileError(f"{name}: a part of {sizes} at {offsets} of shape {shape}")
        place = ranges[name, offsets]
        if place[2] < math.prod(sizes) * DTYPES[dtype].itemsize:
            raise UnreadableFileError(f"{name}: {place[2]} bytes for {sizes} of {dtype}")
        boxes.append((offsets, sizes, *place))
    found = sum(math.prod(box[1]) for box in boxes)
    if found != math.prod(shape):
        raise UnreadableFileError(f"{name}: its parts have {found} of {math.prod(shape)} elements")
    return dtype, shape, boxes


def _fields(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or record.name != name or not isinstance(record.state, dict):
        raise UnreadableFileError(f"expected a {name}, got {type(record).__name__}")
    return record.state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UnreadableFileError(f"expected a name, got {value!r:.80}")
    return value


def numbers_of(told: Any) -> tuple[int, ...]:
    """Numbers from 0 of a list, a tuple or a ``torch.Size``."""
    numbers = tuple(told.args[0] if isinstance(told, _Record) else told)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise UnreadableFileError(f"expected numbers from 0, got {numbers!r:.80}")
    return numbers
