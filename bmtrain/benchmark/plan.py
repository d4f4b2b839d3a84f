"""Error of the planner and the timeline against this machine's runs: step time, exposed communication, memory.

Each policy trains the same GPT twice in the same ranks: once as it is, and once with communicators that move nothing,
which measures a step without communication. All of them run in turn, so that a busy machine disturbs them
alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import timeline
from .._tools.gpt import GPT
from .._tools.table import print_table
from .._tools.terminal import output_file
from ..global_var import rank
from ..init import init_distributed
from ..optim import AdamOffloadOptimizer, AdamOptimizer, MuonOffloadOptimizer, MuonOptimizer
from ..plan import Machine, TrainingPolicy, describe_module, estimate
from ..plan.calibrate import measure_ranks
from ..plan.policy import DISK
from ..synchronize import synchronize
from ._launch import GIVE_BACK, answer, launch, launch_each
from ._memory import forget_peak, peak_bytes, resident_bytes
from ._options import add_run
from ._training import sharded, silence

__all__ = ["add_arguments", "run"]

_WARM_UP = 3  # steps in which the order of blocks is learnt
_POLICIES: dict[str, dict[str, Any]] = {  # as TrainingPolicy takes them
    "level-2": {"level": 2, "recompute": False},
    "level-3": {"level": 3, "recompute": False},
    "level-3-recompute": {"level": 3, "recompute": True},
    "level-0": {"level": 0, "recompute": False},
    "level-1": {"level": 1, "recompute": False},
    "hybrid": {"level": 3, "recompute": False, "zero_size": 2},
    "selective": {"level": 3, "recompute": "selective"},
    "bf16": {"level": 3, "recompute": False, "compute_dtype": torch.bfloat16},
    "bf16-state": {"state_dtype": torch.bfloat16},
    "int8-state": {"state_dtype": torch.int8},
    "offload": {"offload": 1.0},
    "muon": {"optimizer": "muon"},
    "muon-offload": {"optimizer": "muon", "offload": 1.0},
    "disk": {"disk": DISK},
    "disk-optimizer": {"disk": ("optimizer",)},
}
#: (TrainingPolicy.optimizer, .offload) -> the optimizer.
OPTIMIZERS: dict[tuple[str, float], Any] = {
    ("adam", 0.0): AdamOptimizer,
    ("adam", 1.0): AdamOffloadOptimizer,
    ("muon", 0.0): MuonOptimizer,
    ("muon", 1.0): MuonOffloadOptimizer,
}
_USUAL = tuple(_POLICIES)[:3]


class _Row(NamedTuple):
    """The measurements of one policy; seconds, and shares of the step."""

    policy: str
    seconds: float
    predicted_seconds: float
    spread: float
    exposed_by_absence: float
    exposed_by_timeline: float
    predicted_exposed: float
    recording_cost: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench plan``."""
    add_run(parser)
    parser.add_argument("--repeat", type=int, default=7, help="steps of each kind")
    parser.add_argument("--memory", action="store_true", help="compare peak memory instead")
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=tuple(_POLICIES),
        metavar="NAME",
        default=_USUAL,
        help="which ones, of %(choices)s; hybrid shares blocks among 2 ranks, disk uses the drive of "
        "this folder (default: the first three)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Starts the ranks; in a rank, measures, and on rank 0 returns the results."""
    if "RANK" in os.environ:
        drives = ["."] if any("disk" in _POLICIES[name] for name in arguments.policies) else None
        init_distributed(seed=0, tier_directories=drives)
        found = _measure_memory(arguments) if arguments.memory else _measure_time(arguments)
        if rank() == 0:
            answer(found)
    elif arguments.memory:
        jobs = [(arguments.ranks, ["--policies", name]) for name in arguments.policies]
        found, width = [], max(map(len, arguments.policies))
        print(f"{'policy':{width}}   run MiB  plan MiB   error")
        for name, row in zip(arguments.policies, launch_each(jobs, GIVE_BACK), strict=True):
            found.append(row)
            run, plan = (row[kind] / 2**20 for kind in ("measured", "predicted"))
            print(f"{name:{width}}  {run:8.1f}  {plan:8.1f}  {plan / run - 1:+6.1%}", flush=True)
        _write(arguments.json, found)
    else:
        found = launch(arguments.ranks)
        _print_times([_Row(**row) for row in found])
        _write(arguments.json, found)


