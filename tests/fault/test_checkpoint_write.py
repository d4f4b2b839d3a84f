"""Saving where writing fails: every rank raises the same, and nothing else is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from harness import run_ranks
from harness.checkpoint_run import Run, differences, state_of

import bmtrain as bmt
from bmtrain.distributed import checkpoint
from bmtrain.distributed.checkpoint import writer

FAULTS = {
    "disk full": (errno.ENOSPC, "_Checksummed"),
    "I/O error": (errno.EIO, "_Checksummed"),
    "no permission": (errno.EACCES, "open"),
    "read-only": (errno.EROFS, "open"),
    "folder not written": (errno.EIO, "sync_folder"),
}


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
                run.save(folder, non_blocking=non_blocking)
                checkpoint.prune(folder, keep=5)  # a save in the background tells here
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
        number, self.name = FAULTS[fault]
        self.is_here = is_here
        error = OSError(number, os.strerror(number), "the shard")

        def fail(*arguments: object, **options: object) -> None:
            raise error

        class Full(writer._Checksummed):
            def write(self, data: memoryview) -> None:
                if self.size > 500:
                    raise error
                super().write(data)

        self.replacement = Full if self.name == "_Checksummed" else fail

    def __enter__(self) -> None:
        self.known = writer.__dict__.get(self.name)
        if self.is_here:
            setattr(writer, self.name, self.replacement)

    def __exit__(self, *error: object) -> None:
        if self.is_here and self.known is None:
            delattr(writer, self.name)
        elif self.is_here:
            setattr(writer, self.name, self.known)


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
