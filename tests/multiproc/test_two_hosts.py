"""Two hosts of two ranks each: network namespaces joined by a pair of virtual interfaces."""

from __future__ import annotations

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import free_port, run_process
from harness.namespaces import joined_hosts

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "two_hosts.py"
DIM, BLOCKS, STEPS, RANKS = 256, 3, 4, 4  # as in the script


def launch(prefix: list[str], options: list[str], arguments: list[str], environment: dict[str, str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    command = [*prefix, *launcher, *options, str(SCRIPT), *arguments]
    run_process(command, environment={"PYTHONPATH": str(ROOT), **environment}, timeout=150)


def train_on_two_hosts(file: Path, *reduce: str) -> Any:
    with joined_hosts() as hosts:

        def start(number: int) -> None:
            namespace, interface = hosts[number]
            options = ["2", "--nnodes", "2", "--node-rank", str(number)]
            options += ["--master-addr", "10.77.0.1", "--master-port", "29511"]
            prefix = ["ip", "netns", "exec", namespace]
            launch(prefix, options, [str(file), *reduce], {"GLOO_SOCKET_IFNAME": interface})

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(start, range(2)))
    return json.loads(file.read_text())


def train_on_one_host(file: Path) -> Any:
    options = [str(RANKS), "--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launch([], options, [str(file)], {})
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the program ip (Debian: iproute2)")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
def test_losses_and_counted_bytes(tmp_path: Path) -> None:
    one = train_on_one_host(tmp_path / "one.json")
    assert one["backends"] == ["shm", "shm"]
    # Weight and bias begin at multiples of 512 bytes as they are.
    partition = (DIM * DIM + DIM) * 4 // RANKS
    # A gather brings each partition of this host to the other one once. A direct reduction sends a slice of a gradient
    # from each rank to each: 2 * 2 of them between hosts; by hosts it sends the host's sums, 2.
    for reduce, slices in ((["direct"], 4), ([], 2)):
        two = train_on_two_hosts(tmp_path / "two.json", *reduce)
        assert two["backends"] == ["shm+gloo", "shm"]  # of a group on both hosts, of one within a host
        if reduce:
            assert two["losses"] == one["losses"]
        else:  # summed in another order
            for found, expected in zip(two["losses"], one["losses"], strict=True):
                assert list(map(float.fromhex, found)) == pytest.approx(list(map(float.fromhex, expected)))
        crossing = STEPS * ((2 * BLOCKS - 1) * 2 + BLOCKS * slices) * partition
        # Headers and acknowledgements, and what the optimizer's step agrees on.
        assert crossing <= two["sent"] <= 1.05 * crossing + STEPS * 16 * 1024
