"""Import and export of weights as safetensors, the files of Hugging Face models: no rank ever holds a whole model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ._base.arguments import require_module
from ._files.gathering import first_names, write_gathered
from ._files.safetensors import SafetensorsFile, locate_tensors, write_folder, write_safetensors
from ._files.shared_state import DistributedTensorWrapper
from ._files.torch_folder import TorchFolder
from ._model.check import check_model_state
from ._model.outline import outline_of
from ._ranks.agree import failing_together, on_all_ranks
from .distributed.checkpoint.spread import local_run, spread_of
from .global_var import context
from .parameter import DistributedParameter
from .store import finish_background_save

__all__ = ["load", "save"]

_Rename = Callable[[str], "str | None"]


def load(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: _Rename | None = None,
) -> Any:
    """Reads safetensors into a model, each rank the bytes of its own shards only. Collective.

    The model may have been built on the meta device: memory is made as it is filled, so that no rank holds more than
    its shards and one tensor. Buffers that no file holds (rotary frequencies, masks) are then computed by the model's
    own ``_init_weights``, as Hugging Face models have it. Names and shapes are compared before anything is changed.

    Args:
        model: any mix of distributed and plain modules.
        path: a file, an index (``model.safetensors.index.json``), or a folder with either; on every host.
        strict: whether missing and unexpected names are errors. Another name of a parameter that is read is not
            missing: files name tied weights once.
        rename: from a name in the files to one in the model; None leaves a tensor out.

    Returns:
        ``(missing_keys, unexpected_keys)``, as ``load_state_dict``.

    Raises:
        OSError, UnreadableFileError: on every rank, if a rank cannot read the files.
        ValueError: on every rank, if ``rename`` maps two names to one.
        RuntimeError: on every rank, for shapes that differ, with ``strict`` for names that differ, and for buffers on
            the meta device that nothing fills.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> bmtrain.weights.save(bmtrain.nn.Linear(2, 3), folder)
        >>> with torch.device("meta"):  # AutoModelForCausalLM.from_config(config), say
        ...     model = torch.nn.Linear(2, 3)
        >>> model = bmtrain.BMTrainModelWrapper(model)
        >>> _ = bmtrain.weights.load(model, folder)
        >>> model.weight.shape
        torch.Size([3, 2])
    """
    require_module("model", model)
    context("weights.load()")
    finish_background_save()
    files = on_all_ranks(lambda: locate_tensors(path), "weights.load")
    given: dict[str, Any] = {}
    with failing_together("weights.load"):
        given = {key: Stored(files[name], name) for name, key in _renamed(files, rename, "load")}
        own = outline_of(model).entries
        add_ties(given, own)
        check_model_state(model, own, given, strict)
    return load_given(model, given, strict)


def load_given(model: torch.nn.Module, given: Mapping[str, Any], strict: bool) -> Any:
    """Loads stored tensors that have been checked, also into a model on the meta device. Collective."""
    buffers: list[_MetaBuffer] = []
    with failing_together("weights.load"):
        buffers = _make_buffers(model)
    result = model.load_state_dict(given, strict=strict)
    empty = [str(buffer) for buffer in buffers if not buffer.is_filled()]
    if empty:
        raise RuntimeError(f"weights.load: nothing fills the buffers {', '.join(empty)}")
    return result


def _renamed(names: Iterable[str], rename: _Rename | None, operation: str) -> Iterator[tuple[str, str]]:
    """Each name that is not left out, and the new one.

    Raises:
        ValueError: two names become one.
    """
    first: dict[str, str] = {}
    for name in names:
        key = name if rename is None else rename(name)
        if key is None:
            continue
        if first.setdefault(key, name) != name:
            raise ValueError(f"weights.{operation}: rename makes {key!r} of both {first[key]!r} and {name!r}")
        yield name, key


def add_ties(given: dict[str, Any], own: dict[str, Any]) -> None:
    """Adds the other names of tied parameters that are read under one name."""
    known = {
        id(own[key]): stored for key, stored in given.items() if key in own and isinstance(stored, Stored)
    }
    for key, value in own.items():
        if key not in given and isinstance(value, torch.Tensor) and id(value) in known:
            given[key] = known[id(value)]


def runs_of(param: torch.Tensor) -> list[tuple[int, int]]:
    """Runs of elements of the flattened whole that this rank has: (first, number) of each."""
    return list(spread_of(param).to_whole(*local_run(param)))


class Stored(DistributedTensorWrapper):
    """A tensor of a file for ``load_state_dict``: each rank reads its part when it is needed."""

    def __init__(self, file: SafetensorsFile | TorchFolder, name: str) -> None:
        place = file.places[name]
        self._file = file
        self.name = name
        self._tensor = None
        self._read_into: DistributedParameter | None = None
        self.shape = torch.Size(place.shape)
        self.dtype = place.dtype

    def broadcast(self) -> torch.Tensor:
        """The full tensor on the run device; every rank reads it."""
        return self._file.read(self.name).view(self.shape).to(context().device)

    def part_of(self, param: DistributedParameter) -> torch.Tensor:
        """This rank's part."""
        if self._read_into is param:  # under another of its names
            return param.detach()
        self._read_into = param
        part = self._file.read(self.name, runs_of(param))
        return part.to(context().device, param.dtype)


