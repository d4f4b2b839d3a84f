"""Saving and loading that fails: the same error on all ranks, and the old file stays."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from harness import Status, rank_outcomes, run_process, run_ranks
from harness.stored_models import load_model, make_model, save_model

import bmtrain as bmt
from bmtrain import store
from bmtrain._base.atomic_file import AtomicFile
from bmtrain.distributed import checkpoint


def same_error(outcomes, name: str) -> str:
    assert {outcome.status for outcome in outcomes} == {Status.RAISED}, outcomes
    assert {outcome.error for outcome in outcomes} == {name}
    (message,) = {outcome.message for outcome in outcomes}
    return message


def load_into_model(path: str) -> None:
    bmt.load(make_model(True), path)


def test_a_missing_file_is_the_same_error_on_all_ranks(tmp_path):
    path = str(tmp_path / "nothing.pt")
    message = same_error(rank_outcomes(4, load_into_model, path, timeout=20), "FileNotFoundError")
    assert path in message


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 and no more"])
def test_an_unreadable_file_is_the_same_error_on_all_ranks(content, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    message = same_error(rank_outcomes(2, load_into_model, str(path), timeout=20), "UnreadableFileError")
    assert str(path) in message


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("/nonexistent/should-not-be-tried",)


@pytest.mark.parametrize("value", [Harmful(), [1, 2]])
def test_code_in_a_file_is_refused_by_name(value, tmp_path):
    path = str(tmp_path / "model.pt")
    torch.save({"a": value} if isinstance(value, Harmful) else value, path)
    message = same_error(rank_outcomes(2, load_into_model, path, timeout=20), "UnreadableFileError")
    assert ("mkdir" in message) if isinstance(value, Harmful) else ("got list" in message)


UNSENDABLE = {
    "sparse": (torch.Tensor.to_sparse, "expected a dense tensor, got layout torch.sparse_coo"),
    "meta": (lambda x: x.to("meta"), "expected a tensor with values, got one on the meta device"),
    "quantised": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "expected plain numbers, got a quantised tensor of torch.qint8",
    ),
}


@pytest.mark.parametrize("kind", UNSENDABLE)
def test_a_tensor_that_cannot_be_sent_is_the_same_error_on_all_ranks(kind, tmp_path):
    path = str(tmp_path / "model.pt")
    change, problem = UNSENDABLE[kind]
    torch.save({"weight": change(torch.ones(1, 2))}, path)
    message = same_error(rank_outcomes(2, load_into_linear, path, timeout=20), "TypeError")
    assert message == f"state_dict['weight']: {problem}"


def load_into_linear(path: str) -> None:
    bmt.load(bmt.nn.Linear(2, 1, bias=False), path)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_save_that_rank_0_cannot_do_is_the_same_error_on_all_ranks(non_blocking, tmp_path):
    path = str(tmp_path / "no folder" / "model.pt")
    options = {"non_blocking": True} if non_blocking else {}
    message = same_error(rank_outcomes(2, save_model, path, timeout=20, **options), "FileNotFoundError")
    assert path in message


@pytest.mark.parametrize("world", (1, 2))
def test_a_save_that_fails_half_way_leaves_the_old_file(world, tmp_path):
    run_ranks(world, check_failing_write, str(tmp_path / "model.pt"))
    assert os.listdir(tmp_path) == ["model.pt"]
    run_ranks(world, load_model, str(tmp_path / "model.pt"))


def check_failing_write(path: str) -> None:
    model = make_model(True)
    bmt.save(model, path)
    write, write_archive = torch.save, store.write_archive

    def failing(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    def failing_archive(path, *rest):
        with AtomicFile(path) as file:
            failing(rest, file)

    try:
        store.write_archive = failing_archive
        with pytest.raises(OSError, match="No space left"):
            bmt.save(make_model(True, seed=3), path)
        store.write_archive = write_archive
        for surfacing in (lambda: bmt.save(model, path), lambda: bmt.load(model, path)):
            torch.save = failing
            bmt.save(make_model(True, seed=3), path, non_blocking=True)  # its error comes later
            torch.save = write if bmt.rank() else failing
            with pytest.raises(OSError, match="No space left"):
                surfacing()
        bmt.load(model, path)  # the error was raised once
        torch.save = failing
        handle = bmt.save(make_model(True, seed=3), path, non_blocking=True)
        with pytest.raises(OSError, match="No space left") if bmt.rank() == 0 else nullcontext():
            handle.wait()
        torch.save = write
        handle.wait()  # likewise
        bmt.load(model, path)
    finally:
        torch.save, store.write_archive = write, write_archive


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_full_disk_is_an_error_that_names_the_file(kind, tmp_path):
    run_ranks(2, check_full_disk, str(tmp_path), kind)
    assert [entry.name for entry in tmp_path.rglob("*") if not entry.is_dir()] == []


def check_full_disk(folder: str, kind: str) -> None:
    model = bmt.nn.Linear(300, 300)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    bmt.synchronize()
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, limits[1])
    )  # what a file system says that has no room
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            if kind == "file":
                bmt.save(model, f"{folder}/model.pt")
            else:
                checkpoint.save(folder, 1, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    place = "/model.pt" if kind == "file" else "/step-0000001/shard-"
    assert str(caught.value).startswith(f"[Errno {errno.EFBIG}] File too large: '{folder}{place}")
    bmt.synchronize()


def test_a_model_is_written_into_a_pipe(tmp_path):
    script = (
        "import torch, bmtrain as bmt; bmt.init_distributed()\n"
        "bmt.save(torch.nn.Linear(200, 300), '/dev/stdout')\n"
    )
    command = f"{shlex.join([sys.executable, '-c', script])} | cat > model.pt"
    run_process(["bash", "-c", command], directory=tmp_path, environment=single_process())
    assert torch.load(tmp_path / "model.pt")["weight"].shape == (300, 200)


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode(mode, non_blocking, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    path.chmod(mode)
    run_ranks(2, save_model, str(path), non_blocking=non_blocking)
    run_ranks(2, load_model, str(path))
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_write_protected_file_is_not_replaced(non_blocking, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"the best")
    path.chmod(0o444)
    outcomes = rank_outcomes(2, save_model, str(path), non_blocking=non_blocking, timeout=20)
    message = same_error(outcomes, "PermissionError")
    assert "Write-protected: chmod u+w" in message
    assert str(path) in message
    assert path.read_bytes() == b"the best"
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_background_failure_at_the_end_makes_the_program_fail(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, bmtrain as bmt\n"
        "bmt.init_distributed()\n"
        "def failing(state, file): raise OSError(28, 'No space left on device')\n"
        "torch.save = failing\n"
        f"bmt.save(torch.nn.Linear(2, 2), {str(tmp_path / 'model.pt')!r}, non_blocking=True)\n"
    )
    result = run_process([sys.executable, script], environment=single_process(), check=False)
    assert result.returncode == 1
    assert "No space left on device" in result.stdout


def single_process() -> dict[str, str]:
    root = str(Path(bmt.__file__).parents[1])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert not any(name in os.environ for name in names)
    return {"PYTHONPATH": root}


SAVER = """
import sys, torch, bmtrain as bmt
bmt.init_distributed()
model = torch.nn.Linear(700, 700)
for fill in range(1, 10_000):
    for p in model.parameters():
        p.data.fill_(fill)
    bmt.save(model, sys.argv[1])
    print(fill, flush=True)
"""


def test_bc63_a_kill_at_any_moment_leaves_the_old_or_the_new_file(tmp_path):
    script, path = tmp_path / "saver.py", tmp_path / "files" / "model.pt"
    path.parent.mkdir()
    script.write_text(SAVER)
    for delay in (0.0, 0.003, 0.011):
        process = subprocess.Popen(
            [sys.executable, script, path], stdout=subprocess.PIPE, env={**os.environ, **single_process()}
        )
        try:
            assert process.stdout is not None
            for _ in range(3):
                last = int(process.stdout.readline())
            time.sleep(delay)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        state = torch.load(path, weights_only=True)
        values = {float(value) for tensor in state.values() for value in (tensor.min(), tensor.max())}
        assert len(values) == 1
        assert values.pop() >= last
    leftovers = [name for name in os.listdir(path.parent) if name != "model.pt"]
    assert len(leftovers) <= 1  # the next save removes what the last one left
