"""Saving where writing fails: every rank raises the same, and nothing else is lost."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import pytest
from harness import Status, rank_outcomes, run_process, run_ranks
from harness.checkpoint_run import Run, differences, state_of

import bmtrain as bmt
from bmtrain.distributed import checkpoint
from bmtrain.distributed.checkpoint import loading, writer
from bmtrain.errors import CommunicationError

FAULTS = {
    "disk full": (errno.ENOSPC, "Checksummed"),
    "I/O error": (errno.EIO, "Checksummed"),
    "no permission": (errno.EACCES, "NamedFile"),
    "read-only": (errno.EROFS, "NamedFile"),
    "folder not written": (errno.EIO, "sync_folder"),
}
FAULTS_AFTER_THE_MANIFEST = {
    "latest not written": (errno.ENOSPC, "point_to"),
    "others' checkpoints": (errno.EACCES, "remove_old"),
}
FAULT_OF_THE_REPORT = {"no report": (errno.EIO, "AtomicFile")}


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_rank_that_cannot_write_fails_the_save_and_nothing_else(non_blocking, tmp_path):
    run_ranks(2, check_failing_rank, str(tmp_path), non_blocking)


def check_failing_rank(folder: str, non_blocking: bool) -> None:
    run = Run()
    run.train(1)
    run.save(folder)
    expected = state_of(run)
    for culprit in (0, 1):
        for fault in FAULTS:
            run.train(1)
            with Fault(fault, bmt.rank() == culprit), pytest.raises(OSError, match="the shard") as caught:
                handle = run.save(folder, non_blocking=non_blocking)
                if bmt.rank() in (0, culprit):  # a save in the background tells those who wait for it
                    with pytest.raises(OSError, match="the shard"):
                        handle.wait()
                if culprit == 0:  # and all of them here
                    checkpoint.prune(folder, keep=5)
                else:
                    run.save(folder)
            assert caught.value.errno == FAULTS[fault][0]
            bmt.synchronize()
            assert sorted(path.name for path in Path(folder).iterdir()) == ["latest", "step-0000001"]
            bmt.synchronize()
    other = Run(seed=6)
    other.load(folder)
    assert differences(expected, state_of(other)) == []
    run.save(folder)
    assert checkpoint.latest(folder) == Path(folder) / f"step-{run.position:07d}"


class Fault:
    """While it lasts, what the writer does to the disk fails, if this rank is the culprit."""

    def __init__(self, fault: str, is_here: bool) -> None:
        number, self.name = (FAULTS | FAULTS_AFTER_THE_MANIFEST | FAULT_OF_THE_REPORT)[fault]
        self.is_here = is_here
        error = OSError(number, os.strerror(number), "the shard")

        def fail(*arguments: object, **options: object) -> None:
            raise error

        class Full(writer.Checksummed):
            def write(self, data: memoryview) -> None:
                if self.size > 500:
                    raise error
                super().write(data)

        self.replacement = Full if self.name == "Checksummed" else fail

    def __enter__(self) -> None:
        self.known = writer.__dict__.get(self.name)
        if self.is_here:
            setattr(writer, self.name, self.replacement)

    def __exit__(self, *error: object) -> None:
        if self.is_here and self.known is None:
            delattr(writer, self.name)
        elif self.is_here:
            setattr(writer, self.name, self.known)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_what_fails_after_the_manifest_leaves_a_whole_checkpoint(non_blocking, tmp_path):
    run_ranks(2, check_failing_end, str(tmp_path), non_blocking)


def check_failing_end(folder: str, non_blocking: bool) -> None:
    run, other = Run(), Run(seed=6)
    for fault in FAULTS_AFTER_THE_MANIFEST:
        run.train(1)
        with Fault(fault, bmt.rank() == 0), pytest.raises(OSError, match="the shard"):
            run.save(folder, keep=1, non_blocking=non_blocking)
            checkpoint.prune(folder, keep=5)
        bmt.synchronize()
        other.load(Path(folder) / f"step-{run.position:07d}")
        assert differences(state_of(run), state_of(other)) == []


def test_a_file_where_the_folder_should_be(tmp_path):
    run_ranks(2, check_no_folder, str(tmp_path / "taken"))


def check_no_folder(path: str) -> None:
    if bmt.rank() == 0:
        Path(path).write_text("a file")
    bmt.synchronize()
    with pytest.raises(OSError, match="taken"):
        Run().save(path)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(Path(path).parent / "nothing", Run().model)


def test_a_killed_rank_ends_a_save_in_the_background(tmp_path):
    """Long before the time-out: nobody waits for what a dead rank would have written."""
    options = {"init": {"timeout": 300}, "fresh": True}
    outcomes = rank_outcomes(2, save_with_a_killed_rank, str(tmp_path), **options)
    assert outcomes[1].status is Status.DIED
    assert "step-0000001: not finished: rank 1 died" in outcomes[0].value, outcomes[0]
    assert checkpoint.latest(tmp_path) is None


def save_with_a_killed_rank(folder: str) -> str:
    run = Run()
    run.train(1)
    if bmt.rank() == 1:
        writer.Saving.write_shard = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError) as error:
        run.save(folder, non_blocking=True).wait()
    return str(error.value)


def test_a_rank_that_cannot_report_its_failure_ends_a_save_in_the_background(tmp_path):
    """Long before the time-out, as soon as all ranks wait for the save."""
    run_ranks(2, save_with_a_silent_rank, str(tmp_path), init={"timeout": 300}, fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == []


def save_with_a_silent_rank(folder: str) -> None:
    run = Run()
    run.train(1)
    with Fault("no report", bmt.rank() == 1), pytest.raises(OSError, match="the shard"):
        run.save(folder, non_blocking=True)
        checkpoint.prune(folder, keep=5)


FAILING_AT_THE_END = """
import sys
from harness.checkpoint_run import Run
import bmtrain as bmt
from bmtrain.distributed.checkpoint import writer

def fail(*_):
    raise OSError(28, "No space left on device")

bmt.init_distributed()
writer.sync_folder = writer._write_runs = fail
Run().save(sys.argv[1], non_blocking=True)
"""


@pytest.mark.slow
def test_a_failure_in_the_background_at_the_end_makes_the_program_fail(tmp_path):
    root = Path(bmt.__file__).parents[1]
    paths = {"PYTHONPATH": f"{root}:{root / 'tests'}"}
    command = [sys.executable, "-c", FAILING_AT_THE_END, tmp_path]
    done = run_process(command, environment=paths, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stdout


def test_a_file_that_one_rank_does_not_see(tmp_path):
    run_ranks(2, check_unseen, str(tmp_path))


def check_unseen(folder: str) -> None:
    run, other = Run(), Run(seed=6)
    run.train(1)
    run.save(folder)
    before = state_of(other)
    sizes = loading.check_sizes
    if bmt.rank() == 1:  # as where a folder is not the same on all hosts

        def elsewhere(path: Path, manifest: object) -> None:
            sizes(Path("elsewhere", path.name), manifest)

        loading.check_sizes = elsewhere
    try:
        with pytest.raises(FileNotFoundError, match="elsewhere/step-0000001/shard-"):
            other.load(folder)
    finally:
        loading.check_sizes = sizes
    assert differences(before, state_of(other)) == []
    other.load(folder)
