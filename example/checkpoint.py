"""Checkpoints of a run: a folder for each, complete or absent.

``OUT/checkpoints/step-0000100/`` holds ``model.pt`` (the whole model, readable by plain torch), a
``rank-R-of-W.pt`` of each rank (its shards of the optimizer's state, the scheduler, its random number
generators) and ``run.json`` (what model and run were). It is written under another name and renamed when
complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from agree import UserError, together

import bmtrain as bmt

__all__ = ["last_checkpoint", "load_checkpoint", "save_checkpoint"]

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
        run: what :func:`load_checkpoint` compares and ``generate.py`` builds the model from; JSON.

    Raises:
        UserError: it cannot be written; nothing is left under the final name.
    """
    target = folder / f"step-{step:07d}"
    unfinished = folder / f".{target.name}.unfinished"
    _on_rank_0(lambda: _make_empty(unfinished))
    bmt.save(model, str(unfinished / "model.pt"))
    state = {"manager": optim_manager.state_dict(), "random": _random_state()}
    together(lambda: _write_state(state, unfinished / _rank_file()), "checkpoint")
    _on_rank_0(lambda: _finish(unfinished, target, {**run, "step": step, "world_size": bmt.world_size()}))
    return target


def last_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None. Rank 0's view counts. Collective."""
    step = -1
    if bmt.rank() == 0:
        step = max((int(path.parent.name[5:]) for path in folder.glob("step-*/run.json")), default=-1)
    found = torch.tensor([step], device=bmt.config["device"])
    step = int(bmt.distributed.broadcast(found, 0))
    return None if step < 0 else folder / f"step-{step:07d}"


def load_checkpoint(
    path: Path, model: torch.nn.Module, optim_manager: bmt.optim.OptimManager, run: dict[str, Any]
) -> int:
    """Restore a run from ``path``. Collective.

    Returns:
        The number of finished steps.

    Raises:
        UserError: the checkpoint is of another run or another number of ranks, or cannot be read.
    """
    written = together(lambda: _read_run(path, run), "--resume")
    bmt.load(model, str(path / "model.pt"))
    state = together(
        lambda: torch.load(path / _rank_file(), map_location="cpu", weights_only=True), "--resume"
    )
    optim_manager.load_state_dict(state["manager"])
    _set_random_state(state["random"])
    return int(written["step"])


def _read_run(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    written = json.loads((path / "run.json").read_text())
    then = {"the number of ranks": written["world_size"], "the text": written["text"]}
    now = {"the number of ranks": bmt.world_size(), "the text": run["text"]}
    for name, value in run["options"].items():
        option = "--" + name.replace("_", "-")
        then[option], now[option] = written["options"].get(name), value
    for name, value in now.items():
        if then[name] != value:
            raise UserError(
                f"--resume: {name} was {then[name]} when {path} was written and is {value} now; give the "
                "same, or start anew without --resume"
            )
    return written


def _rank_file() -> str:
    return f"rank-{bmt.rank()}-of-{bmt.world_size()}.pt"


def _on_rank_0(action: Callable[[], object]) -> None:
    together(action if bmt.rank() == 0 else lambda: None, "checkpoint")


def _make_empty(folder: Path) -> None:
    for old in folder.parent.glob(".step-*.unfinished"):  # what an interrupted save left
        shutil.rmtree(old)
    folder.mkdir(parents=True)


def _write_state(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _finish(unfinished: Path, target: Path, run: dict[str, Any]) -> None:
    with (unfinished / "run.json").open("w") as file:
        json.dump(run, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    if target.exists():
        shutil.rmtree(target)
    unfinished.rename(target)
    _sync_folder(target.parent)
    for old in sorted(target.parent.glob("step-*"))[:-_KEEP]:
        shutil.rmtree(old)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if bmt.config["device"].type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(bmt.config["device"])
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and bmt.config["device"].type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], bmt.config["device"])
