"""Long runs of a toy model, repeated, that check for leaks and drift.

Each run starts from `init_distributed`, trains from one seed, and ends with all communicators closed. During a run
memory, open files and threads are watched; after it the weights are hashed on every rank. Expected: the numbers of
open files and threads stay constant, from step to step and from run to run; all ranks and all runs are bit-identical.
Memory that grows by more than a percent after the warm-up, in a run or from run to run, is reported as an error too.

With ``--schedules N`` it trains a few steps N times instead, each time with other random pauses in front of every
exchange, background update and buffer given back, with buffers that hold NaN until they are written, and at
another ZeRO level in turn. A result that depends on the timing differs in its bits from the same steps run
one after the other.

With ``--kill SECONDS`` a rank is killed, stopped or made to raise an exception at that interval, and a new process
takes its place. Expected: the bits of an undisturbed run, and no file, thread or process that is left.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .._base.build import load_extension
from .._engine.policy import BlockPolicy, Recompute
from .._model.block_build import default_policy
from .._ranks import context
from .._tools.table import print_table
from .._tools.terminal import output_file
from ..global_var import rank, world_size
from ..init import init_distributed
from ..optim import AdamOffloadOptimizer, AdamOptimizer
from ..store import allgather_objects
from ._launch import launch
from ._toy import BATCH, SEQ, VOCAB, hash_of, hash_of_training, toy

__all__ = [
    "BATCH",
    "SEQ",
    "Finding",
    "add_arguments",
    "broken_promises",
    "odd_schedules",
    "run",
    "toy",
    "train_once",
]

_RECOMPUTE = (Recompute.OFF, Recompute.WHOLE)
_SAMPLES = 20  # looks at memory, files and threads in a run
_GROWTH = 0.01  # of memory, from the first fifth of a run to its last


@dataclass(frozen=True)
class Finding:
    """The measurements of one run on one rank.

    Attributes:
        weights: hash of all parameters in full.
        loss: the last one, as a hexadecimal number.
        memory: resident bytes, at equal distances through the run.
        files: open files, likewise.
        threads: likewise.
    """

    weights: str
    loss: str
    memory: list[int]
    files: list[int]
    threads: list[int]

    @property
    def growth(self) -> float:
        """The growth of memory from the second fifth to the last, as a share."""
        return _growth(self.memory)


def _growth(memory: list[int]) -> float:
    fifth = len(memory) // 5
    first, last = memory[fifth : 2 * fifth], memory[-fifth:]
    return statistics.median(last) / statistics.median(first) - 1 if fifth else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``soak``."""
    parser.add_argument("--ranks", type=int, default=2, help="ranks, all on this host")
    parser.add_argument("--steps", type=int, default=5000, help="steps per run")
    parser.add_argument("--runs", type=int, default=2, help="runs, one after the other in the same processes")
    parser.add_argument(
        "--schedules", type=int, default=0, help="random schedules to compare with the serial result instead"
    )
    parser.add_argument(
        "--kill", type=float, default=0.0, metavar="SECONDS", help="lose and replace ranks instead"
    )
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks; in a rank, trains, and on rank 0 prints the findings. Returns the exit status."""
    if arguments.kill:
        from . import _faults

        return _faults.train(arguments.steps) if "RANK" in os.environ else _faults.run_with_faults(arguments)
    if "RANK" not in os.environ:
        poison = {"BMTRAIN_POISON_BUFFERS": "1"} if arguments.schedules else {}
        if arguments.schedules and not hasattr(load_extension(), "set_random_delays"):
            raise SystemExit(
                "--schedules: expected a core with csrc/testing, got one without; use a checkout set up by "
                "bash tests/run.sh, or install with BMTRAIN_TESTING=1 pip install --no-build-isolation ."
            )
        launch(arguments.ranks, poison)
        return 0
    if arguments.schedules:
        init_distributed(seed=1)
        odd = odd_schedules(arguments.schedules)
        if rank() == 0:
            print(f"{arguments.schedules} random schedules, {len(odd)} of them with other bits: {odd[:10]}")
        return 1 if odd else 0
    runs: list[list[Finding]] = []
    for _ in range(arguments.runs):
        init_distributed(seed=1)
        own = train_once(arguments.steps)
        runs.append([Finding(**other) for other in allgather_objects(asdict(own))])
        is_first = rank() == 0
        context.uninstall()
    broken = broken_promises(runs)
    if is_first:
        _report(arguments, runs, broken)
    return 1 if broken else 0


def train_once(steps: int) -> Finding:
    """Trains the toy for ``steps`` steps on every rank. Collective."""
    model, manager = toy(AdamOptimizer)
    generator = torch.Generator().manual_seed(rank())
    samples: list[tuple[int, int, int]] = []
    loss = torch.zeros(())
    for step in range(steps):
        ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        loss = model(ids)
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
        if (step + 1) % max(1, steps // _SAMPLES) == 0:
            samples.append(_resources())
    memory, files, threads = (list(column) for column in zip(*samples, strict=True))
    return Finding(hash_of(model.state_dict()), _mean_of(loss), memory, files, threads)


def odd_schedules(count: int, steps: int = 3, most_microseconds: int = 300) -> list[int]:
    """Compares random schedules with the steps one after the other. Collective.

    Args:
        count: of schedules.
        steps: of each.
        most_microseconds: the longest of its pauses.

    Returns:
        The schedules whose weights or optimizer state have other bits on any rank, the same list on all.
    """
    from .._C import disturb_updates, set_random_delays  # only in builds for tests

    serial = _short_run(steps, BlockPolicy(), overlap=False)
    odd = []
    try:
        for number in range(count):
            set_random_delays(number * world_size() + rank(), most_microseconds)
            disturb_updates(most_microseconds)
            policy = BlockPolicy(level=1 + number % 3, recompute=_RECOMPUTE[number // 3 % 2])
            if _short_run(steps, policy, overlap=True) != serial:
                odd.append(number)
    finally:
        set_random_delays(0, 0)
        disturb_updates(0)
    return sorted(set().union(*allgather_objects(odd)))


def _short_run(steps: int, policy: BlockPolicy, *, overlap: bool) -> str:
    """A hash of the weights and the optimizer's state."""
    with default_policy(policy):
        model, manager = toy(
            lambda parameters, lr: AdamOffloadOptimizer(parameters, lr=lr, overlap=overlap, fraction=0)
        )
    generator = torch.Generator().manual_seed(rank())
    for _ in range(steps):
        manager.zero_grad()
        manager.backward(model(torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)))
        manager.step()
    return hash_of_training(model, manager)


