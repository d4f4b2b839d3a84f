"""Two hosts of two ranks each: network namespaces joined by a pair of virtual interfaces."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import run_process, run_ranks
from harness.namespaces import joined_hosts

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "two_hosts.py"
DIM, BLOCKS, STEPS, RANKS = 256, 3, 4, 4  # as in the script


def train_on_two_hosts(file: Path) -> Any:
    with joined_hosts() as hosts:

        def start(number: int) -> None:
            namespace, interface = hosts[number]
            options = ["--nproc-per-node", "2", "--nnodes", "2", "--node-rank", str(number)]
            options += ["--master-addr", "10.77.0.1", "--master-port", "29511", str(SCRIPT), str(file)]
            launcher = ["ip", "netns", "exec", namespace, sys.executable, "-m", "torch.distributed.run"]
            environment = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": interface}
            run_process([*launcher, *options], environment=environment, timeout=250)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(start, range(2)))
    return json.loads(file.read_text())


def run_script(file: str) -> None:
    sys.argv = [str(SCRIPT), file]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the program ip (Debian: iproute2)")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
def test_losses_and_counted_bytes(tmp_path: Path) -> None:
    run_ranks(RANKS, run_script, str(tmp_path / "one.json"), init=False, fresh=True)
    all_of_one = json.loads((tmp_path / "one.json").read_text())
    all_of_two = train_on_two_hosts(tmp_path / "two.json")
    # Weight and bias begin at multiples of 512 bytes as they are.
    partition = (DIM * DIM + DIM) * 4 // RANKS
    # A gather brings each partition of this host to the other one once. A direct reduction sends a slice of a gradient
    # from each rank to each: 2 * 2 of them between hosts; by hosts it sends the host's sums, 2.
    for reduce, slices in (("direct", 4), ("by hosts", 2)):
        one, two = all_of_one[reduce], all_of_two[reduce]
        assert one["backends"] == ["shm", "shm"]
        assert two["backends"] == ["shm+gloo", "shm"]  # of a group on both hosts, of one within a host
        if reduce == "direct":
            assert two["losses"] == one["losses"]
        else:  # summed in another order
            for found, expected in zip(two["losses"], one["losses"], strict=True):
                assert list(map(float.fromhex, found)) == pytest.approx(list(map(float.fromhex, expected)))
        crossing = STEPS * ((2 * BLOCKS - 1) * 2 + BLOCKS * slices) * partition
        # Headers and acknowledgements, and what the optimizer's step agrees on.
        assert crossing <= two["sent"] <= 1.05 * crossing + STEPS * 16 * 1024
