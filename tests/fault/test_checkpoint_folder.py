"""Folders as users have them: full, read-only, without fsync, shared with another job, pruned while somebody loads."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from harness import run_ranks
from harness.checkpoint_run import Run, differences, state_of

import bmtrain as bmt
from bmtrain.distributed import checkpoint
from bmtrain.distributed.checkpoint import loading, saving, writer
from bmtrain.errors import UnreadableFileError


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "bmtrain-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs root, to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def on_rank_0(action) -> None:
    bmt.synchronize()
    if bmt.rank() == 0:
        action()
    bmt.synchronize()


def failing_save(run: Run, folder: str, number: int, non_blocking: bool = False) -> None:
    with pytest.raises(OSError) as caught:
        run.save(folder, non_blocking=non_blocking)
        checkpoint.prune(folder, keep=9)  # a save in the background tells here
    assert caught.value.errno == number, caught.value
    bmt.synchronize()


def full_then_read_only(folder: str) -> None:
    run = Run()
    run.train(1)
    run.save(folder)
    saved, files = state_of(run), sorted(Path(folder).rglob("*"))
    filler = Path(folder, "filler")

    def fill() -> None:
        with pytest.raises(OSError, match="No space left"), filler.open("wb") as file:
            while True:
                file.write(bytes(1024))
                file.flush()

    on_rank_0(fill)
    for non_blocking in (False, True):
        run.train(1)
        failing_save(run, folder, errno.ENOSPC, non_blocking)
    on_rank_0(filler.unlink)
    assert sorted(Path(folder).rglob("*")) == files
    mount = ["mount", "-o", "remount,ro", folder]
    on_rank_0(lambda: subprocess.run(mount, check=True))
    failing_save(run, folder, errno.EROFS)
    other = Run(seed=6)
    other.load(folder)
    assert differences(saved, state_of(other)) == []
    mount[2] = "remount,rw"
    on_rank_0(lambda: subprocess.run(mount, check=True))
    run.save(folder)
    assert checkpoint.latest(folder) == Path(folder) / f"step-{run.position:07d}"


def test_a_full_and_a_read_only_disk(small_disk: Path) -> None:
    run_ranks(2, full_then_read_only, str(small_disk), fresh=True)


def without_sync_of_folders(folder: str) -> None:
    known = os.fsync

    def fsync(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        known(handle)

    with mock.patch.object(os, "fsync", fsync):
        run = Run()
        run.train(1)
        run.save(folder)
    Run(seed=6).load(folder)


def test_a_file_system_that_cannot_sync_folders(tmp_path: Path) -> None:
    run_ranks(2, without_sync_of_folders, str(tmp_path))


def disturbed_by_another_job(folder: str, begins_before: str) -> None:
    """The other job begins to save the same step when this one has written its files but not the manifest."""
    run = Run()
    run.train(1)
    run.save(folder)
    saved = state_of(run)
    run.train(1)
    step = Path(folder, f"step-{run.position:07d}")

    class Disturbed(writer.Saving):
        def _all_parts(self) -> list[dict[str, object]]:
            if begins_before == "rank 0 looks for the parts":
                checkpoint.layout.remove_unreferenced(step)
            parts = super()._all_parts()
            checkpoint.layout.remove_unreferenced(step)
            return parts

    with (
        mock.patch.object(saving, "Saving", Disturbed),
        pytest.raises(FileNotFoundError, match="does another job save into this folder"),
    ):
        run.save(folder)
    other = Run(seed=6)
    other.load(folder)
    assert differences(saved, state_of(other)) == []


@pytest.mark.parametrize("begins_before", ["rank 0 looks for the parts", "the manifest is written"])
def test_another_job_saves_into_the_folder(begins_before: str, tmp_path: Path) -> None:
    run_ranks(2, disturbed_by_another_job, str(tmp_path), begins_before, timeout=60)


def rolled_back(folder: str) -> None:
    """Steps 1 to 4, back to 2, and 3 again with other numbers; meanwhile the clock is set back."""
    run = Run()
    for _ in range(4):
        run.train(1)
        run.save(folder)
    run.load(f"{folder}/step-0000002")
    for scheduler in run.manager.lr_schedulers:
        scheduler.start_lr = 0.5
    with mock.patch.object(time, "time", lambda: 1.0):
        run.train(1)
        run.save(folder, keep=2)
    other = Run(seed=6)
    assert other.load(folder).step == 3  # what was saved last, not the highest
    assert differences(state_of(run), state_of(other)) == []
    assert sorted(path.name for path in Path(folder).glob("step-*")) == ["step-0000003", "step-0000004"]


def test_a_step_saved_again_after_a_rollback(tmp_path: Path) -> None:
    run_ranks(2, rolled_back, str(tmp_path))


def pruned_while_loading(folder: str) -> None:
    """Another job prunes: before the files are read it is told, afterwards nothing is lost."""
    run = Run()
    run.train(1)
    run.save(folder)
    saved = state_of(run)
    run.train(1)
    run.save(folder)
    old = Path(folder, "step-0000001")
    other = Run(seed=6)
    before = state_of(other)
    open_manifest = checkpoint.open_manifest
    apply = loading.Loading.apply

    def remove() -> None:
        on_rank_0(lambda: checkpoint.layout.remove_checkpoint(old))

    def applied_late(self: loading.Loading) -> None:
        remove()
        apply(self)

    with mock.patch.object(loading.Loading, "apply", applied_late):
        checkpoint.load(old, other.model, other.manager)
    assert differences(saved, state_of(other)) == []
    other = Run(seed=6)
    old = Path(folder, "step-0000002")

    def opened_early(path: Path) -> object:
        found = open_manifest(path)
        remove()
        return found

    with (
        mock.patch.object(checkpoint, "open_manifest", opened_early),
        pytest.raises((FileNotFoundError, UnreadableFileError)) as caught,
    ):
        checkpoint.load(old, other.model, other.manager)
    assert "step-0000002" in str(caught.value)
    assert differences(before, state_of(other)) == []


def test_pruned_while_somebody_loads(tmp_path: Path) -> None:
    run_ranks(2, pruned_while_loading, str(tmp_path))
