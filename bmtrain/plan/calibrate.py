"""Measurement of this machine, for ``bmtrain plan --here``.

All ranks measure at the same time, as they compete for processors and memory in a run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from .._engine.drives import make_queue, measure_both, num_on_drives
from .._tools.checkup import Surroundings
from .._tools.launch_surviving import rank_environments
from ..global_var import context
from ..init import init_distributed
from .decoder import gpt2
from .machine import Machine

__all__ = ["measure_machine", "measure_ranks"]

_REPEATS = 7
_TIMEOUT = 120.0
_WRITTEN = 64 << 20  # bytes, by each rank to a drive


def measure_machine(
    num_ranks: int = 2, dtype: torch.dtype | None = None, tier_directories: Sequence[str] = ()
) -> Machine:
    """Starts ``num_ranks`` ranks here, and measures a layer, copies and gathers in them. Takes some seconds.

    Args:
        num_ranks: of this host.
        dtype: as for :func:`measure_ranks`.
        tier_directories: as for :func:`measure_ranks`.

    Raises:
        ValueError: fewer than one rank, or a folder that does not exist.
        OSError: a rank failed; the error contains its output.
    """
    if num_ranks < 1:
        raise ValueError(f"devices: expected at least 1, got {num_ranks}")
    for directory in tier_directories:
        if not Path(directory).is_dir():
            raise ValueError(f"--tier-directory: expected a folder that exists, got {directory!r}")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bmtrain.plan.calibrate", _name(dtype), *tier_directories],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in rank_environments(num_ranks)
    ]
    try:
        said = [rank.communicate(timeout=_TIMEOUT) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise OSError(
            f"--here: the measurement took more than {_TIMEOUT:.0f} s; is the machine busy?"
        ) from None
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (_, problems)) in enumerate(zip(ranks, said, strict=True)):
        if rank.returncode:
            last = (problems.strip().splitlines() or ["nothing"])[-1]
            raise OSError(f"--here: rank {number} ended with status {rank.returncode}: {last}")
    return Machine(**json.loads(said[0][0].splitlines()[-1]))


def _median_seconds(action: Callable[[], object]) -> float:
    action()
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def measure_ranks(dtype: torch.dtype | None = None, tier_directories: Sequence[str] = ()) -> Machine:
    """Measures the machine on all ranks of this job at the same time. Collective.

    Args:
        dtype: in which layers compute; processors with units for 16 bits are a few times as fast in it. Default: fp32
            on CPU ranks, bf16 on GPUs.
        tier_directories: on drives, which are read and written. Default: drives keep a number that was not measured.

    Returns:
        the measurements of this rank; other ranks may have other numbers.

    Raises:
        NotInitializedError: before `init_distributed`.
    """
    ctx = context("measure_ranks()")
    group, device = ctx.world, ctx.device

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

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

    source = torch.ones(1 << 24, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _median_seconds(copy)
    flops = _layer_flops(device, dtype, bandwidth, finish)
    small, large = gather(64), gather(1 << 20)
    others = group.size - 1
    link = others * (4 << 20) / max(large - small, 1e-9) if others else bandwidth
    drives = {"disk_bandwidth": _disk_bandwidth(tier_directories) * group.size} if tier_directories else {}
    available = float(Surroundings(build={}).available_memory())
    memory = torch.cuda.mem_get_info()[0] if device.type == "cuda" else available / group.size
    return Machine(
        name="this machine",
        num_nodes=1,
        devices_per_node=group.size,
        reserved=0.0,
        efficiency=1.0,
        source="measured",
        shares_memory=group.comm.backend == "shm",
        memory=float(memory),
        flops=flops,
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        link_latency=small / max(others, 1),
        network_bandwidth=link,
        pcie_bandwidth=bandwidth,
        host_memory=available,
        host_bandwidth=bandwidth * group.size,
        **drives,
    )


def _disk_bandwidth(directories: Sequence[str]) -> float:
    """Bytes per second of this rank, of all drives together."""
    queue = make_queue()
    rates = [measure_both(queue, directory, _WRITTEN) for directory in directories]
    return sum(rate / number for rate, number in zip(rates, num_on_drives(directories), strict=True))


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _layer_flops(
    device: torch.device, dtype: torch.dtype | None, bandwidth: float, finish: Callable[[], None]
) -> float:
    """Operations per second of a transformer layer, without the time of moving its activations."""
    is_cuda = device.type == "cuda"
    dim, heads, seq, batch = (4096, 32, 1024, 4) if is_cuda else (512, 8, 256, 2)
    dtype = dtype or (torch.bfloat16 if is_cuda else torch.float32)
    layer = torch.nn.TransformerEncoderLayer(
        dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).to(device, dtype)
    hidden = torch.randn(batch, seq, dim, device=device, dtype=dtype, requires_grad=True)

    def train() -> None:
        layer.zero_grad()
        layer(hidden).sum().backward()
        finish()

    (block,) = gpt2(1, dim, heads, seq_len=seq, dtype=dtype).blocks
    moving = 5 * block.activation_bytes * batch / bandwidth
    seconds = _median_seconds(train)
    return 3 * block.flops * batch / max(seconds - moving, seconds / 4)


if __name__ == "__main__":
    init_distributed(timeout=60)
    _, name, *directories = sys.argv
    print(json.dumps(asdict(measure_ranks(getattr(torch, name) if name else None, directories))))
