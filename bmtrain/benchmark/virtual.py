"""Cost of virtual shards: the same batch in one piece, in accumulated micro-batches, and in virtual shards.

The same GPT is trained three times by the same ranks, on the same rows. In one piece, each rank computes its part of
the batch at once; with micro-batches, one virtual shard's rows at a time, whose gradients add up on the rank and are
sent once (``OptimManager(accumulate=...)``); with virtual shards, each micro-step sends its gradients, and they are
summed along the tree. All variants clip gradients, and take turns.

With ``--survive`` steps over virtual shards are compared with and without ``init_distributed(survive=1)``. Two jobs
take turns of ``--repeat`` steps (several, as the last one's copies are updated in the other's turn); one waits.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._tools.gpt import GPT
from .._tools.table import print_table
from .._tools.terminal import output_file
from ..global_var import rank, world_size
from ..init import init_distributed
from ..optim import AdamOptimizer, OptimManager
from ..synchronize import synchronize
from ..virtual import VirtualShard, virtual_shards
from ..wrapper import BMTrainModelWrapper
from ._launch import answer, launch
from ._training import in_turn, timed

__all__ = ["add_arguments", "run"]

_SURVIVE = "BMTRAIN_BENCH_SURVIVE"  # survive= of the ranks
_TURNS = "BMTRAIN_BENCH_TURNS"  # the folder of `_turn`
_TURN_SECONDS = 600  # longest wait for the other job
_Step = Callable[[int, Tensor], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench virtual``."""
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--shards", type=int, default=8, help="virtual shards")
    parser.add_argument("--layers", type=int, default=4, help="layers")
    parser.add_argument("--dim", type=int, default=256, help="width")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a shard")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--repeat", type=int, default=7, help="steps of each variant")
    parser.add_argument(
        "--survive", type=int, metavar="PAIRS", help="pairs of turns, with survive=1 and without"
    )
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")


def run(arguments: argparse.Namespace) -> None:
    """Starts the ranks; in a rank, measures, and on rank 0 prints the table."""
    if "RANK" not in os.environ:
        if arguments.survive:
            _compare_survival(arguments)
        else:
            launch(arguments.ranks)
        return
    init_distributed(seed=0, virtual_shards=arguments.shards, survive=int(os.environ.get(_SURVIVE, 0)))
    if arguments.survive:
        _measure_turns(arguments)
        return
    parts = {"in one piece": 1, "micro-batches": arguments.shards // world_size()}
    variants = {name: _pieces(arguments, number) for name, number in parts.items()}
    variants["virtual shards"] = _virtual(arguments)
    seconds = in_turn(variants, lambda variant, step: _time(variant, step, arguments), arguments.repeat)
    if rank() == 0:
        _report(arguments, seconds)
    synchronize()


def _compare_survival(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        ends = []
        for job in "01":
            for number in range(arguments.ranks):
                os.mkfifo(Path(folder, f"{job}-{number}"))
                ends.append(os.open(Path(folder, f"{job}-{number}"), os.O_RDWR))
                os.write(ends[-1], b"." if job == "0" else b"")
        jobs = [pool.submit(launch, arguments.ranks, {_TURNS: folder, _SURVIVE: job}) for job in "01"]
        without, survive = (job.result() for job in jobs)
        for end in ends:
            os.close(end)
    pairs = list(zip(without, survive, strict=True))
    figures = {
        "without, ms": [1e3 * seconds for seconds in without],
        "survive=1, ms": [1e3 * seconds for seconds in survive],
        "ratio of a pair": [b / a for a, b in pairs],
    }
    rows = [
        [name, *(f"{pick(values):.4g}" for pick in (statistics.median, min, max))]
        for name, values in figures.items()
    ]
    print_table(["step", "median", "least", "most"], rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"pairs": pairs}, indent=2))


def _measure_turns(arguments: argparse.Namespace) -> None:
    """Measures turns of steps in turn with the other job; the first turn allocates."""
    variant = _virtual(arguments)
    medians = []
    for turn in range(arguments.survive + 1):
        with _turn():
            steps = range(turn * arguments.repeat, (turn + 1) * arguments.repeat)
            medians.append(statistics.median([_time(variant, step, arguments) for step in steps]))
    if rank() == 0:
        answer(medians[1:])


@contextmanager
def _turn() -> Iterator[None]:
    """Waits for the turn of this job, and hands it over to the rank of the same number in the other."""
    job, folder = os.environ[_SURVIVE], os.environ[_TURNS]
    mine, other = (os.open(Path(folder, f"{one}-{rank()}"), os.O_RDWR) for one in (job, str(1 - int(job))))
    try:
        if not select.select([mine], [], [], _TURN_SECONDS)[0]:
            raise TimeoutError(f"bench virtual: the other job took more than {_TURN_SECONDS} s")
        os.read(mine, 1)
        yield
        os.write(other, b".")
    finally:
        os.close(mine)
        os.close(other)


def _time(variant: _Step, step: int, arguments: argparse.Namespace) -> float:
    generator = torch.Generator().manual_seed(step)
    rows = arguments.shards * arguments.rows
    batch = torch.randint(0, 256, (rows, arguments.seq + 1), generator=generator)
    return timed(lambda: variant(step, batch))


def _trainer(arguments: argparse.Namespace, accumulate: int) -> tuple[nn.Module, Any, OptimManager]:
    torch.manual_seed(0)
    gpt = GPT(arguments.layers, arguments.dim, num_heads=8, vocab=256, seq=arguments.seq)
    model: Any = BMTrainModelWrapper(gpt)
    optimizer = AdamOptimizer(model.parameters(), lr=1e-4)
    manager = OptimManager(accumulate=accumulate)
    manager.add_optimizer(optimizer)
    return model, optimizer, manager


def _pieces(arguments: argparse.Namespace, number: int) -> _Step:
    """A rank's part of the batch in ``number`` pieces."""
    model, optimizer, manager = _trainer(arguments, number)

    def step(_: int, batch: Tensor) -> None:
        manager.zero_grad()
        for piece in VirtualShard(rank(), world_size()).of(batch).chunk(number):
            manager.backward(model(piece))
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()

    return step


def _virtual(arguments: argparse.Namespace) -> _Step:
    model, optimizer, manager = _trainer(arguments, 1)

    def step(number: int, batch: Tensor) -> None:
        manager.zero_grad()
        for shard in virtual_shards(number):
            manager.backward(model(shard.of(batch)))
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()

    return step


def _report(arguments: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    print(
        f"{arguments.layers} layers of width {arguments.dim}, {world_size()} ranks of one thread, {os.cpu_count()} "
        f"processors, {arguments.shards} virtual shards of {arguments.rows} x {arguments.seq} tokens"
    )
    base = statistics.median(seconds["in one piece"])
    print(f"  {'':14} {'ms/step':>9} {'fastest':>9} {'of one piece':>13}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"  {name:14} {median * 1e3:9.1f} {min(values) * 1e3:9.1f} {median / base:13.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seconds": seconds}, indent=2))
