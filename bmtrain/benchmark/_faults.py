"""``soak --kill``: ranks are killed, stopped, or raise an exception, and new processes take their places.

One rank is lost every so many seconds, but not before all are there again. A stopped rank continues when the others
have gone on without it, and must end. Then as many ranks do the same steps undisturbed, for their bits and their speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from .. import survive
from .._tools.launch_surviving import rank_environments
from .._tools.table import print_table
from .._tools.template import Process, Template
from ..data import batches
from ..global_var import rank, world_size
from ..init import init_distributed
from ..optim import AdamOptimizer
from ..virtual import virtual_shards
from ._toy import BATCH, SEQ, VOCAB, hash_of_training, toy

_FOLDER = "BMTRAIN_SOAK_FOLDER"  # names the folder that the ranks write to
_SHARDS = 8
_TIMEOUT = 15.0  # of operations: a rank that is stopped for so long is lost
_LIMIT_SECONDS = 120.0  # of each wait for a step, a rank, or an end
_AFTER = 50  # steps after the last one at which there may be a fault
_POLL_SECONDS = 0.01
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1}
_STATUSES = {"": 0, "kill": -signal.SIGKILL, "stop": 1, "raise": 1}
_RESOURCES = ("open files", "threads", "memory files")


def train(steps: int) -> int:
    """Trains in a rank that may be lost, for ``steps`` steps and until no rank is missing."""
    folder, size, raised = Path(os.environ[_FOLDER]), 0, []
    signal.signal(signal.SIGUSR1, lambda *_: raised.append(True))
    init_distributed(seed=1, virtual_shards=_SHARDS, survive=1, timeout=_TIMEOUT)
    survive.exceptions()
    model, manager = toy(AdamOptimizer, loss_scale=None)
    data: Any = torch.randint(VOCAB, (100, SEQ + 1), generator=torch.Generator().manual_seed(1))
    samples = batches(data, BATCH, seed=1)
    own = folder / str(os.getpid())
    own.with_suffix(".start").write_text(str(time.process_time()))
    for step in survive.steps(1 << 60):
        if step >= steps and world_size() == int(os.environ["WORLD_SIZE"]):
            break
        if rank() == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{time.monotonic()} {world_size()}\n")
            if size == world_size():  # so that no rank starts or joins any more
                own.write_text(f"{os.getpid()} {step} {size}")
                own.replace(folder / "now")
        manager.zero_grad()
        for shard in virtual_shards(step):
            if raised:
                raise RuntimeError("an exception of one rank, by soak --kill")
            manager.backward(model(shard.of(samples[step])))
        manager.clip_grad_norm(manager.optimizers[0].param_groups, 1.0)
        manager.step()
        size = world_size()
    bits = hash_of_training(model, manager, gather=True)
    if rank() == 0:
        (folder / "end").write_text(f"{step} {time.monotonic()} {bits}")
    return 0


class _Job:
    """Processes that train, and the folder that they write to."""

    def __init__(self, num_ranks: int, steps: int, folder: Path) -> None:
        self._folder = folder
        self._command = ["-m", "bmtrain", *sys.argv[1:], "--steps", str(steps)]
        own = {_FOLDER: str(folder), "BMTRAIN_MEMBERS": str(folder / "members"), "OMP_NUM_THREADS": "1"}
        environments = [{**one, **own} for one in rank_environments(num_ranks)]
        self._output = (folder / "output").open("ab")
        self._template = Template(environments[0], stdout=self._output, stderr=self._output)
        self.ranks = [self._template.start(self._command, one) for one in environments]
        self._lost: list[tuple[str, Process]] = []
        self._counts: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def text(self, name: str) -> str:
        """Returns a file that the ranks have written, or nothing."""
        path = self._folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, size: int = 0) -> int:
        """Waits until so many ranks train, or, for 0, all have ended. Returns the step; -1 at a limit or an end."""
        last, limit = -1, time.monotonic() + _LIMIT_SECONDS
        statuses: list[int | None] = [None]
        while None in statuses and not any(statuses) and time.monotonic() < limit:
            process, step, ranks = map(int, self.text("now").split() or (0, 0, 0))
            lost = {victim.pid for _, victim in self._lost}  # one that wakes up may still write
            if process and process not in lost:
                if ranks == size:
                    return step
                if not size and step != last and ranks == len(self.ranks):
                    last, limit = step, time.monotonic() + _LIMIT_SECONDS
            time.sleep(_POLL_SECONDS)
            statuses = [process.poll() for process in self.ranks]
        return -1

    def lose(self, kind: str, index: int) -> float:
        """Loses a rank, for which a new process starts; returns the seconds to the next step of the others."""
        victim, began = self.ranks.pop(index), time.monotonic()
        self._lost.append((kind, victim))
        victim.send_signal(_SIGNALS[kind])
        self.wait(len(self.ranks))
        seconds = time.monotonic() - began
        victim.send_signal(signal.SIGCONT)
        self.ranks.append(self._template.start(self._command, {"BMTRAIN_JOIN": "1"}))
        return seconds

    def end(self) -> list[str]:
        """Waits for all processes; returns unexpected statuses."""
        self.wait()
        wrong, limit = [], time.monotonic() + _TIMEOUT
        for kind, process in [*(("", process) for process in self.ranks), *self._lost]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 0.1))
            if process.returncode != _STATUSES[kind]:
                name = f"a rank lost by {kind}" if kind else "a rank"
                wrong.append(f"{name}: expected status {_STATUSES[kind]}, got {process.returncode}")
        return wrong

    def close(self) -> list[str]:
        """Ends all processes; returns the remaining ones."""
        self._template.close()
        for process in (*self.ranks, *(process for _, process in self._lost)):
            process.kill()
            process.wait()
        self._output.close()
        left = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if str(self._folder).encode() in path.read_bytes():
                    left.append(f"process {path.parent.name} is left")
        return left

    def look(self) -> None:
        """Counts open files and the other `_RESOURCES` of each rank."""
        for process in self.ranks:
            folder = Path(f"/proc/{process.pid}")
            memory = len(re.findall(r"/memfd:|/dev/shm/", (folder / "maps").read_text()))
            counts = len(list(folder.glob("fd/*"))), len(list(folder.glob("task/*"))), memory
            self._counts[process.pid].append(counts)

    def growth(self) -> list[str]:
        """Names what has grown with every other fault at least, in a rank that has seen four or more."""
        wrong = []
        for looks in self._counts.values():
            for what, counts in zip(_RESOURCES, zip(*looks, strict=True), strict=True):
                growths = sum(later > former for former, later in pairwise(counts))
                if 2 * min(growths, counts[-1] - counts[0]) >= len(counts) - 1 > 3:
                    wrong.append(f"{what} of a rank went from {counts[0]} to {counts[-1]}")
        return wrong

    def lost_seconds(self) -> tuple[float, float]:
        """Seconds by which steps took longer than the median of as many ranks, and seconds of all steps."""
        starts = [(float(at), ranks) for at, ranks in map(str.split, self.text("steps").splitlines())]
        taken: dict[str, list[float]] = defaultdict(list)
        for (at, ranks), (after, _) in pairwise(starts):
            taken[ranks].append(after - at)
        usual = sum(statistics.median(seconds) * len(seconds) for seconds in taken.values())
        whole = sum(map(sum, taken.values()))
        return whole - usual, whole

    def starting_seconds(self) -> float:
        """Processor time of all processes up to their first step."""
        return sum(float(path.read_text()) for path in self._folder.glob("*.start"))


class _Found(NamedTuple):
    """The end of a job.

    Attributes:
        steps: their number.
        bits: hash of weights and optimizer state.
        speed: steps in a second, and in a second of the processors that the ranks used after their start.
        lost: see `_Job.lost_seconds`.
        seconds: from each fault to the next step, by kind; and of the parts of all recoveries, by name.
        wrong: unexpected statuses, and processes, files or threads that are left.
    """

    steps: int
    bits: str
    speed: tuple[float, float]
    lost: tuple[float, float]
    seconds: dict[str, list[float]]
    wrong: list[str]


def _run(num_ranks: int, steps: int, pause: float = 0.0) -> _Found:
    """Runs a job to its end, with a fault every ``pause`` seconds unless that is 0, and further steps after these."""
    chance, used = random.Random(steps), _processor_seconds()
    seconds: dict[str, list[float]] = defaultdict(list)
    with TemporaryDirectory(prefix="bmtrain-soak-") as folder:
        job = _Job(num_ranks, steps + _AFTER * bool(pause), Path(folder))
        try:
            job.wait(num_ranks)
            began = at = time.monotonic()
            while pause and job.wait(num_ranks) >= 0:
                job.look()
                time.sleep(max(at + pause - time.monotonic(), 0))
                if not 0 <= (step := job.wait(num_ranks)) < steps:
                    break
                at, kind = time.monotonic(), chance.choice(list(_SIGNALS))
                seconds[kind].append(job.lose(kind, chance.randrange(num_ranks)))
                when = f"{at - began:.0f} s, step {step}"
                print(f"{when}: {kind}; the next step after {seconds[kind][-1]:.1f} s", flush=True)
            wrong = job.end()
        finally:
            left = job.close()
        used = _processor_seconds() - used - job.starting_seconds()
        lost = job.lost_seconds()
        done, ended, bits = (job.text("end") or "0 0 -").split()
        for recovery in re.findall(r" lost; \d+ ranks continue \((.*)\)", job.text("output")):
            for part, taken in re.findall(r"([a-z -]+) ([\d.]+) s", recovery):
                seconds[f"- {part.strip()}"].append(float(taken))
        if wrong or left:
            print(job.text("output"))
    speed = int(done) / (float(ended) - began), int(done) / used
    return _Found(int(done), bits, speed, lost, seconds, wrong + left + job.growth())


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_with_faults(arguments: argparse.Namespace) -> int:
    """Runs the jobs and prints what was found. Returns the exit status."""
    ranks: int = arguments.ranks
    if not 3 <= ranks <= _SHARDS:
        raise SystemExit(f"--kill: expected --ranks from 3 (most must be left) to {_SHARDS}, got {ranks}")
    found = _run(ranks, arguments.steps, arguments.kill)
    plain = _run(ranks, max(found.steps, 2))
    number = sum(len(found.seconds[kind]) for kind in _SIGNALS)
    print(f"{number} ranks lost and replaced in {found.steps} steps of {ranks} ranks")
    rows = [
        [what, str(len(values)), *(f"{pick(values):.3f}" for pick in (min, statistics.median, max, sum))]
        for what, values in found.seconds.items()
        if values
    ]
    print_table(["seconds to the next step", "number", "least", "median", "most", "all"], rows)
    kept = [disturbed / (other or 1.0) for disturbed, other in zip(found.speed, plain.speed, strict=True)]
    speed = f"{plain.speed[0]:.2f} steps/s undisturbed"
    print(f"{speed}; kept {kept[0]:.3f}, and {kept[1]:.3f} by processor time")
    lost, whole = found.lost
    usual = f"{lost:.1f} of {whole:.1f} s beyond the usual time of as many ranks"
    share = f"{1 - lost / (whole or 1.0):.3f} (undisturbed: {1 - plain.lost[0] / (plain.lost[1] or 1.0):.3f})"
    print(f"{usual}; kept {share}")
    wrong = [*plain.wrong, *found.wrong]
    wrong += ["expected the bits of the undisturbed run"] if found.bits != plain.bits else []
    print("\n".join(wrong) or "bit-identical to the undisturbed run; no process, file or thread is left")
    if arguments.json:
        results = {"seconds": found.seconds, "speed kept": kept, "lost": found.lost, "broken": wrong}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if wrong else 0