def _write(path: Path | None, found: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")


# ---- in a rank


class _Training:
    """A GPT that trains under one policy."""

    def __init__(self, arguments: argparse.Namespace, policy: str) -> None:
        torch.manual_seed(0)
        chosen = _chosen(arguments, policy)
        gpt = GPT(arguments.layers, arguments.dim, 8, 256, arguments.seq)
        self.model = sharded(gpt, chosen.block_policy())
        optimizer = OPTIMIZERS[chosen.optimizer, chosen.offload]
        options: dict[str, Any] = {}
        if (
            chosen.optimizer == "muon"
        ):  # products in bf16 are slow on many CPUs, and memory does not depend on their number
            options = {"splits": {"*.qkv": 1}, "ns_steps": 1 if arguments.memory else 5}
        self.optimizer = optimizer(self.model.named_parameters(), state_dtype=chosen.state_dtype, **options)
        self.batch = torch.randint(0, 256, (arguments.batch, arguments.seq + 1))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).backward()
        self.optimizer.step()

    def timed(self) -> float:
        synchronize()
        begin = time.perf_counter()
        self.step()
        return time.perf_counter() - begin

    def recorded(self) -> tuple[float, float]:
        """Seconds of a step, and the share of it in which this rank waits for communication."""
        with timeline.record() as recording:
            seconds = self.timed()
        return seconds, recording.summary().exposed_communication


def _measure_time(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    # Communicators that move nothing do not slow down memory by their leftovers.
    torch.set_flush_denormal(True)
    pairs = []
    machines = []
    for policy in arguments.policies:
        machines.append(_measured_machine(arguments, policy))
        real = _Training(arguments, policy)
        with silence():
            pairs.append((real, _Training(arguments, policy)))
    kinds = ("plain", "again", "silent", "recorded")
    seconds: list[dict[str, list[float]]] = [{kind: [] for kind in kinds} for _ in pairs]
    exposed: list[list[float]] = [[] for _ in pairs]
    for number in range(_WARM_UP + arguments.repeat):
        for index, (real, silent) in enumerate(pairs):
            took, share = real.recorded()
            for kind, value in zip(kinds, (real.timed(), real.timed(), silent.timed(), took), strict=True):
                seconds[index][kind] += [value] if number >= _WARM_UP else []
            exposed[index] += [share] if number >= _WARM_UP else []
    return [
        _row(arguments, machines[index], policy, pairs[index][0], seconds[index], exposed[index])._asdict()
        for index, policy in enumerate(arguments.policies)
    ]


def _row(
    arguments: argparse.Namespace,
    machine: Machine,
    policy: str,
    training: _Training,
    seconds: dict[str, list[float]],
    exposed: list[float],
) -> _Row:
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    plan = _planned(arguments, machine, policy, training)
    return _Row(
        policy=policy,
        seconds=medians["plain"],
        predicted_seconds=plan.time.step,
        spread=abs(_ratio(seconds, "again") - 1),
        exposed_by_absence=1 - _ratio(seconds, "silent"),
        exposed_by_timeline=statistics.median(exposed),
        predicted_exposed=plan.time.exposed_wire / plan.time.step,
        recording_cost=_ratio(seconds, "recorded") - 1,
    )


def _ratio(seconds: dict[str, list[float]], kind: str) -> float:
    """The ratio of steps to plain ones: the median over turns, robust against a machine that slows down."""
    return statistics.median(
        took / plain for took, plain in zip(seconds[kind], seconds["plain"], strict=True)
    )


def _measured_machine(arguments: argparse.Namespace, policy: str) -> Machine:
    return measure_ranks(_chosen(arguments, policy).compute_dtype)


def _planned(arguments: argparse.Namespace, machine: Machine, policy: str, training: _Training) -> Any:
    described = describe_module(training.model, training.batch)
    return estimate(described, machine, _chosen(arguments, policy), ring_gather=False)


def _chosen(arguments: argparse.Namespace, policy: str) -> TrainingPolicy:
    return TrainingPolicy(micro_batch=arguments.batch, **_POLICIES[policy])


def _measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    (policy,) = arguments.policies
    small = argparse.Namespace(**{**vars(arguments), "layers": 1, "dim": 16})
    _Training(small, policy).step()  # code that is loaded when it is first used is no memory of the model
    before = resident_bytes()
    training = _Training(arguments, policy)
    training.step()
    forget_peak()
    for _ in range(3):
        training.step()
    measured = peak_bytes() - before
    planned = _planned(arguments, _measured_machine(arguments, policy), policy, training)
    return {
        "policy": policy,
        "measured": measured,
        "predicted": planned.memory.total + planned.memory.host / planned.machine.devices_per_node,
        "parts": dataclasses.asdict(planned.memory),
    }


# ---- tables


def _print_times(rows: Sequence[_Row]) -> None:
    print("ms per step; share of the step that a rank waits for communication, measured in three ways")
    titles = ["policy", "run", "plan", "error", "absent", "timeline", "planned", "recording"]
    cells = [
        [
            row.policy,
            f"{row.seconds * 1e3:.0f}",
            f"{row.predicted_seconds * 1e3:.0f}",
            f"{row.predicted_seconds / row.seconds - 1:+.1%}",
            f"{row.exposed_by_absence:.1%}",
            f"{row.exposed_by_timeline:.1%}",
            f"{row.predicted_exposed:.1%}",
            f"{row.recording_cost:+.1%}",
        ]
        for row in rows
    ]
    print_table(titles, cells)
    print(f"two identical runs differ by up to {max(row.spread for row in rows):.1%}")
