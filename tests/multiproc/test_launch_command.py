"""`bmtrain launch`: the ranks start as under torchrun, and a failure ends in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import run_process

_PROGRAM = """
import os, signal, sys, time
rank, way = int(os.environ["RANK"]), sys.argv[1]
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, {sys.argv[1:]}", flush=True)
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
        ("exit", 7, "bmtrain launch: rank 1 of 2 failed first: it ended with status 7"),
        ("kill", 137, "bmtrain launch: rank 1 of 2 failed first: it was ended by SIGKILL"),
    ],
)
def test_launch(way: str, status: int, last: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PROGRAM)
    command = [sys.executable, "-m", "bmtrain", "launch", "--nproc", "2", script, way, "--lr", "3"]
    done = run_process(command, check=False)
    lines = done.stdout.strip().splitlines()
    assert done.returncode == status
    assert f"rank 0 of 2, ['{way}', '--lr', '3']" in lines
    if last:
        assert lines[-1] == last
    assert len(lines) <= 3
