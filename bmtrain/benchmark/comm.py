"""Time of collectives between CPU ranks of this machine: bmtrain's shared memory and Gloo, and torch.distributed.

All variants live in the same ranks and run in turn, so that a busy machine disturbs them alike. A time is measured on
the slowest rank, from a barrier to the result; the table shows medians. The processor time beside it (mean of the
ranks) is the computing time that an overlapped exchange costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._C import Communicator, ReduceOp
from .._ranks import comm as _comm
from .._ranks import shm_meeting
from .._tools.pictures import BLUE, GREY, ORANGE, label_sizes, new_figure, plain
from .._tools.terminal import output_file
from ._launch import answer, launch_each
from ._options import add_names, numbers

__all__ = ["PRIMITIVES", "Result", "add_arguments", "run"]

PRIMITIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send_recv")
_TIMEOUT = 120.0
_Call = Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        primitive: one of `PRIMITIVES`.
        variant: ``"shm"``, ``"gloo"`` (ours over it) or ``"torch"`` (its own collective over Gloo).
        ranks: number of ranks.
        bytes: of the larger tensor.
        seconds: of every repetition, each the slowest rank's.
        cpu_seconds: processor time of a rank for one repetition, all its threads, mean of the ranks.
    """

    primitive: str
    variant: str
    ranks: int
    bytes: int
    seconds: list[float]
    cpu_seconds: float

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench comm``."""
    parser.add_argument("--ranks", type=numbers, default="2,4", help="numbers of ranks")
    parser.add_argument("--sizes", type=numbers, default="4,64,1024,32768", help="KiB of the larger tensor")
    add_names(parser, "--primitives", PRIMITIVES)
    parser.add_argument("--repeat", type=int, default=15, help="of each variant")
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")
    parser.add_argument("--plot", type=output_file, help="draw them into this file (needs matplotlib)")


def run(arguments: argparse.Namespace) -> None:
    """Starts the ranks, once for each number of them; in a rank, measures, and on rank 0 prints the table."""
    if "RANK" in os.environ:
        _run_rank(arguments, arguments.primitives)
        return
    jobs = launch_each([(ranks, []) for ranks in arguments.ranks])
    results = [Result(**row) for rows in jobs for row in rows]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if arguments.plot is not None:
        _plot(results, arguments.plot)


def _run_rank(arguments: argparse.Namespace, primitives: list[str]) -> None:
    dist.init_process_group("gloo")
    ours = _communicators()
    results = []
    for primitive in primitives:
        for kib in arguments.sizes:
            results += _measure(primitive, kib * 1024, ours, arguments.repeat)
    if dist.get_rank() == 0:
        _print_table(results)
        answer([asdict(result) for result in results])
    dist.barrier()
    for comm in ours.values():
        comm.close()
    dist.destroy_process_group()


def _communicators() -> dict[str, Communicator]:
    """bmtrain's communicators, by name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    gloo = _comm.connect_gloo(dist.PrefixStore("bench/gloo", store), rank, size, _TIMEOUT, "gloo")
    shm, reason = shm_meeting.connect(dist.PrefixStore("bench/shm", store), rank, size, _TIMEOUT, "shm")
    if shm is None:
        if rank == 0:
            print(f"shared memory is left out: {reason}")
        return {"gloo": gloo}
    return {"shm": shm, "gloo": gloo}


def _measure(primitive: str, size: int, ours: dict[str, Communicator], repeat: int) -> list[Result]:
    calls = {name: _our_call(primitive, size, comm) for name, comm in ours.items()}
    calls["torch"] = _torch_call(primitive, size)
    seconds = torch.zeros(len(calls), repeat, dtype=torch.float64)
    cpu = torch.zeros(len(calls), dtype=torch.float64)
    for repetition in range(-2, repeat):
        for index, call in enumerate(calls.values()):
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            call()
            elapsed, cpu_elapsed = time.perf_counter() - started, time.process_time() - cpu_started
            if repetition >= 0:
                seconds[index, repetition] = elapsed
                cpu[index] += cpu_elapsed / repeat
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    world = dist.get_world_size()
    return [
        Result(primitive, name, world, size, times.tolist(), float(used) / world)
        for name, times, used in zip(calls, seconds, cpu, strict=True)
    ]


def _tensors(size: int) -> tuple[Tensor, Tensor]:
    """The larger tensor and one rank's part of it."""
    part = torch.ones(max(size // 4 // dist.get_world_size(), 1))
    return torch.ones(part.numel() * dist.get_world_size()), part


def _our_call(primitive: str, size: int, comm: Communicator) -> _Call:
    whole, part = _tensors(size)
    other = torch.empty_like(whole)
    total = ReduceOp.SUM
    calls: dict[str, _Call] = {
        "all_gather": lambda: comm.all_gather(whole, part).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole, total).wait(),
        "all_to_all": lambda: comm.all_to_all(other, whole).wait(),
        "all_reduce": lambda: comm.all_reduce(whole, total).wait(),
        "broadcast": lambda: comm.broadcast(whole, 0).wait(),
        "send_recv": _neighbours(lambda to: comm.send(whole, to), lambda source: comm.recv(other, source)),
    }
    return calls[primitive]


def _torch_call(primitive: str, size: int) -> _Call:
    whole, part = _tensors(size)
    other = torch.empty_like(whole)
    calls: dict[str, _Call] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send_recv": _neighbours(lambda to: dist.isend(whole, to), lambda source: dist.irecv(other, source)),
    }
    return calls[primitive]


def _neighbours(send: Callable[[int], Any], receive: Callable[[int], Any]) -> _Call:
    """Each rank sends to the next rank and receives from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def call() -> None:
        for work in (receive((rank - 1) % size), send((rank + 1) % size)):
            work.wait()

    return call


def _print_table(results: list[Result]) -> None:
    print(
        f"\n{'primitive':<15}{'ranks':>6}{'KiB':>8}  {'variant':<8}{'ms':>9}{'GB/s':>8}{'cpu ms':>9}{'torch = 1':>11}"
    )
    torchs = {(row.primitive, row.bytes): row.median for row in results if row.variant == "torch"}
    for row in results:
        speed = torchs[row.primitive, row.bytes] / row.median
        print(
            f"{row.primitive:<15}{row.ranks:>6}{row.bytes // 1024:>8}  {row.variant:<8}{row.median * 1e3:>9.3f}"
            f"{row.bytes / row.median / 1e9:>8.2f}{row.cpu_seconds * 1e3:>9.3f}{speed:>11.2f}",
            flush=True,
        )


def _plot(results: list[Result], file: Path) -> None:
    groups = sorted({row.ranks for row in results})
    primitives = [name for name in PRIMITIVES if any(row.primitive == name for row in results)]
    figure = new_figure(3.2 * len(primitives), 0.6 + 2.6 * len(groups))
    axes = figure.subplots(len(groups), len(primitives), squeeze=False)
    for row_axes, ranks in zip(axes, groups, strict=True):
        for axis, primitive in zip(row_axes, primitives, strict=True):
            for variant, color in zip(("shm", "gloo", "torch"), (BLUE, ORANGE, GREY), strict=True):
                points = [
                    (row.bytes, row.bytes / row.median / 1e9)
                    for row in results
                    if (row.primitive, row.variant, row.ranks) == (primitive, variant, ranks)
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", color=color, label=variant)
            axis.set_title(f"{primitive}, {ranks} ranks", fontsize=10)
            axis.set_ylabel("GB/s")
            axis.set_ylim(0)
            plain(axis)
            label_sizes(axis, [row.bytes for row in results])
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(file, dpi=110)
