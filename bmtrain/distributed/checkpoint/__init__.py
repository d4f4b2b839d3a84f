"""Checkpoints of a run: a folder for each, one file a rank, complete or absent, loadable on any number of ranks.

Example:
    >>> import tempfile
    >>> from bmtrain.distributed import checkpoint
    >>> model = bmtrain.BMTrainModelWrapper(torch.nn.Linear(3, 2))
    >>> optimizer = bmtrain.optim.AdamOptimizer(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = checkpoint.save(folder, 100, model, optimizer, data={"epoch": 2}, keep=3)
    ...     found = checkpoint.load(folder, model, optimizer)
    >>> found.step, found.data
    (100, {'epoch': 2})
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._base.arguments import require_integer, require_path
from ..._ranks.agree import broadcast_json, failing_together, on_rank_0
from ...global_var import context
from ...store import finish_background_save
from ...store import load as load_file
from .layout import MANIFEST, newest, remove_old, step_folder
from .loading import Loading, open_manifest
from .reader import Reader
from .saving import CheckpointHandle, start_saving
from .snapshot import optimizers_of

__all__ = ["Checkpoint", "CheckpointHandle", "latest", "load", "prune", "save"]


@dataclass(frozen=True)
class Checkpoint:
    """Result of :func:`load`, beside the state that was loaded.

    Attributes:
        path: the folder, or the one file.
        step: number of finished steps; None for a file of :func:`bmtrain.save`.
        data: this rank's position in the data; if another number of ranks saved it, the position that all of them
            had, or None if they had different ones.
        data_of_ranks: the positions of all ranks that saved.
        extra: values that the user added.
        world_size, tp_size, pipe_size: of the run that saved; None for a file.
    """

    path: Path
    step: int | None = None
    data: Any = None
    data_of_ranks: tuple[Any, ...] = ()
    extra: Any = None
    world_size: int | None = None
    tp_size: int | None = None
    pipe_size: int | None = None


def save(
    folder: str | os.PathLike[str],
    step: int,
    model: torch.nn.Module | None = None,
    optim: Any = None,
    *,
    schedulers: Iterable[Any] = (),
    data: Any = None,
    extra: Any = None,
    keep: int | None = None,
    non_blocking: bool = False,
) -> CheckpointHandle:
    """Writes ``folder/step-<step>``, each rank its own part. Collective.

    The manifest is written last, when everything else is on disk: until then there is no checkpoint of this step, or
    still the earlier one. Whatever happens at any moment, finished checkpoints stay as they are.

    Args:
        folder: on a file system that all ranks see.
        step: number of finished steps.
        model: any mix of distributed and plain modules.
        optim: an :class:`bmtrain.optim.OptimManager` (with its loss scale and schedulers), an optimizer, or several.
        schedulers: schedulers that no manager has.
        data: this rank's position in the data: tensors, numbers, strings, None, lists, tuples and dicts.
        extra: anything else of these types; rank 0's counts.
        keep: remove all but this many complete checkpoints, when the new one is complete.
        non_blocking: return once the values are copied, and write in the background.

    Returns:
        A handle with ``path``; with ``non_blocking``, ``wait()`` returns when this rank's part is on disk, and on rank
        0 when the checkpoint is complete. An error in the background is raised by ``wait()`` on that rank and on rank
        0, and by the next save, load or prune on all ranks; without these, the program fails at its end.

    Raises:
        OSError: on every rank, if one cannot write; nothing of the step is left then, unless it was complete and only
            ``latest`` could not be written, or an old checkpoint not be removed.
        TypeError: on every rank, if something cannot be stored; for a ``step`` that is no integer.
        ValueError: for a negative ``step``, or a ``keep`` below 1.

    Example:
        >>> import tempfile
        >>> from bmtrain.distributed import checkpoint
        >>> handle = checkpoint.save(tempfile.mkdtemp(), 100, bmtrain.nn.Linear(3, 2), data={"epoch": 2}, keep=3)
        >>> handle.path.name
        'step-0000100'
    """
    require_path("folder", folder)
    schedulers = _check_parts(model, optim, schedulers)
    step = require_integer("step", step, 0)
    if keep is not None:
        require_integer("keep", keep, 1)
    finish_background_save()
    target = step_folder(Path(folder), step)
    return start_saving(target, step, model, optim, schedulers, data, extra, keep, non_blocking)


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    optim: Any = None,
    *,
    schedulers: Iterable[Any] = (),
    strict: bool = True,
    random: bool = True,
) -> Checkpoint:
    """Continues from a checkpoint, at any world size, tensor-parallel and pipeline size. Collective.

    Each rank reads the byte ranges that it needs, and checks them first; nothing is changed unless all ranks find
    everything in order. Random number generators continue bit for bit on the same number of ranks; otherwise rank ``r``
    gets the generators of rank ``r % saved``. The same holds for plain parameters and buffers, which ranks own alone.

    Args:
        path: a checkpoint, a folder of checkpoints (the latest is loaded), or a file of :func:`bmtrain.save` (then only
            the model is loaded).
        model, optim, schedulers: as for :func:`save`; omitted ones are not loaded.
        strict: whether missing and unexpected keys of the model are errors.
        random: whether the random number generators continue.

    Raises:
        FileNotFoundError: on every rank, if there is no complete checkpoint, or one rank does not see a file.
        UnreadableFileError: on every rank, naming file and tensor, if something is damaged. Nothing is changed.
        RuntimeError: on every rank, if keys or shapes do not fit the model. Nothing is changed.
        ValueError: on every rank, if the optimizers do not fit. Nothing is changed.

    Example:
        >>> import tempfile
        >>> from bmtrain.distributed import checkpoint
        >>> folder, model = tempfile.mkdtemp(), bmtrain.nn.Linear(3, 2)
        >>> _ = checkpoint.save(folder, 100, model, data={"epoch": 2})
        >>> found = checkpoint.load(folder, model)
        >>> found.step, found.data
        (100, {'epoch': 2})
    """
    context("checkpoint.load")
    require_path("path", path)
    schedulers = _check_parts(model, optim, schedulers)
    finish_background_save()
    resolved = on_rank_0(lambda: _resolve(Path(path)), "checkpoint.load")
    found = Path(broadcast_json(resolved or "", label="checkpoint.load"))
    if not found.is_dir():
        return _load_file(found, model, optim, strict)
    manifest = open_manifest(found)
    with Reader(found, manifest) as reader:
        with failing_together("checkpoint.load"):
            loading = Loading(reader, model, optim, schedulers, strict, random)
        loading.check()
        loading.apply()
        data, number = loading.data(), loading.number_of_data()
        return Checkpoint(
            path=found,
            step=manifest.step,
            data=None if number is None else data[number],
            data_of_ranks=tuple(data),
            extra=loading.extra(),
            world_size=manifest.world_size,
            tp_size=manifest.tp_size,
            pipe_size=manifest.pipe_size,
        )


def _check_parts(model: Any, optim: Any, schedulers: Iterable[Any]) -> list[Any]:
    """Returns the schedulers. Raises TypeError for an object that is no model, optimizer or scheduler."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module or None, got {type(model).__name__}")
    optimizers_of(optim)
    if not isinstance(schedulers, Iterable):
        raise TypeError(f"schedulers: expected several schedulers, got {schedulers!r:.80}")
    found = list(schedulers)
    for scheduler in found:
        if not (scheduler is None or callable(getattr(scheduler, "state_dict", None))):
            raise TypeError(f"schedulers: expected ones with state_dict(), got {scheduler!r:.80}")
    return found


