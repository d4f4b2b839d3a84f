"""Checkpoints of a run: what bmtrain.distributed.checkpoint writes, and a description of the run.

``OUT/checkpoints/step-0000100/`` holds the model, the optimizer's state, the scheduler, the loss scale and the random
number generators, one file a rank, and loads on any number of ranks. The position in the text is the step alone
(`data.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from agree import UserError

import bmtrain as bmt
from bmtrain.distributed import checkpoint

__all__ = ["load_checkpoint", "read_run", "save_checkpoint"]

T = TypeVar("T")
_KEEP = 2


def save_checkpoint(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optim_manager: bmt.optim.OptimManager,
    run: dict[str, Any],
) -> Path:
    """Write ``folder/step-<step>`` and remove all but the last two. Collective.

    Args:
        folder: of this run's checkpoints, on a file system that every rank sees.
        step: number of finished steps.
        run: what :func:`read_run` returns.

    Raises:
        UserError: it cannot be written; the checkpoints before it are as they were.
    """
    saved = _of_the_user(
        lambda: checkpoint.save(folder, step, model, optim_manager, extra=run, keep=_KEEP), "checkpoint"
    )
    return saved.path


def read_run(path: Path, option: str) -> dict[str, Any]:
    """Description of the run that saved the checkpoint ``path``: ``model``, ``options`` and ``text``. Collective.

    Raises:
        UserError: naming ``option``; it is no checkpoint, or damaged.
    """
    extra = _of_the_user(lambda: checkpoint.load(path, random=False), option).extra
    if not isinstance(extra, dict) or not {"model", "options", "text"} <= extra.keys():
        raise UserError(f"{option}: expected a checkpoint of train.py, but {path} is another program's")
    return extra


def load_checkpoint(
    path: Path, model: torch.nn.Module, optim_manager: bmt.optim.OptimManager, run: dict[str, Any]
) -> int:
    """Restore a run from ``path``, which any number of ranks may have written. Collective.

    Returns:
        The number of finished steps.

    Raises:
        UserError: the checkpoint is of another run, or cannot be read.
    """
    then, now = read_run(path, "--resume"), run
    then["options"].setdefault("optimizer", "adam")  # checkpoints of earlier versions
    _compare("the text", then["text"], now["text"], path)
    for name, value in now["options"].items():
        _compare("--" + name.replace("_", "-"), then["options"].get(name), value, path)
    step = _of_the_user(lambda: checkpoint.load(path, model, optim_manager), "--resume").step
    return int(step or 0)


def _compare(name: str, then: Any, now: Any, path: Path) -> None:
    if then != now:
        raise UserError(
            f"--resume: {name} was {then} when {path} was written and is {now} now; give the same, or start again "
            "without --resume"
        )


def _of_the_user(action: Callable[[], T], what: str) -> T:
    """Turns errors that the library raises on all ranks into a UserError, except the loss of a rank."""
    try:
        return action()
    except bmt.errors.CommunicationError:
        raise
    except OSError as error:
        raise UserError(f"{what}: {error.filename}: {error.strerror or error}") from None
    except (ValueError, RuntimeError) as error:  # damaged, or of another model
        raise UserError(f"{what}: {error}") from None
