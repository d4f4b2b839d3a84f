"""What is printed: one report in each output, one traceback (of the cause), and whole lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest
import torch
from harness import Outcome, Program, at_once, free_port, rank_outcomes, run_process

import bmtrain
from bmtrain import _C
from bmtrain._ranks import context as contexts
from bmtrain.errors import CommunicationError

ROOT = Path(bmtrain.__file__).parents[1]
WORLD = 3

PROLOGUE = """
import os, signal, sys, time, torch, bmtrain
bmtrain.init_distributed(timeout=300)
comm = bmtrain.config["comm"]
bmtrain.synchronize()
"""
FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "raised": "raise ValueError('a bad sample')",
    "left": "sys.exit(0)",
    "failed": "sys.exit(7)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)",
}
#: Of a rank that ends in order: the others wait two seconds for it.
EXIT_CODES = {"left": 0, "failed": 7}
SENTENCES = {
    "killed": "rank {} died: connections closed without a word (SIGKILL)",
    "raised": "rank {} raised ValueError: a bad sample",
    "left": "rank {} ended while others still wait (exit code 0)",
    "failed": "rank {} ended while others still wait (exit code 7)",
    "terminated": "rank {} was ended by SIGTERM, at ",
}


def start(script: str, transport: str = "shm") -> tuple[list[Program], TextIO]:
    """All ranks, and the one output that they have, as on a terminal."""
    read, write = os.pipe()
    port, ranks = str(free_port()), []
    with open(os.devnull) as nothing:
        for rank in range(WORLD):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "LOCAL_WORLD_SIZE": str(WORLD),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "BMTRAIN_CPU_TRANSPORT": transport,
            }
            ranks.append(Program(script, environment, (nothing.fileno(), write, write)))
    os.close(write)
    return ranks, os.fdopen(read, errors="replace")


def output_of(ranks: list[Program], output: TextIO) -> str:
    try:
        for rank in ranks:
            rank.wait(120)
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.send_signal(signal.SIGABRT)  # on which those that still run print their stacks
            rank.wait()
        raise AssertionError(f"a rank did not end:\n{output.read()}") from None
    finally:
        for rank in ranks:
            rank.kill()
    return output.read()


CASES = [(fault, victim, "shm") for fault in FAULTS for victim in (0, 1)]
CASES += [(fault, victim, "gloo") for fault in ("left", "killed") for victim in (0, 1)]


def printed(fault: str, victim: int, transport: str) -> str:
    script = f"{PROLOGUE}\nif comm.rank == {victim}:\n    {FAULTS[fault]}\nwhile True:\n    bmtrain.synchronize()\n"
    if fault in EXIT_CODES:
        # Torch alone takes longer to end on a busy machine. What is registered first is called last.
        hurry = f"atexit.register(os._exit, {EXIT_CODES[fault]})"
        script = f"import atexit, os\nif os.environ['RANK'] == '{victim}':\n    {hurry}\n{script}"
    return output_of(*start(script, transport))


@pytest.fixture(scope="module")
def outputs() -> dict[tuple[str, int, str], str]:
    """What the job of each case prints; some run at the same time, as they wait for the rank that has ended."""
    return dict(zip(CASES, at_once([partial(printed, *case) for case in CASES], most=3), strict=True))


@pytest.mark.parametrize(("fault", "victim", "transport"), CASES)
def test_one_failure_is_one_report(
    fault: str, victim: int, transport: str, outputs: dict[tuple[str, int, str], str]
) -> None:
    """The watchdog alone reports the other faults, whatever carries the bytes."""
    output = outputs[fault, victim, transport]
    assert output.count("gives up: ") == 1, output
    sentence = SENTENCES[fault].format(victim)
    if victim == 0:  # its parent waits for it here, and so may ask for the exit code before the others do
        sentence = sentence.partition(" (")[0]
    assert f"gives up: {sentence}" in output, output
    assert output.count("Traceback") == (fault == "raised"), output
    assert len(output.splitlines()) <= 12, output


# An exception that rank 1 only formats when the job has given up because of the others.
SLOW = """
from bmtrain._ranks.context import current
class Slow(Exception):
    def __str__(self):
        while comm.rank == 1 and not current().watch.core.verdict:
            time.sleep(0.01)
        return "a bad sample"