def _mean_of(loss: torch.Tensor) -> str:
    """The mean of the ranks' losses, as a hexadecimal number."""
    from ..distributed import all_reduce

    return float(all_reduce(loss.detach(), "avg")).hex()


def broken_promises(runs: list[list[Finding]]) -> list[str]:
    """Lists the errors of the runs.

    Args:
        runs: of each run the findings of all ranks.

    Example:
        >>> good, odd = Finding("a", "0x1", [9], [5], [2]), Finding("b", "0x1", [9], [6], [2])
        >>> broken_promises([[good, good], [good, odd]])[0]
        'run 1: rank 1 has other weights than rank 0 in run 0'
    """
    broken = []
    first = runs[0][0]
    for number, findings in enumerate(runs):
        for index, found in enumerate(findings):
            where = f"run {number}: rank {index}"
            for what in ("weights", "loss"):
                if getattr(found, what) != getattr(first, what):
                    broken.append(f"{where} has other {what} than rank 0 in run 0")
            for what in ("files", "threads"):
                counts = [*getattr(runs[0][index], what)[:1], *getattr(found, what)]
                if len(set(counts)) > 1:
                    broken.append(f"{where}: {what} went from {counts[0]} to {counts[-1]}")
            if found.growth > _GROWTH:
                broken.append(f"{where}: memory grew by {found.growth:.1%}")
    for index, ends in enumerate(zip(*runs, strict=True)):
        growth = _growth([found.memory[-1] for found in ends])
        if growth > _GROWTH:
            broken.append(f"rank {index}: memory grew by {growth:.1%} from run to run")
    return broken


def _resources() -> tuple[int, int, int]:
    """Resident bytes, open files and threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    size = pages * os.sysconf("SC_PAGE_SIZE")
    return size, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _report(arguments: argparse.Namespace, runs: list[list[Finding]], broken: list[str]) -> None:
    print(f"{arguments.steps} steps per run")
    rows = [
        [
            f"run {number}, rank {index}",
            found.weights[:16],
            f"{float.fromhex(found.loss):.6f}",
            f"{found.memory[-1] / 2**20:.0f}",
            f"{found.growth:+.2%}",
            str(found.files[-1]),
            str(found.threads[-1]),
        ]
        for number, findings in enumerate(runs)
        for index, found in enumerate(findings)
    ]
    print_table(["", "weights", "loss", "MiB", "growth", "files", "threads"], rows)
    print("\n".join(broken) if broken else "no leaks, all runs bit-identical")
    if arguments.json:
        lines = [[asdict(found) for found in findings] for findings in runs]
        arguments.json.write_text(json.dumps({"runs": lines, "broken": broken}, indent=1) + "\n")
