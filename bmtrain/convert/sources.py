"""Files of weights to read from, one tensor at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from .._base.tensors import place_of
from .._files.archive import read_archive
from .._files.safetensors import SafetensorsFile, locate_tensors
from .._files.torch_folder import TorchFolder
from .._files.torch_table import METADATA, read_table
from ..distributed.checkpoint.layout import MANIFEST, check_sizes, newest, read_manifest
from ..distributed.checkpoint.manifest import DTYPES
from ..distributed.checkpoint.reader import Reader
from ..errors import UnreadableFileError

__all__ = ["Source", "open_source"]

TIES = "bmtrain.ties"  # key of the metadata of a safetensors file: names that share a tensor with another


class Source:
    """Tensors by name.

    Attributes:
        table: dtype and shape of each tensor.
        ties: further names, by the name of the tensor that they share.
        order: all names, in the order of the model.
        replaceable: kinds and folders of targets whose files would replace files that are still to be read.
    """

    replaceable: tuple[tuple[str, Path], ...] = ()
    table: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    ties: dict[str, str]
    order: list[str]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the host."""
        raise NotImplementedError

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Some of its rows, on the host."""
        return self.read(name)[begin:end]


class _Archive(Source):
    """A file of ``bmtrain.save`` or ``torch.save``, mapped to memory."""

    def __init__(self, path: Path) -> None:
        state = read_archive(path)
        if not all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items()):
            raise UnreadableFileError(f"{path}: expected names to tensors, and nothing else, to convert")
        self._state = state
        self.table, self.ties, self.order = {}, {}, list(state)
        first: dict[Any, str] = {}
        for name, value in state.items():
            known = first.setdefault(place_of(value), name)
            if known != name and value.numel():
                self.ties[name] = known
            else:
                self.table[name] = (value.dtype, tuple(value.shape))

    def read(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._state[name]
        return value


class _Safetensors(Source):
    """One safetensors file, or several with an index."""

    def __init__(self, path: Path) -> None:
        self._files: dict[str, SafetensorsFile] = locate_tensors(path)
        self.table = {name: file.places[name][:2] for name, file in self._files.items()}
        if len(set(self._files.values())) > 1:
            self.replaceable = (("safetensors", path if path.is_dir() else path.parent),)
        self.ties, self.order = {}, list(self.table)
        for file in self._files.values():
            told = json.loads(file.metadata.get(TIES, "{}"))
            if told:
                self.ties, self.order = dict(told["ties"]), list(told["order"])
                break
        names = set(self.table)
        if set(self.order) != names | set(self.ties) or not set(self.ties.values()) <= names:
            raise UnreadableFileError(f"{path}: its note of shared tensors does not fit its tensors")

    def read(self, name: str) -> torch.Tensor:
        return self._files[name].read(name).view(self.table[name][1])

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        shape = self.table[name][1]
        row = math.prod(shape[1:])
        run = begin * row, (end - begin) * row
        return self._files[name].read(name, [run]).view(end - begin, *shape[1:])


class _Folder(Source):
    """The model in a checkpoint of ``bmtrain.distributed.checkpoint``."""

    def __init__(self, path: Path) -> None:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        told = manifest.values.get("model")
        if told is None or any("tensor" not in entry for _, entry in told["keys"]):
            raise UnreadableFileError(f"{path}: expected a model whose state is tensors only")
        self._reader = Reader(path, manifest)
        self._stored: dict[str, str] = {}
        self.table, self.ties, self.order = {}, {}, [key for key, _ in told["keys"]]
        first: dict[str, str] = {}
        for key, entry in told["keys"]:
            name = entry["tensor"]
            info = self._reader.info(name)
            if first.setdefault(name, key) != key:
                self.ties[key] = first[name]
            else:
                self._stored[key] = name
                self.table[key] = (DTYPES[info.dtype], tuple(info.shape))

    def read(self, name: str) -> torch.Tensor:
        self._reader.request_whole(self._stored[name])
        self._reader.verify()
        return self._reader.read_whole(self._stored[name])


class _TorchFolder(Source):
    """The model in a checkpoint of ``torch.distributed.checkpoint``."""

    def __init__(self, path: Path) -> None:
        table = read_table(path)
        self._folder = TorchFolder(path, table)
        self._folder.check_sizes()
        self.replaceable = (("dcp", path),)
        paths = {name: tuple(told or (name,)) for name, told in table["paths"].items()}
        models = {name: told for name, told in paths.items() if told[-2:-1] == ("model",)}
        models = models or {name: told for name, told in paths.items() if len(told) == 1}
        self._stored = {str(told[-1]): name for name, told in models.items()}
        if len(self._stored) < max(len(models), 1):
            raise UnreadableFileError(f"{path}: expected the state dict of one model under the key 'model'")
        keys = tuple({name.removesuffix(str(told[-1])) for name, told in models.items() if len(told) > 1})
        for name in self._folder.values:
            if name.startswith(keys):
                raise UnreadableFileError(f"{path}: {name}: expected a model whose state is tensors only")
        self.table = {key: self._folder.places[name][:2] for key, name in self._stored.items()}
        self.ties, self.order = {}, list(self.table)

    def read(self, name: str) -> torch.Tensor:
        return self._folder.read(self._stored[name]).view(self.table[name][1])

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        shape = self.table[name][1]
        row = math.prod(shape[1:])
        run = begin * row, (end - begin) * row
        return self._folder.read(self._stored[name], [run]).view(end - begin, *shape[1:])


def open_source(path: Path) -> Source:
    """Opens ``path`` as the matching kind of source.

    Raises:
        FileNotFoundError: nothing of a known kind is there.
        UnreadableFileError: it is damaged.
    """
    if path.is_dir():
        if (path / MANIFEST).exists():
            return _Folder(path)
        if (path / METADATA).exists():
            return _TorchFolder(path)
        if (found := newest(path)) is not None:
            return _Folder(found)
        names = ("model.safetensors.index.json", "model.safetensors")
        if not any((path / name).exists() for name in names):
            raise FileNotFoundError(f"{path}: expected a checkpoint, or {' or '.join(names)}, in this folder")
        return _Safetensors(path)
    is_safetensors = path.suffix == ".safetensors" or path.name.endswith(".index.json")
    return _Safetensors(path) if is_safetensors else _Archive(path)