def _load_file(path: Path, model: torch.nn.Module | None, optim: Any, strict: bool) -> Checkpoint:
    if model is None or optim is not None:
        raise ValueError(
            f"{path} is a file of bmtrain.save: it holds a model, no optimizer; load(path, model)"
        )
    load_file(model, path, strict=strict)
    return Checkpoint(path)


def _resolve(path: Path) -> str:
    if path.is_file() or (path / MANIFEST).exists():
        return str(path)
    found = newest(path)
    if found is None:
        problem = "none in this folder" if path.is_dir() else "no such file or folder"
        raise FileNotFoundError(errno.ENOENT, f"no complete checkpoint: {problem}", str(path))
    return str(found)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in ``folder`` that was saved last, or None. Collective once initialised: rank 0's view.

    Its manifest is intact and all its files are there in full length; :func:`load` checks every byte.

    Args:
        folder: of checkpoints; it need not exist.

    Raises:
        TypeError: ``folder`` is no path.

    Example:
        >>> from bmtrain.distributed import checkpoint
        >>> checkpoint.latest("no/such/folder") is None
        True
    """
    from ..._ranks.context import current

    require_path("folder", folder)
    if current() is None:
        return newest(Path(folder))
    found = on_rank_0(lambda: str(newest(Path(folder)) or ""), "checkpoint.latest")
    found = broadcast_json(found, label="checkpoint.latest")
    return Path(found) if found else None


def prune(folder: str | os.PathLike[str], keep: int) -> None:
    """Removes all but ``keep`` complete checkpoints: keeps the one saved last, then the highest steps. Collective.

    Remains of interrupted saves are removed as well. If no checkpoint is complete, nothing is removed.

    Args:
        folder: folder of checkpoints; it need not exist.
        keep: number of checkpoints to keep, at least 1.

    Raises:
        ValueError: ``keep`` is below 1.
        OSError: on every rank, if rank 0 cannot remove something.

    Example:
        >>> from bmtrain.distributed import checkpoint
        >>> checkpoint.prune("run", keep=3)
    """
    require_path("folder", folder)
    keep = require_integer("keep", keep, 1)
    finish_background_save()
    on_rank_0(lambda: remove_old(Path(folder), keep) if Path(folder).is_dir() else None, "checkpoint.prune")