# ---- buffers of a model on the meta device


class _MetaBuffer:
    """A buffer that was on the meta device and has memory now, not yet values."""

    def __init__(self, module: torch.nn.Module, name: str, path: str) -> None:
        buffer: Any = module._buffers[name]
        self.module, self.name, self._path = module, name, path
        self.is_persistent = name not in module._non_persistent_buffers_set
        self._made = module._buffers[name] = torch.empty_like(buffer, device=context().device)

    def is_filled(self) -> bool:
        """Whether anything was written to it, or put in its place."""
        return self._made._version > 0 or self.module._buffers[self.name] is not self._made

    def __str__(self) -> str:
        return self._path


def _make_buffers(model: torch.nn.Module) -> list[_MetaBuffer]:
    """Allocates buffers on the meta device, and computes the buffers that no file holds.

    Raises:
        RuntimeError: the model does not compute one of these.
    """
    made = [
        _MetaBuffer(module, name, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name, buffer in list(module._buffers.items())
        if buffer is not None and buffer.is_meta
    ]
    initialize = getattr(model, "_init_weights", None)
    if initialize is not None:
        with torch.no_grad():
            for module in dict.fromkeys(buffer.module for buffer in made):
                initialize(module)
    lost = [str(buffer) for buffer in made if not (buffer.is_persistent or buffer.is_filled())]
    if lost:
        raise RuntimeError(
            f"weights.load: no file holds the buffers {', '.join(lost)}, and {type(model).__name__} has no "
            "_init_weights that computes them: build the model on a real device, or fill them first"
        )
    return made


# ---- saving


def save(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int = 5_000_000_000,
    rename: _Rename | None = None,
) -> None:
    """Writes safetensors as Hugging Face's ``save_pretrained`` does, one tensor at a time. Collective.

    Rank 0 writes; no rank holds more than one full tensor. Tied weights are written once. The configuration is yours
    to write: ``model.config.save_pretrained(folder)`` on rank 0.

    Args:
        model: any mix of distributed and plain modules.
        path: a folder, made if it is missing, that gets ``model.safetensors``; or one file, if the name ends in
            ``.safetensors``. Only rank 0's counts.
        max_shard_size: bytes of one file of a folder; a model that is larger gets numbered files and an index.
        rename: from a name in the model to one in the files; None leaves a tensor out.

    Raises:
        TypeError: on every rank, if the state dict holds anything but tensors.
        ValueError: on every rank, if ``rename`` maps two names to one.
        OSError: on every rank, if rank 0 cannot write.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> bmtrain.weights.save(bmtrain.nn.Linear(2, 3), folder)
        >>> os.listdir(folder)
        ['model.safetensors']
    """
    require_module("model", model)
    context("weights.save()")
    finish_background_save()
    entries = outline_of(model).entries
    own = {key: entries[name] for name, key in _renamed(entries, rename, "save")}
    others = [key for key, value in own.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise TypeError(f"weights.save: expected tensors alone, got other values in {', '.join(others)}")
    tensors = {key: own[key] for key, first in first_names(own).items() if first == key}
    write_gathered(tensors, "weights.save", partial(_write, Path(path), max_shard_size))


def _write(
    path: Path,
    max_shard_size: int,
    table: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Writes tensors to a file, or to the files of a folder."""
    metadata = {"format": "pt"}
    if path.suffix == ".safetensors":
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(path, table, map(read, table), metadata)
    else:
        write_folder(path, table, read, metadata, max_shard_size)
