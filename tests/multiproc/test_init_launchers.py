"""Whole programs under real launchers, or none: exit statuses and what a user reads."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import free_port, run_process

ROOT = Path(__file__).parents[2]
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs find this tree and no GPU, and nothing of a launcher around the test run."""
    for name in list(os.environ):
        if name in LAUNCH_VARIABLES or name.startswith(("OMPI_", "PMI_", "MV2_", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


ALONE = """
import os, socket, sys, threading, time, torch
threads = len(os.listdir("/proc/self/task"))
import bmtrain
assert len(os.listdir("/proc/self/task")) == threads, "import started a thread"
assert not torch.cuda.is_initialized()

bmtrain.init_distributed()
assert (bmtrain.rank(), bmtrain.world_size(), bmtrain.config["comm"].backend) == (0, 1, "single")
for name in os.listdir("/proc/self/fd"):
    try:
        kind = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        continue
    assert not kind.startswith("socket:"), "a socket is open"
bmtrain.synchronize()

# Both of two such processes are initialised at the same time.
folder, me, other = sys.argv[1:]
open(os.path.join(folder, me), "w").close()
while not os.path.exists(os.path.join(folder, other)):
    time.sleep(0.02)
"""


def test_bc_1_and_bc_7_single_processes_share_a_host(tmp_path: Path) -> None:
    script = write(tmp_path, "alone.py", ALONE)
    both = (
        "import subprocess, sys\\n"
        "pair = [('one', 'two'), ('two', 'one')]\\n"
        "started = [subprocess.Popen([sys.executable, *sys.argv[1:], *names]) for names in pair]\\n"
        "sys.exit(sum(process.wait() != 0 for process in started))"
    ).replace("\\n", "\n")
    done = run_process([sys.executable, "-c", both, str(script), str(tmp_path)], timeout=120)
    assert done.stdout == ""


PROGRAM = """
import json, os, sys, torch, torch.distributed as dist
variables, arguments = dict(os.environ), list(sys.argv)
import bmtrain

bmtrain.init_distributed(timeout=60)
assert dict(os.environ) == variables and sys.argv == arguments
restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
if "--restart" in sys.argv and restarts == 0:
    bmtrain.synchronize()
    os._exit(5)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
bmtrain.synchronize()
config = bmtrain.config
facts = [bmtrain.rank(), bmtrain.world_size(), config["local_rank"], config["local_size"], restarts, total.item()]
sys.stdout.write("facts " + json.dumps(facts) + "\\n")
sys.stdout.flush()
if bmtrain.rank() == 0:
    os._exit(0)
"""


def facts(output: str) -> list[Any]:
    return sorted(json.loads(line.split("facts ", 1)[1]) for line in output.splitlines() if "facts " in line)


def torchrun(*arguments: str, module: str = "torch.distributed.run") -> list[str]:
    port = str(free_port())
    return [sys.executable, "-m", module, "--nproc-per-node=2", f"--master-port={port}", *arguments]


def test_torchrun_with_a_restart_beside_the_default_group(tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", PROGRAM)
    done = run_process(torchrun("--max-restarts=1", str(script), "--restart"), timeout=180)
    assert facts(done.stdout) == [[rank, 2, rank, 2, 1, 2.0] for rank in range(2)]


def test_torch_distributed_launch_passes_the_local_rank_as_an_option(tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", "import os; del os.environ['LOCAL_RANK']\n" + PROGRAM)
    done = run_process(torchrun(str(script), module="torch.distributed.launch"), timeout=180)
    assert facts(done.stdout) == [[rank, 2, rank, 2, 0, 2.0] for rank in range(2)]


def test_a_bad_argument_ends_the_job_with_one_clear_sentence(tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", "import bmtrain\nbmtrain.init_distributed(tp_size=3)\n")
    done = run_process(torchrun(str(script)), timeout=180, check=False)
    assert done.returncode != 0
    sentence = "ValueError: world_size 2 must be divisible by pipe_size * tp_size = 1 * 3 = 3 (remainder 2)"
    assert sentence in done.stdout