"""


@pytest.mark.parametrize(
    "hook", ["", "usual = sys.excepthook\nsys.excepthook = lambda *words: usual(*words)"]
)
@pytest.mark.parametrize(
    "error", ["ValueError('a bad sample')", "ValueError(f'of rank {comm.rank}')", "Slow()"]
)
def test_an_exception_of_all_ranks_is_one_traceback(error: str, hook: str) -> None:
    """Neither the report nor other ranks' lines come in between."""
    output = output_of(*start(f"{PROLOGUE}\n{hook}\n{SLOW}\nbmtrain.synchronize()\nraise {error}"))
    assert output.count("Traceback") == output.count("gives up: ") == 1, output
    lines = output.splitlines()
    for first in ("Traceback", "bmtrain: rank "):
        assert sum(line.startswith(first) for line in lines) == 1, output
    [begin] = (number for number, line in enumerate(lines) if line.startswith("Traceback"))
    assert lines[begin + 1].startswith("  File ")
    assert lines[begin + 2].startswith(("ValueError: ", "Slow: ", "__main__.Slow: "))
    assert len(lines) <= 7, output


# No rank ends before all have printed.
WAITING = """
import atexit, os, time, torch, bmtrain
def wait():
    os.mkdir(os.environ["RANK"])
    while len(os.listdir()) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
atexit.register(wait)
"""


def test_ranks_that_have_not_met_print_one_traceback(tmp_path: Path) -> None:
    """A script without init_distributed(): no rank knows of the others."""
    script = f"{WAITING}\nos.chdir({str(tmp_path)!r})\nbmtrain.BMTrainModelWrapper(torch.nn.Linear(4, 4))"
    output = output_of(*start(script))
    assert output.count("Traceback") == output.count("RuntimeError: bmtrain is not initialized") == 1, output


def test_an_error_that_one_rank_passes_on_to_the_others_is_one_traceback() -> None:
    """It is raised elsewhere there, and some had one of their own."""
    failing = "raise OSError(28, 'No space left on device', f'shard-{comm.rank}')"
    passing = f"from bmtrain._ranks.agree import on_all_ranks\ndef fail():\n    {failing}\non_all_ranks(fail)"
    output = output_of(*start(f"{PROLOGUE}\n{passing}"))
    assert output.count("Traceback") == output.count("gives up: ") == 1, output
    assert output.count("No space left on device: 'shard-0'") == 2 and "shard-1" not in output, output


@pytest.mark.parametrize("saves", ["", "model.pt", "in the background"])
def test_ctrl_c_is_one_line(saves: str, tmp_path: Path) -> None:
    file = str(tmp_path / "model.pt")
    background = saves == "in the background"
    saving = f"bmtrain.save(torch.nn.Linear(2, 2), {file!r}, non_blocking={background})" if saves else ""
    if background:
        saving += "\nbmtrain.store.finish_background_save()"
    # As on a terminal: what a shell starts in the background ignores the signal, and so do its descendants.
    saving += "\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    ready = "os.write(1, b'ready\\n')\nwhile True:\n    bmtrain.synchronize()\n"
    ranks, shared = start(f"{PROLOGUE}\n{saving}\n{ready}")
    for _ in ranks:
        assert shared.readline() == "ready\n"
    for rank in ranks:  # a terminal sends it to all
        rank.send_signal(signal.SIGINT)
    output = output_of(ranks, shared)
    assert len(output.splitlines()) == 1, output
    line = output.rstrip()
    assert "was interrupted (Ctrl-C), at <string>:" in line, output
    assert line.endswith(f"; continue with bmtrain.load(model, {file!r})" if saves else " in <module>"), line


