"""How the ranks of two hosts find each other: IPv6 alone, and a MASTER_ADDR that every host takes for itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness.namespaces import joined_hosts

ROOT = Path(__file__).parents[2]
GRACE = 120.0  # for a machine that does other things as well: a rank that hangs would stay for ever
IPV6 = ("fd77::1/64", "fd77::2/64")

# In a name space of its own for the host's name, by which a host is told from others.
SCRIPT = """
import socket, sys
socket.sethostname(sys.argv[1])
import torch, bmtrain as bmt
bmt.init_distributed(timeout=float(sys.argv[2]))
block = bmt.Block(bmt.nn.Linear(64, 64))
bmt.init_parameters(block)
optimizer = bmt.optim.AdamOptimizer(block.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    block(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
print("trained over", bmt.config["comm"].backend)
"""

pytestmark = [
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs the program ip (Debian: iproute2)"),
    pytest.mark.skipif(
        shutil.which("unshare") is None, reason="needs the program unshare (Debian: util-linux)"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces"),
]


def outputs(hosts: Sequence[tuple[str, str]], masters: Sequence[str], timeout: float) -> list[str]:
    """What one rank on each of the hosts prints, each with a MASTER_ADDR of its own."""
    processes = []
    for rank, ((namespace, interface), master) in enumerate(zip(hosts, masters, strict=True)):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface,
            "MASTER_ADDR": master,
            "MASTER_PORT": "29517",
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
        }
        own_name = ["ip", "netns", "exec", namespace, "unshare", "--uts"]
        command = [*own_name, sys.executable, "-c", SCRIPT, namespace, str(timeout)]
        processes.append(
            subprocess.Popen(
                command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    try:
        return [process.communicate(timeout=GRACE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_hosts_that_have_ipv6_only() -> None:
    with joined_hosts(IPV6) as hosts:
        found = outputs(hosts, ["fd77::1", "fd77::1"], 60)
    assert all(output.endswith("trained over gloo\n") for output in found), found


def test_localhost_on_the_first_host_only() -> None:
    """As some operators start the first of several pods; the others have its address."""
    with joined_hosts() as hosts:
        found = outputs(hosts, ["localhost", "10.77.0.1"], 60)
    assert all(output.endswith("trained over gloo\n") for output in found), found


def test_localhost_on_both_hosts_is_named() -> None:
    with joined_hosts() as hosts:
        first, second = outputs(hosts, ["localhost", "localhost"], 6)
    hint = "localhost is every host itself, and this job has ranks on several: set MASTER_ADDR to an address"
    assert "missing rank 1" in first and hint in first, first
    assert "no answer at localhost:29517" in second and hint in second, second
