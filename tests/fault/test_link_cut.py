"""The link between two hosts is cut in the middle of training: both sides raise, and name who is out of reach."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.namespaces import ip, joined_hosts

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "cut_link.py"
RANKS = 4
GRACE = 120.0  # for a machine that does other things as well: a rank that hangs would stay for ever


def start(rank: int, namespace: str, interface: str, folder: Path, timeout: float) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29513",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 2),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": "2",
    }
    own_name = ["ip", "netns", "exec", namespace, "unshare", "--uts"]
    command = [*own_name, sys.executable, str(SCRIPT), namespace, str(folder), str(timeout)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + GRACE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the program ip (Debian: iproute2)")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare (Debian: util-linux)")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
@pytest.mark.parametrize("timeout", [3.0, pytest.param(9.0, marks=pytest.mark.slow)])
def test_both_sides_raise_and_name_all_of_the_other(timeout: float, tmp_path: Path) -> None:
    with joined_hosts() as hosts:
        processes = [start(rank, *hosts[rank // 2], tmp_path, timeout) for rank in range(RANKS)]
        try:
            wait_for(lambda: len(list(tmp_path.glob("*.trains"))) == RANKS, "all ranks train")
            cut = time.monotonic()
            ip("-n", hosts[1][0], "link", "set", hosts[1][1], "down")
            wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(RANKS)), "all ranks raise")
            for process in processes:
                process.wait(GRACE)
        finally:
            for process in processes:
                process.kill()
            outputs = [process.communicate()[0] for process in processes]
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS)]
    for rank, (answer, output) in enumerate(zip(told, outputs, strict=True)):
        print(f"rank {rank}, after {answer['time'] - cut:.1f} s: {answer['message']}")
        assert processes[rank].returncode not in (0, -9), output
        others = "ranks 2-3" if rank < 2 else "ranks 0-1"
        assert f"no answer from {others}" in answer["message"], answer["message"]
