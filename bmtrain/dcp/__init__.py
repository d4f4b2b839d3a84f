"""Checkpoints in the format of ``torch.distributed.checkpoint``, as FSDP2's standard recipe writes and reads them.

Example:
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> model = bmtrain.BMTrainModelWrapper(torch.nn.Linear(3, 2))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> bmtrain.dcp.save(folder, model, optimizer)
    >>> bmtrain.dcp.load(folder, model, optimizer)
    <All keys matched successfully>
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .._base.arguments import require_module, require_path
from .._base.tensors import data_of, in_host_memory
from .._files.torch_folder import TorchFolder
from .._files.torch_table import METADATA, read_table
from .._model.check import check_model_state
from .._model.outline import outline_of
from .._ranks.agree import broadcast_json, failing_together, on_all_ranks, on_rank_0
from .._ranks.context import require_intact
from .._ranks.objects import allgather_objects, broadcast_object
from .._shards.at_rest import show
from ..distributed.checkpoint.snapshot import Run, Snapshot, optimizers_of
from ..distributed.checkpoint.spread import Spread
from ..global_var import context
from ..parameter import DistributedParameter
from ..store import finish_background_save
from ..weights import Stored, add_ties, load_given, runs_of
from .optimizers import Loading, Names, add_state, key_of, masters_of

__all__ = ["load", "save"]


def save(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optim: Any = None,
    *,
    model_key: str = "model",
    optim_key: str = "optim",
) -> None:
    """Writes a checkpoint that ``torch.distributed.checkpoint.load`` reads, each rank its own part. Collective.

    The contents are as ``torch.distributed.checkpoint.save`` writes ``{"model": ..., "optim": ...}`` with the
    results of ``get_state_dict(model, optim)``: names of the unwrapped model, tensors of full shape. Masters of 16-bit
    parameters are written as the weights, in fp32. The table is written last: until then there is no checkpoint.
    Loss scale, schedulers and random state are not part of the format; :mod:`bmtrain.distributed.checkpoint` has them.

    Args:
        folder: on a file system that all ranks see; without a checkpoint.
        model: any mix of distributed and plain modules.
        optim: an :class:`bmtrain.optim.OptimManager`, an optimizer, or several.
        model_key, optim_key: keys of the two state dicts; ``"app.model"`` for one in another.

    Raises:
        FileExistsError: on every rank, if a checkpoint is there.
        OSError: on every rank, if one cannot write.
        ValueError: on every rank, if a state has no place in the format: of a shape other than its parameter's, or of
            a parameter that is not the model's; or if a group decays 16-bit and fp32 parameters differently.
    """
    require_path("folder", folder)
    require_module("model", model)
    context("dcp.save()")
    finish_background_save()
    place = Path(folder)
    snapshot = Snapshot()
    values: dict[tuple[Any, ...], Any] = {}
    entries: dict[str, Any] = {}
    optimizers: list[Any] = []
    paths: dict[str, tuple[Any, ...]] = {}
    with failing_together("dcp.save"):
        optimizers = optimizers_of(optim)
        entries = outline_of(model).entries
        masters = masters_of(optimizers)
        prefix = _keys(model_key)
        for key, value in entries.items():
            _add_entry(snapshot, values, paths, (*prefix, key), value, masters)
    add_state(snapshot, values, paths, _keys(optim_key), optimizers, Names(entries))
    require_intact("dcp.save()")
    on_rank_0(lambda: _prepare(place), "dcp.save")
    topology = context().topology
    written: Any = None
    try:
        written = on_all_ranks(
            lambda: _write(place, topology.rank, topology.world_size, snapshot, values, paths), "dcp.save"
        )
        parts = allgather_objects(written)
        on_rank_0(lambda: _finish(place, parts), "dcp.save")
    except Exception:
        if not (place / METADATA).exists():
            for file in place.glob(f"__{topology.rank}_*.distcp"):
                with contextlib.suppress(OSError):
                    file.unlink()
        raise


def _prepare(folder: Path) -> None:
    if (folder / METADATA).exists():
        raise FileExistsError(
            errno.EEXIST, "A checkpoint is there: give each its own folder, or remove it first", str(folder)
        )
    folder.mkdir(parents=True, exist_ok=True)


def _keys(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")) if text else ()


def _add_entry(
    snapshot: Snapshot,
    values: dict[Any, Any],
    paths: dict[str, tuple[Any, ...]],
    path: tuple[Any, ...],
    value: Any,
    masters: dict[Hashable, torch.Tensor],
) -> None:
    """Adds an entry of the model's state dict."""
    name = ".".join(path)
    paths[name] = path
    is_writer = context().topology.rank == 0
    if isinstance(value, DistributedParameter):
        value.require_data(name)
        show(value)
        snapshot.add_shard(name, value, masters.get(key_of(value), data_of(value)))
    elif not is_writer:
        return
    elif isinstance(value, torch.Tensor):
        whole = masters.get(key_of(value), value.detach())
        snapshot.runs.append(Run(name, Spread(tuple(value.shape)), 0, 0, whole.reshape(-1)))
    else:
        values[path] = value


