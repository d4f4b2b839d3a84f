"""`bmtrain launch`: the ranks start as under torchrun, and a failure ends in one line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run_process

_PROGRAM = """
import os, pathlib, signal, sys, time
rank, way = int(os.environ["RANK"]), sys.argv[1]
written = pathlib.Path(__file__).with_name("rank 0 has written")
while rank == 1 and not written.exists():  # before a rank ends, and the launcher ends the other
    time.sleep(0.01)
# A line and its end at once, as the ranks share a pipe: print() writes the end apart before init_distributed.
sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']}, {sys.argv[1:]}\\n")
sys.stdout.flush()
if rank == 0:
    written.touch()
if rank == 1 and way == "exit":
    sys.exit(7)
if rank == 1 and way == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if way != "well":
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("way", "status", "last"),
    [
        ("well", 0, ""),
        ("exit", 7, "bmtrain launch: rank 1 of 2 ended first, with status 7"),
        ("kill", 137, "bmtrain launch: rank 1 of 2 ended first, by SIGKILL"),
    ],
)
def test_launch(way: str, status: int, last: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PROGRAM)
    (temporary := tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "bmtrain", "launch", "--nproc", "2", script, way, "--nproc", "3"]
    done = run_process(command, environment={"TMPDIR": str(temporary)}, check=False)
    lines = done.stdout.strip().splitlines()
    assert done.returncode == status
    assert f"rank 0 of 2, ['{way}', '--nproc', '3']" in lines  # also torchrun has options that begin so
    if last:
        assert lines[-1] == last
    assert len(lines) <= 3 and not list(temporary.iterdir())


_LINES = """
import bmtrain
bmtrain.init_distributed(timeout=60)

class OfRank:
    def __str__(self):
        bmtrain.synchronize()  # all ranks are in the middle of their line
        return f"of rank {bmtrain.rank()}"

print("a line", OfRank())
"""


@pytest.mark.parametrize("launcher", ["bmtrain launch --nproc 2", "torch.distributed.run --nproc-per-node 2"])
def test_lines_of_ranks_that_share_an_output_stay_whole(launcher: str, tmp_path: Path) -> None:
    """Both start ranks with ``python -u``, where `print` would write each piece by itself."""
    script = tmp_path / "train.py"
    script.write_text(_LINES)
    printed = run_process([sys.executable, "-m", *launcher.split(), script]).stdout
    assert sorted(printed.splitlines()) == ["a line of rank 0", "a line of rank 1"]


_TRAINING = """
import bmtrain, torch
bmtrain.init_distributed(timeout=300)
block = bmtrain.Block(bmtrain.nn.Linear(8, 8))
bmtrain.init_parameters(block)
def half_open():
    try:
        yield
    finally:
        raise RuntimeError("closed too late")
left = half_open()  # as Ctrl-C leaves a context manager that it hits between two instructions
next(left)
for step in range(1_000_000):
    block(torch.ones(2, 8)).sum().backward()
    if step == 2:
        bmtrain.distributed.checkpoint.save("out", step, block)
        print("saved")
"""


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_shows_no_traceback(times: int, tmp_path: Path) -> None:
    """A terminal sends it to the launcher and to all ranks."""
    script = tmp_path / "train.py"
    script.write_text(_TRAINING)
    command = [sys.executable, "-m", "bmtrain", "launch", "--nproc", "2", str(script)]
    root = Path(__file__).parents[2]
    launched = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert launched.stdout is not None
    try:
        for _ in range(2):
            assert launched.stdout.readline() == "saved\n"
        for _ in range(times):
            os.killpg(launched.pid, signal.SIGINT)
        output, _ = launched.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)
    assert launched.returncode == 130, output
    *reports, last = output.splitlines()
    assert len(reports) == 1, output
    for report in reports:
        assert "was interrupted (Ctrl-C), at " in report or (times == 2 and "ended by SIGTERM, at " in report)
        assert report.endswith("; continue with checkpoint.load('out/step-0000002', model, optimizer)")
    assert last == "bmtrain launch: stopped by SIGINT"


_SURVIVING = """
import os, signal, sys, torch
import bmtrain as bmt
bmt.init_distributed(seed=1, virtual_shards=4, survive=1, timeout=60)
if sys.argv[1] == "continue":
    bmt.survive.exceptions()
model = bmt.BMTrainModelWrapper(torch.nn.Linear(8, 4))
optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
manager = bmt.optim.OptimManager()
manager.add_optimizer(optimizer)
for step in range(4):
    batch = torch.ones(8, 8)
    shards, losses = bmt.virtual_shards(step), []
    for shard in shards:
        losses.append(model(shard.of(batch)).square().mean())
        manager.backward(losses[-1])
    if os.environ["RANK"] == "0" and step == 2:
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] in ("raise", "continue"):
            raise ValueError("of the script")
    manager.step()
    if sys.argv[1] == "evaluate" and step == 2:
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        model(batch)
print(f"{bmt.world_size()} ranks at the end", flush=True)
"""


@pytest.mark.parametrize(
    ("way", "status", "ends"),
    [("well", 0, 3), ("kill", 0, 2), ("raise", 1, 0), ("continue", 1, 2), ("evaluate", 137, 0)],
)
def test_the_other_ranks_continue(way: str, status: int, ends: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SURVIVING)
    command = [sys.executable, "-m", "bmtrain", "launch", "--nproc", "3", "--survive", "1", script, way]
    done = run_process(command, check=False)
    assert done.returncode == status
    assert done.stdout.count(f"{ends} ranks at the end") == ends
    # a loss that a step would have survived: nothing else says why the job has ended
    assert ("; outside of a step that ends the job: " in done.stdout) == (way == "evaluate")
    if ends == 2:
        assert "bmtrain: rank 0 lost; 2 ranks continue" in done.stdout
        how = "was ended by SIGKILL" if way == "kill" else "ended with status 1"
        assert f"bmtrain launch: rank 0 of 3 {how}" in done.stdout
