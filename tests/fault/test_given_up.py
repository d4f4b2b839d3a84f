"""A rank on which the others have given up, and that cannot notice it, prints its stacks and ends itself."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from functools import partial

import pytest
import torch
from harness import Outcome, Status, at_once, rank_outcomes

import bmtrain
from bmtrain import _C
from bmtrain.errors import CommunicationError

VICTIM = 1
TIMEOUT = 6  # seconds; at it a rank without an answer for half of them is taken for stopped


def hang_in_python() -> None:
    while True:
        pass


def hang_in_native_code() -> None:
    ctypes.CDLL(None).sleep(1000)


def hang_with_the_lock() -> None:
    ctypes.PyDLL(None).sleep(1000)


def hang_after_a_stop() -> None:
    """Stopped until the others are past the time-out, then continued."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(TIMEOUT + 4)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)
    hang_in_python()


def hang(function: str, victim: int) -> str:
    comm = bmtrain.config["comm"]
    comm.barrier()
    if comm.rank == victim:
        globals()[function]()
    with pytest.raises(CommunicationError) as error:
        comm.all_reduce(torch.ones(4), _C.ReduceOp.SUM).wait()
    if comm.rank == 0:
        time.sleep(0.5)  # that of the hub's rank ends last
    return str(error.value)


def notice_late() -> str:
    """Accused, but it computes, and raises in its next operation."""
    comm = bmtrain.config["comm"]
    comm.barrier()
    if comm.rank == VICTIM:
        time.sleep(TIMEOUT + 1)
    with pytest.raises(CommunicationError) as error:
        comm.all_reduce(torch.ones(4), _C.ReduceOp.SUM).wait()
    time.sleep(TIMEOUT + 1)  # an emergency save: longer than the grace
    return str(error.value)


HANGS = [
    ("hang_in_python", 1),
    ("hang_in_python", 0),
    ("hang_in_native_code", 1),
    ("hang_with_the_lock", 1),
    ("hang_after_a_stop", 1),
]
Jobs = dict[tuple[str, int], list[Outcome]]


@pytest.fixture(scope="module")
def waiting() -> Jobs:
    """Outcomes by what a rank does and its number, of jobs that mostly wait: at once, they last as long as one."""
    run = partial(rank_outcomes, 3, init={"timeout": TIMEOUT}, fresh=True, timeout=60)
    calls = {("notice_late", VICTIM): partial(run, notice_late)}
    calls |= {(name, victim): partial(run, hang, name, victim) for name, victim in HANGS}
    return dict(zip(calls, at_once(calls.values()), strict=True))


@pytest.mark.parametrize(("function", "victim"), HANGS)
def test_a_rank_that_hangs_ends_itself(function: str, victim: int, waiting: Jobs) -> None:
    """Without a launcher, and although its thread never comes to another operation."""
    outcomes = waiting[function, victim]
    assert (outcomes[victim].status, outcomes[victim].exitcode) == (Status.DIED, 1), outcomes[victim]
    assert f"bmtrain: rank {victim} of 3 ends itself: " in outcomes[victim].output
    assert f" in {function}" in outcomes[victim].output  # the stack
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {victim}" in outcomes[rank].value, outcomes[rank]


def test_a_rank_that_notices_goes_on(waiting: Jobs) -> None:
    for outcome in waiting["notice_late", VICTIM]:
        assert outcome.status is Status.RETURNED, outcome
        assert f"rank {VICTIM} did not come" in outcome.value
