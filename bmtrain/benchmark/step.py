"""Time of a training step, sharded and not: without communication, DDP, FSDP2 in its settings, and bmtrain.

All variants live in the same ranks and run in turn, so that a busy machine disturbs them alike. The table shows
medians and their ratio to the step without communication that does the same work: the same ranks, each training a whole
model alone, with the same recomputation and precision. The additional time of a step is exposed communication
and the management of the shards. The silent variants are ours with communicators that move
nothing, their shards and buffers as usual: the additional time of a step over them is communication alone. The
processor time of rank 0 distinguishes waiting from computing.

With --memory each variant runs in processes of its own instead, set to return freed memory, with the same modules
imported, and the peaks of all ranks are shown. The variants bmtrain-3-torch... do the same work as the variants of
FSDP2, with the same optimizer, and are compared with them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .._tools.gpt import GPT
from .._tools.pictures import bars, new_figure
from .._tools.table import print_table
from .._tools.terminal import output_file
from ..global_var import rank, world_size
from ..init import init_distributed
from ..synchronize import synchronize
from ._launch import GIVE_BACK, answer, launch_each
from ._memory import peak_bytes, shared_bytes
from ._options import add_names, add_run
from ._training import reset_traffic, traffic
from ._variants import VARIANTS, Step, import_all_modules, peer_of, reference_of

__all__ = ["VARIANTS", "Result", "add_arguments", "run"]

_WARM_UP = 2


@dataclass(frozen=True)
class Result:
    """The measurements of one variant.

    Attributes:
        variant: a key of `VARIANTS`.
        seconds: of each step.
        cpu_seconds: processor time of rank 0 for each step, all threads; the rest of `seconds` is waiting.
        losses: rank 0's, warm-up included.
        messages: collectives of a step on rank 0; None for variants whose communication is not ours.
        wire_bytes: bytes that rank 0 sent in a step; likewise.
        peak_mib: highest resident memory of each rank with --memory, else empty. For the memory through which ranks
            exchange data each counts its share, so that the sum over the ranks counts it once.
        shared_mib: the resident part of that memory in each rank; used pages stay resident.
    """

    variant: str
    seconds: list[float]
    cpu_seconds: list[float]
    losses: list[float]
    messages: float | None
    wire_bytes: float | None
    peak_mib: list[float]
    shared_mib: list[float]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench step``."""
    add_run(parser)
    parser.add_argument("--repeat", type=int, default=7, help="steps of each variant")
    add_names(parser, "--variants", VARIANTS)
    parser.add_argument(
        "--memory", action="store_true", help="measure peak memory, each variant in processes of its own"
    )
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")
    parser.add_argument("--plot", type=output_file, help="draw them into this file (needs matplotlib)")


def run(arguments: argparse.Namespace) -> None:
    """Starts the ranks and shows their measurements; in a rank, measures."""
    names = arguments.variants
    if "RANK" in os.environ:
        _run_rank(arguments, names)
        return
    groups = [[name] for name in names] if arguments.memory else [names]
    jobs = [(arguments.ranks, ["--variants", ",".join(group)]) for group in groups]
    results = [
        Result(**row) for rows in launch_each(jobs, GIVE_BACK if arguments.memory else {}) for row in rows
    ]
    _print_table(results, arguments)
    if arguments.json is not None:
        settings = {
            key: value for key, value in vars(arguments).items() if isinstance(value, (int, str, list))
        }
        rows = [asdict(result) for result in results]
        arguments.json.write_text(json.dumps({"settings": settings, "results": rows}, indent=1))
    if arguments.plot is not None:
        _plot(results, arguments.plot)


def _run_rank(arguments: argparse.Namespace, names: list[str]) -> None:
    init_distributed(seed=0)
    if arguments.memory:
        import_all_modules()
    dist.init_process_group("gloo")  # the peers'; bmtrain does not use it
    model_options = {"num_layers": arguments.layers, "dim": arguments.dim, "num_heads": 8, "vocab": 256}
    steps = {name: VARIANTS[name](lambda: GPT(**model_options, seq=arguments.seq)) for name in names}
    random = torch.Generator().manual_seed(0)  # the same on all ranks: so all variants have the same losses
    shape = (arguments.batch, arguments.seq + 1)
    batches = [torch.randint(0, 256, shape, generator=random) for _ in range(arguments.repeat + _WARM_UP)]
    results = _measure(steps, batches, arguments.memory)
    if rank() == 0:
        answer([asdict(result) for result in results])
    synchronize()
    dist.destroy_process_group()


