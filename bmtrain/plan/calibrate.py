"""Measuring the machine that this runs on, for ``python -m bmtrain plan --here``.

All ranks measure at the same time, as they compete for processors and memory in a run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from .._checkup import Surroundings
from ..init import init_distributed
from .machine import Machine

__all__ = ["measure_machine"]

_REPEATS = 7
_TIMEOUT = 120.0


def measure_machine(num_ranks: int = 2) -> Machine:
    """Start ``num_ranks`` ranks here, and measure products, copies and gathers in them. Takes some seconds.

    Raises:
        ValueError: fewer than one rank.
        OSError: a rank did not end well; with what it said.
    """
    if num_ranks < 1:
        raise ValueError(f"devices: expected at least 1, got {num_ranks}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bmtrain.plan.calibrate"],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [rank.communicate(timeout=_TIMEOUT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (_, problems)) in enumerate(zip(ranks, said, strict=True)):
        if rank.returncode:
            last = (problems.strip().splitlines() or ["nothing"])[-1]
            raise OSError(f"--here: rank {number} ended with status {rank.returncode}: {last}")
    measured = json.loads(said[0][0].splitlines()[-1])
    return Machine(
        name="this machine",
        num_nodes=1,
        devices_per_node=num_ranks,
        reserved=0.0,
        efficiency=1.0,
        source="measured",
        **measured,
    )


def _median_seconds(action: Callable[[], object]) -> float:
    action()
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def _measure() -> dict[str, float]:
    from ..global_var import context

    init_distributed(timeout=60)
    ctx = context()
    group, device = ctx.groups["zero"], ctx.device

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def product() -> None:
        torch.mm(left, left)
        finish()

    def copy() -> None:
        target.copy_(source)
        finish()

    def gather(numel: int) -> float:
        part = torch.zeros(numel, device=device)
        whole = torch.zeros(numel * group.size, device=device)

        def action() -> None:
            group.comm.all_gather(whole, part, "calibrate").wait()
            finish()

        return _median_seconds(action)

    size = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.randn(size, size, device=device, dtype=dtype)
    source = torch.ones(1 << 24, device=device)
    target = torch.empty_like(source)
    flops = 2 * size**3 / _median_seconds(product)
    bandwidth = 2 * source.nbytes / _median_seconds(copy)
    small, large = gather(64), gather(1 << 20)
    others = group.size - 1
    link = others * (4 << 20) / max(large - small, 1e-9) if others else bandwidth
    available = float(Surroundings(build={}).available_memory())
    memory = torch.cuda.mem_get_info()[0] if device.type == "cuda" else available / group.size
    return {
        "memory": float(memory),
        "flops": flops,
        "memory_bandwidth": bandwidth,
        "link_bandwidth": link,
        "link_latency": small / max(others, 1),
        "network_bandwidth": link,
        "pcie_bandwidth": bandwidth,
        "host_memory": available,
        "host_bandwidth": bandwidth * group.size,
    }


if __name__ == "__main__":
    print(json.dumps(_measure()))
