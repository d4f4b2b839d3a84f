"""The tutorial's programs: the lines of the notes under all launchers, and twins that end at the same parameters."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from harness import free_port, run_process, run_ranks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "example" / "ddp"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCH = ["-m", "torch.distributed.launch", "--use-env", "--nproc-per-node=2"]


def run(command: list[str], script: str, *arguments: str) -> list[str]:
    """The lines of a program under a launcher.

    PyTorch's own process groups now and then abort a process that ends ("terminate called without an active
    exception", long after its last line): its programs, which use nothing of ours, get a second try.
    """
    for is_last in (False, True) if script.startswith("ddp_") else (True,):
        done = run_process(
            [sys.executable, *with_port(command), script, *arguments],
            directory=FOLDER,
            timeout=240,
            check=is_last,
            environment={
                "PYTHONPATH": str(ROOT),
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONWARNINGS": "ignore",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(free_port()),
            },
        )
        if done.returncode == 0 or "terminate called without an active exception" not in done.stdout:
            break
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def with_port(command: list[str]) -> list[str]:
    """A launcher that does not look for a free port is given one."""
    return command if not command or "--standalone" in command else [*command, f"--master-port={free_port()}"]


kept: dict[
    str, object
] = {}  # globals of scripts: a process group that is dropped at once can wait for the GIL for ever


def run_script(script: str, *arguments: str) -> None:
    """Run a program on this rank, as a launcher would."""
    sys.path.insert(0, str(FOLDER))
    sys.argv = [script, *arguments]
    kept.update(runpy.run_path(str(FOLDER / script), run_name="__main__"))


def check_lines(output: list[str], world: int) -> None:
    """Those of the notes, which are of 4 ranks."""
    lines = [
        f"CPU:{rank} | Epoch: {epoch} | Batchsize: 32 | Steps: {128 // world}"
        for epoch in range(2)
        for rank in range(world)
    ]
    told, losses = [], []
    for line in output:
        if line.startswith("CPU"):
            line, _, loss = line.partition(" | Loss: ")
            told.append(line)
            losses += [float(loss)] if loss else []
    assert told[0] == f"CPU_Count: {world}"
    assert sorted(told[1:]) == sorted(lines)
    for rank in range(world):  # every rank's epochs are in order
        own = [line for line in told if line.startswith(f"CPU:{rank} ")]
        assert own == lines[rank::world]
    assert len(losses) == 2 * world
    assert sum(losses[world:]) < sum(losses[:world])  # of the second epoch and of the first


def check_weights(expected_in: Path, found_in: Path) -> None:
    expected, found = (torch.load(file, weights_only=True) for file in (expected_in, found_in))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)
    torch.manual_seed(0)
    assert not torch.equal(torch.nn.Linear(20, 1).weight, expected["weight"])  # it was trained


def test_twins_print_the_lines_of_the_notes_and_end_at_equal_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / f"{kind}.pt" for kind in ("ddp", "bmt")}
    for kind, file in files.items():
        options = ("--max_epoch=2", "--batch_size=32", f"--save={file}")
        run_ranks(4, run_script, f"{kind}_torchrun.py", *options, init=False, fresh=True, timeout=200)
        output = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
        check_lines(output, 4)
    check_weights(files["ddp"], files["bmt"])


CASES = [
    (TORCHRUN, "bmt_torchrun.py", "--max_epoch=2"),
    (LAUNCH, "bmt_torchrun.py", "--max_epoch=2"),
    ([], "bmt_mp.py", "--max_epochs=2 --num_ranks=2"),
    ([], "ddp_mp.py", "--max_epochs=2 --num_ranks=2"),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those at which all programs end."""
    file = tmp_path_factory.mktemp("ddp") / "weights.pt"
    options = ("--max_epoch=2", "--batch_size=32", f"--save={file}")
    run_ranks(2, run_script, "ddp_torchrun.py", *options, init=False, fresh=True, timeout=200)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "script", "options"), CASES, ids=["torchrun", "launch", "mp", "mp without bmtrain"]
)
def test_each_launcher(tmp_path: Path, weights: Path, command: list[str], script: str, options: str) -> None:
    file = tmp_path / "weights.pt"
    check_lines(run(command, script, *options.split(), "--batch_size=32", f"--save={file}"), 2)
    check_weights(weights, file)


@pytest.mark.parametrize("name", ["communication_intro", "communication"])
def test_communication_shows_the_same_on_both(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for kind in ("ddp", "bmt"):
        run_ranks(2, run_script, f"{kind}_{name}.py", init=False, fresh=True, timeout=200)
        output = capsys.readouterr().out.splitlines()
        shown[kind] = [found[1] for line in output if (found := re.search(r"(rank \d \| .*)", line))]
    assert shown["bmt"] == shown["ddp"]
    if name == "communication":
        assert "rank 1 | scatter: [10.0, 11.0]" in shown["ddp"]
        assert "rank 0 | gather: [[1.0, 2.0], [3.0, 4.0]]" in shown["ddp"]
        assert "rank 1 | reduce_scatter: [120.0, 122.0]" in shown["ddp"]
        assert len(shown["ddp"]) == 14
    else:
        assert "rank 1 | send/recv: [1.0, 1.0]" in shown["ddp"]
        assert "rank 0 | all_reduce: [3.0, 6.0]" in shown["ddp"]


def test_every_program_says_how_it_is_run() -> None:
    for path in FOLDER.glob("*_*.py"):
        if "__main__" in path.read_text():
            assert os.path.basename(path) in path.read_text().split('"""')[1], path
