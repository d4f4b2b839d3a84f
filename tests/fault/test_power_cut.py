"""Files that saves leave when the power fails: those of before, or those that were to be written, as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness import run_ranks
from harness.checkpoint_run import Run, state_of

import bmtrain as bmt
from bmtrain.errors import UnreadableFileError

FOLDERS = ("files", "notes", "cuts")


class Drive:
    """A folder, and notes of what is sure to be on its drive: contents and names that a rank has synced."""

    def __init__(self, root: Path) -> None:
        self.folder, self.notes, self.cuts = (root / name for name in FOLDERS)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Makes copies of the folder as power cuts would leave it: at each move of a name, and at the end."""
        sync, replace = os.fsync, os.replace

        def fsync(handle: int) -> None:
            sync(handle)
            self.note(Path(os.readlink(f"/proc/self/fd/{handle}")))

        def move(source: str, target: str) -> None:
            replace(source, target)
            self.cut("names reached")

        with mock.patch.object(os, "fsync", fsync), mock.patch.object(os, "replace", move):
            yield
        bmt.synchronize()
        if bmt.rank() == 0:
            self.cut("names reached")
            self.cut("names synced")
        bmt.synchronize()

    def note(self, path: Path) -> None:
        new = self.notes / f"new-{bmt.rank()}"
        if path.is_dir():
            new.write_text("".join(f"{inode} {name}\n" for name, inode in files_in(path).items()))
        else:
            shutil.copyfile(path, new)
        os.rename(new, self.notes / str(path.stat().st_ino))

    def cut(self, kind: str) -> None:
        number = len(list(self.cuts.iterdir()))
        self.copy(self.folder, self.cuts / f"{number:03d}, rank {bmt.rank()}, {kind}", kind)

    def copy(self, folder: Path, to: Path, kind: str) -> None:
        """Names that were not synced may have reached the drive, or not; contents that were not synced are lost."""
        to.mkdir()
        files = files_in(folder)
        if kind == "names synced":
            note = self.notes / str(folder.stat().st_ino)
            lines = note.read_text().splitlines() if note.exists() else []
            files = {name: inode for inode, name in (line.split(" ", 1) for line in lines)}
        for name, inode in files.items():
            if (folder / name).is_dir():
                self.copy(folder / name, to / name, kind)
            elif (self.notes / inode).exists():
                shutil.copyfile(self.notes / inode, to / name)
            else:
                (to / name).touch()


def files_in(folder: Path) -> dict[str, str]:
    """Inodes by name, without files that have no name of their own yet."""
    return {path.name: str(path.stat().st_ino) for path in folder.iterdir() if path.suffix != ".tmp"}


def saved(folder: Path, way: str, run: Run) -> None:
    if way.startswith("checkpoint"):
        run.save(folder, non_blocking="background" in way)
        bmt.distributed.checkpoint.prune(folder, keep=9)  # waits for a save in the background
    elif way == "weights":
        bmt.weights.save(run.model, folder, max_shard_size=1000)
    else:
        handle = bmt.save(run.model, folder / "model.pt", non_blocking="background" in way)
        if handle is not None:
            handle.wait()


def found(folder: Path, way: str) -> dict[str, Any] | None:
    """The state in a folder; None if the folder is refused."""
    run = Run(seed=6)
    try:
        if way.startswith("checkpoint"):
            run.load(folder)
        elif way == "weights":
            bmt.weights.load(run.model, folder)
        else:
            bmt.load(run.model, folder / "model.pt")
    except (UnreadableFileError, FileNotFoundError):
        return None
    return {name: value.tolist() for name, value in state_of(run).items()}


def check_cuts(root: str, way: str) -> None:
    drive, run = Drive(Path(root)), Run()
    run.train(1)
    with drive.watched():
        saved(drive.folder, way, run)
    before = found(drive.folder, way)
    earlier = set(drive.cuts.iterdir())
    run.train(1)
    with drive.watched():
        saved(drive.folder, way, run)
    after = found(drive.folder, way)
    assert before is not None and after is not None and before != after
    *cuts, reached, synced = sorted(set(drive.cuts.iterdir()) - earlier)
    assert cuts, "no file was moved to its name"
    for cut in cuts:
        # Of several files those of before go first.
        assert found(cut, way) in (before, after, *([None] if way == "weights" else [])), cut.name
    assert found(reached, way) == found(synced, way) == after


@pytest.mark.parametrize(
    "way", ["checkpoint", "checkpoint in the background", "file", "file in the background", "weights"]
)
def test_a_power_cut_leaves_what_was_there_or_what_comes(way: str, tmp_path: Path) -> None:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    run_ranks(2, check_cuts, str(tmp_path), way)
