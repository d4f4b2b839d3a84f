"""`python -m bmtrain soak`: what a short form of it shows, and what it says about a run that breaks a promise."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest
from harness import run_process, run_ranks

from bmtrain import init_distributed
from bmtrain._ranks import context
from bmtrain.benchmark.soak import Finding, broken_promises, odd_schedules, train_once


def several_runs(runs: int, steps: int) -> list[Finding]:
    found = []
    for _ in range(runs):
        init_distributed(seed=1, timeout=45)
        found.append(train_once(steps))
        context.uninstall()
    return found


def test_nothing_adds_up_and_every_run_is_the_same() -> None:
    by_rank = run_ranks(2, several_runs, 3, 20, init=False, fresh=True)
    runs = [list(findings) for findings in zip(*by_rank, strict=True)]
    # So short a run says nothing about memory.
    runs = [[dataclasses.replace(found, memory=[1]) for found in findings] for findings in runs]
    assert broken_promises(runs) == []
    assert len(runs[0][0].files) == 20


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_random_schedules_have_the_bits_of_the_serial_one(transport: str) -> None:
    """`python -m bmtrain soak --schedules 1000` is the long form."""
    environment = {"BMTRAIN_POISON_BUFFERS": "1", "BMTRAIN_CPU_TRANSPORT": transport}
    assert run_ranks(2, odd_schedules, 12, environment=environment) == [[], []]


@pytest.mark.slow
def test_lost_ranks_are_replaced() -> None:
    """`python -m bmtrain soak --kill 30 --ranks 8 --steps 20000` is the long form."""
    options = ["--kill", "0.01", "--ranks", "3", "--steps", "32"]  # the first one to be killed is rank 0
    done = run_process([sys.executable, "-m", "bmtrain", "soak", *options], timeout=600)
    assert re.search(r"[1-9]\d* ranks lost and replaced in \d+ steps of 3 ranks", done.stdout)
    assert re.search(r"s beyond the usual time of as many ranks; kept \d\.\d+ \(undisturbed: ", done.stdout)
    assert "bit-identical to the undisturbed run; no process, file or thread is left" in done.stdout


GOOD = Finding("a", "0x1p+0", [100] * 20, [9] * 20, [4] * 20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "b"}, "has other weights than rank 0 in run 0"),
        ({"loss": "0x1p+1"}, "has other loss"),
        ({"files": [9] * 19 + [10]}, "files went from 9 to 10"),
        ({"threads": [4] * 10 + [5] * 10}, "threads went from 4 to 5"),
        ({"memory": [100] * 10 + [102] * 10}, "memory grew by 2.0%"),
    ],
)
def test_a_broken_promise_is_named(changes: dict[str, object], words: str) -> None:
    assert broken_promises([[GOOD, GOOD], [GOOD, GOOD]]) == []
    [text] = broken_promises([[GOOD, GOOD], [GOOD, dataclasses.replace(GOOD, **changes)]])
    assert text.startswith("run 1: rank 1")
    assert words in text


def test_memory_that_grows_from_run_to_run_is_named() -> None:
    runs = [[GOOD, dataclasses.replace(GOOD, memory=[1000 + run] * 20)] for run in range(50)]
    [text] = broken_promises(runs)
    assert text == "rank 1: memory grew by 3.0% from run to run"