def _write(
    folder: Path,
    rank: int,
    world_size: int,
    snapshot: Snapshot,
    values: Any,
    paths: dict[str, tuple[Any, ...]],
) -> Any:
    from .._files.torch_folder_writer import write_part

    parts = [part for run in snapshot.runs for part in _parts_of(run, paths[run.name])]
    return write_part(folder, rank, world_size, parts, values)


def _finish(folder: Path, written: Any) -> None:
    from .._files.torch_folder_writer import write_table

    write_table(folder, written)


def _parts_of(run: Run, path: tuple[Any, ...]) -> Any:
    """The boxes of a run of elements, which may be of a tensor-parallel slice."""
    from .._files.torch_folder_writer import Part, boxes_of

    spread = run.spread
    shape = [size // spread.parts if dim == spread.dim else size for dim, size in enumerate(spread.shape)]
    first = 0
    for at, sizes in boxes_of(tuple(shape), run.begin, run.begin + run.values.numel()):
        offsets = [n + run.part * shape[dim] if dim == spread.dim else n for dim, n in enumerate(at)]
        values = run.values.narrow(0, first, torch.Size(sizes).numel()).view(sizes)
        first += values.numel()
        read = partial(in_host_memory, values)
        yield Part(path, values.dtype, spread.shape, tuple(offsets), sizes, read)


def load(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optim: Any = None,
    *,
    model_key: str = "model",
    optim_key: str = "optim",
    strict: bool = True,
) -> Any:
    """Reads a checkpoint of ``torch.distributed.checkpoint.save``, each rank the bytes of its shards only. Collective.

    At any number of ranks, whatever the number that saved. The model may have been built on the meta device, see
    :func:`bmtrain.weights.load`. All names, shapes, files and headers are checked before anything is changed; checksums
    are not, because the format has none of a part. No code from the files is executed. A 16-bit parameter of an
    optimizer with masters gets the stored weight as its master.

    Args:
        folder: with ``.metadata``; on every host.
        model: any mix of distributed and plain modules.
        optim: an :class:`bmtrain.optim.OptimManager`, an optimizer, or several, over parameters of the model; None
            leaves the optimizer's state out.
        model_key, optim_key: keys of the two state dicts; ``"app.model"`` for one in another, ``""`` for none.
        strict: whether missing and unexpected keys of the model are errors.

    Returns:
        ``(missing_keys, unexpected_keys)``, as ``load_state_dict``.

    Raises:
        FileNotFoundError: on every rank, if there is no checkpoint, or a rank does not see a file of it.
        UnreadableFileError: on every rank, naming file and tensor, if something is damaged.
        RuntimeError: on every rank, for keys or shapes of the model that differ.
        ValueError: on every rank, if the optimizer's state does not fit, or would continue with another formula: decay
            of AdamW in an optimizer that adds it to the gradient, ``amsgrad``.
    """
    require_path("folder", folder)
    require_module("model", model)
    context("dcp.load()")
    finish_background_save()
    table = on_rank_0(lambda: {**read_table(Path(folder)), "paths": None}, "dcp.load")
    source = TorchFolder(Path(folder), broadcast_json(table, label="dcp.load"))  # type: ignore[arg-type]
    on_all_ranks(source.check_sizes, "dcp.load")
    values = _read_values(source)
    given: dict[str, Any] = {}
    loadings: list[Loading] = []
    with failing_together("dcp.load"):
        prefix = ".".join([*_keys(model_key), ""])
        state = f"{optim_key}."
        given = {
            name.removeprefix(prefix): Stored(source, name) if name in source.places else values[name]
            for name in (*source.places, *values)
            if name.startswith(prefix) and not name.startswith(state)
        }
        own = outline_of(model).entries
        add_ties(given, own)
        check_model_state(model, own, given, strict)
        for key, target in own.items():
            stored = given.get(key)
            if isinstance(stored, Stored):
                source.request(stored.name, runs_of(target) if isinstance(target, torch.Tensor) else None)
        names = Names(own)
        loadings = [
            Loading(optimizer, source, values, state, names, given) for optimizer in optimizers_of(optim)
        ]
        for loading in loadings:
            loading.check()
    on_all_ranks(source.verify, "dcp.load")
    with failing_together("dcp.load"):
        result = load_given(model, given, strict)
        for loading in loadings:
            loading.apply()
    return result


def _read_values(source: TorchFolder) -> dict[str, Any]:
    """Values other than tensors, as rank 0 reads them. Collective."""
    found = on_rank_0(lambda: {name: _plain(source.value(name)) for name in source.values}, "dcp.load")
    return broadcast_object(found) or {}


def _plain(value: Any) -> Any:
    """The value with numbers in place of tensors of one element."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