def _measure(steps: dict[str, Step], batches: list[Tensor], memory: bool) -> list[Result]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    used: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, tuple[int, int]] = {}
    for batch in batches:
        for name, step in steps.items():
            synchronize()
            reset_traffic()
            start, cpu_start = time.perf_counter(), time.process_time()
            losses[name].append(step(batch))
            sent[name] = traffic()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
            used[name].append(time.process_time() - cpu_start)
    peaks = _of_all_ranks(peak_bytes() / 2**20) if memory else []
    shared = _of_all_ranks(shared_bytes().resident / 2**20) if memory else []
    return [
        Result(
            variant=name,
            seconds=seconds[name][_WARM_UP:],
            cpu_seconds=used[name][_WARM_UP:],
            losses=losses[name],
            messages=sent[name][0] if name.startswith("bmtrain") else None,
            wire_bytes=sent[name][1] if name.startswith("bmtrain") else None,
            peak_mib=peaks,
            shared_mib=shared,
        )
        for name in steps
    ]


def _of_all_ranks(value: float) -> list[float]:
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return [float(one) for one in values]


_TITLES = (
    "variant", "ms/step", "tokens/s", "speed", "exposed ms", "cpu ms", "messages", "MB sent", "last loss", "peak MiB",
    "shared",
)  # fmt: skip


def _print_table(results: list[Result], arguments: argparse.Namespace) -> None:
    medians = {result.variant: result.median for result in results}
    first = results[0].median
    tokens = arguments.batch * arguments.seq * arguments.ranks
    print(
        f"\n{arguments.ranks} ranks, {arguments.layers} layers of {arguments.dim}, {tokens} tokens per step"
    )
    rows = []
    for result in results:
        base = medians.get(reference_of(result.variant), first)
        rows.append(
            [
                result.variant,
                f"{result.median * 1e3:.0f}",
                f"{tokens / result.median:.0f}",
                f"{base / result.median:.2f}",
                f"{(result.median - base) * 1e3:.0f}",
                f"{statistics.median(result.cpu_seconds) * 1e3:.0f}",
                _number(result.messages, 1),
                _number(result.wire_bytes, 1e6),
                f"{result.losses[-1]:.6f}",
                _number(max(result.peak_mib, default=None), 1),
                _number(max(result.shared_mib, default=None), 1),
            ]
        )
    print_table(_TITLES, rows)
    _print_against_best(results)
    _print_exposed(results)
    _print_peaks(results)


def _number(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.0f}"


def _print_against_best(results: list[Result]) -> None:
    """Each bmtrain variant against the fastest FSDP2 setting that does the same work."""
    for ours in (result for result in results if result.variant.startswith("bmtrain")):
        kind = reference_of(ours.variant)
        peers = [
            result
            for result in results
            if result.variant.startswith("fsdp2") and reference_of(result.variant) == kind
        ]
        if peers:
            best = min(peers, key=lambda peer: peer.median)
            print(f"{ours.variant}: {best.median / ours.median:.2f} x {best.variant}, its best setting")


def _print_exposed(results: list[Result]) -> None:
    """Each of ours against itself without communication: the median over turns of the additional time of a step."""
    silent = {
        result.variant.replace("silent", "bmtrain"): result
        for result in results
        if result.variant.startswith("silent")
    }
    for ours in results:
        if ours.variant in silent:
            pairs = zip(ours.seconds, silent[ours.variant].seconds, strict=True)
            share = statistics.median(1 - without / took for took, without in pairs)
            print(f"{ours.variant}: {share:.1%} of a step is communication that is not hidden")


def _print_peaks(results: list[Result]) -> None:
    """Peak memory of each of ours beside FSDP2 with the same optimizer."""
    peaks = {result.variant: max(result.peak_mib) for result in results if result.peak_mib}
    for name, peak in peaks.items():
        peer = peer_of(name)
        if peer in peaks:
            print(f"{name}: peak {peak:.0f} MiB, {peak - peaks[peer]:+.0f} beside {peer}")


def _plot(results: list[Result], file: Path) -> None:
    names = [result.variant for result in results]
    values = [("ms per step", [result.median * 1e3 for result in results])]
    if results[0].peak_mib:
        values.append(("peak MiB", [max(result.peak_mib) for result in results]))
    figure = new_figure(6 * len(values), 1 + 0.3 * len(names))
    for axis, (title, shown) in zip(figure.subplots(1, len(values), squeeze=False)[0], values, strict=True):
        bars(axis, names, shown, [name.startswith("bmtrain") for name in names], title)
    figure.savefig(file, dpi=110)