@pytest.mark.parametrize("repeat", range(int(os.environ.get("BMTRAIN_SIGTERM_REPEATS", "1"))))
def test_under_torchrun_the_report_comes_before_its_sigterm(repeat: int, tmp_path: Path) -> None:
    """The survivors compute, in no operation that could notice: the signal is what makes them look."""
    script = tmp_path / "script.py"
    computing = "end = time.time() + 60\nwhile time.time() < end:\n    pass\n"
    script.write_text(f"{PROLOGUE}\nif comm.rank == 1:\n    {FAULTS['killed']}\n{computing}")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(script),
    ]
    done = run_process(command, timeout=200, check=False, environment={"PYTHONPATH": str(ROOT)})
    assert done.stdout.count("gives up: rank 1 died: connections closed without a word") == 1, done.stdout
    assert "Signal 9" in done.stdout.partition("Root Cause")[2]


def save_alone() -> str:
    """As a trainer that saves on rank 0: the others are in the next step."""
    comm = bmtrain.config["comm"]
    comm.barrier()
    with pytest.raises(CommunicationError) as error:
        if comm.rank == 0:
            comm.all_gather(torch.empty(30), torch.ones(10), "state_dict").wait()
        else:
            comm.all_reduce(torch.ones(10), _C.ReduceOp.SUM, "loss").wait()
    return str(error.value)


def wait_in_other_groups() -> float:
    """Each in a group of its own order: not certain to be for ever, so that it is only reported."""
    context = contexts.current()
    assert context is not None
    one, other = context.world.comm, context.world.reduce_comm
    one.barrier()
    first, second = (one, other) if one.rank == 0 else (other, one)
    x = torch.ones(4)

    def come_later() -> None:
        time.sleep(9)
        second.all_reduce(torch.ones(4), _C.ReduceOp.SUM, "loss").wait()

    thread = threading.Thread(target=come_later)
    thread.start()
    first.all_reduce(x, _C.ReduceOp.SUM, "loss").wait()
    thread.join()
    return float(x[0])


def wait_for_a_slow_rank() -> str:
    comm = bmtrain.config["comm"]
    comm.barrier()
    if comm.rank == 1:
        time.sleep(7)
    comm.all_reduce(torch.ones(4), _C.ReduceOp.SUM).wait()
    return "through"


@pytest.fixture(scope="module")
def waiting() -> dict[str, list[Outcome]]:
    """Outcomes of jobs that mostly wait, made at the same time, by function."""
    run = partial(rank_outcomes, init={"timeout": 300}, fresh=True, timeout=90)
    calls = {
        "save_alone": partial(run, WORLD, save_alone, environment={"BMTRAIN_CPU_TRANSPORT": "gloo"}),
        "wait_in_other_groups": partial(run, 2, wait_in_other_groups),
        "wait_for_a_slow_rank": partial(run, 2, wait_for_a_slow_rank),
    }
    return dict(zip(calls, at_once(calls.values()), strict=True))


def test_a_call_that_one_rank_makes_is_told_within_seconds(waiting: dict[str, list[Outcome]]) -> None:
    """Over Gloo, which notices nothing; the time-out is far away."""
    for outcome in waiting["save_alone"]:
        assert 'operation differs on group "zero": ranks 1-2 called all_reduce #2 for "loss"' in outcome.value
        assert "rank 0 called all_gather #2" in outcome.value
        assert "test_reports.py:" in outcome.output
        assert " in save_alone" in outcome.output
        assert "Every rank must make the same calls" in outcome.output


def test_ranks_that_wait_for_each_other_are_told_and_may_go_on(waiting: dict[str, list[Outcome]]) -> None:
    outcomes = waiting["wait_in_other_groups"]
    assert [outcome.value for outcome in outcomes] == [2.0, 2.0], outcomes
    for outcome in outcomes:
        assert outcome.output.count("ranks 0-1 wait for each other: ") == 1, outcome.output
        assert "Unless that changes, the job ends at the time-out" in outcome.output
        assert "gives up" not in outcome.output


def test_a_slow_rank_is_not_reported(waiting: dict[str, list[Outcome]]) -> None:
    for outcome in waiting["wait_for_a_slow_rank"]:
        assert (outcome.value, outcome.output) == ("through", "")
