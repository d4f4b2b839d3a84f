"""Faults put in on purpose: every survivor raises the typed error, with the same sentence about the same culprit."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Outcome, Status, at_once, rank_outcomes, run_process, run_ranks

import bmtrain
from bmtrain import _C
from bmtrain._ranks import context as _context
from bmtrain._watch import blame
from bmtrain.errors import CommunicationError

WORLD = 4
SUM = _C.ReduceOp.SUM
COLLECTIVES = ["all_gather", "all_to_all", "reduce_scatter", "all_reduce", "reduce", "broadcast", "barrier"]


def collective(comm: _C.Communicator, op: str, numel: int, label: str = "block 3") -> None:
    """Run one to its end, then a barrier: a small one may be over before somebody dies of it."""
    small, large = torch.ones(numel), torch.ones(numel * comm.size)
    if op == "all_gather":
        comm.all_gather(large, small, label).wait()
    elif op == "all_to_all":
        comm.all_to_all(torch.empty_like(large), large, label).wait()
    elif op == "reduce_scatter":
        comm.reduce_scatter(small, large, SUM, label).wait()
    elif op == "all_reduce":
        comm.all_reduce(small, SUM, label).wait()
    elif op == "reduce":
        comm.reduce(small, SUM, 0, label).wait()
    elif op == "broadcast":
        comm.broadcast(small, 0, label).wait()
    comm.barrier(label)


def caught(op: str, numel: int) -> str:
    """The message of the error, and the same reason for the next operation."""
    comm = bmtrain.config["comm"]
    with pytest.raises(CommunicationError) as first:
        while True:
            collective(comm, op, numel)
    with pytest.raises(CommunicationError, match="aborted"):
        comm.all_reduce(torch.ones(4), SUM)
    return str(first.value)


def die(op: str, victim: int, numel: int) -> str:
    bmtrain.synchronize()
    if bmtrain.rank() == victim:
        # From another thread: in the middle of the collectives that this one goes on with.
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGKILL]).start()
    return caught(op, numel)


def survivors(outcomes: list[Outcome], victim: int) -> list[str]:
    """The survivors' messages, of which each names itself and the same culprit."""
    messages = []
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.status is Status.RETURNED, outcome
            messages.append(outcome.value)
            assert f"rank {outcome.rank} of {WORLD}" in outcome.value
    return messages


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("op", COLLECTIVES)
def test_killed_in_a_collective(op: str, transport: str) -> None:
    victim = COLLECTIVES.index(op) % WORLD
    options = {"init": {"timeout": 40}, "environment": {"BMTRAIN_CPU_TRANSPORT": transport}}
    outcomes = rank_outcomes(WORLD, die, op, victim, 50_000, **options, fresh=True, timeout=60)
    assert outcomes[victim].status is Status.DIED
    for message in survivors(outcomes, victim):
        assert f"rank {victim} died: connections closed without a word" in message
        assert '"block 3"' in message


def stop_for_good(folder: str, survivors: int) -> None:
    """Stop this process; a child of it ends it when each survivor has made a file in the folder."""
    parent, until = os.getpid(), time.monotonic() + 60
    if os.fork() == 0:
        while len(os.listdir(folder)) < survivors and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def stop(victim: int, folder: str) -> tuple[str, float]:
    bmtrain.synchronize()
    started = time.monotonic()
    if bmtrain.rank() == victim:
        stop_for_good(folder, WORLD - 1)
    message = caught("all_gather", 10)
    seconds = time.monotonic() - started
    Path(folder, str(bmtrain.rank())).touch()
    return message, seconds


def leave_early() -> float:
    """Rank 1 has sent its part and ends at once; rank 2 comes long after that."""
    comm, x = bmtrain.config["comm"], torch.ones(10)
    comm.barrier()
    if comm.rank == 2:
        time.sleep(3)
    comm.reduce(x, SUM, 0, "the last").wait()
    if comm.rank == 1:
        os._exit(0)
    return float(x[0])


def skip_one() -> str:
    comm = bmtrain.config["comm"]
    comm.barrier()
    if comm.rank == 1:
        context = _context.current()
        assert context is not None
        assert context.watch is not None
        while not context.watch.core.verdict:  # in no operation
            time.sleep(0.05)
        return "late"
    with pytest.raises(CommunicationError) as error:
        comm.all_gather(torch.empty(40), torch.ones(10), "block 7").wait()
    return str(error.value)


@pytest.fixture(scope="module")
def flight_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flights")


@pytest.fixture(scope="module")
def waiting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, flight_folder: Path
) -> dict[Any, list[Outcome]]:
    """Outcomes of jobs that wait at the same time: by function, or by victim and time-out (of selected tests)."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    params = [test.callspec.params for test in tests if test.function is test_stopped]
    cases = [(each["victim"], each["seconds_allowed"]) for each in params]
    records = {"BMTRAIN_FLIGHT_DIR": str(flight_folder)}
    run = partial(rank_outcomes, fresh=True, timeout=90)
    calls = {
        skip_one: partial(run, WORLD, skip_one, init={"timeout": 5}, environment=records),
        leave_early: partial(run, 3, leave_early, init={"timeout": 60}),
    }
    for victim, seconds in cases:
        folder = str(tmp_path_factory.mktemp("stopped"))
        calls[victim, seconds] = partial(run, WORLD, stop, victim, folder, init={"timeout": seconds})
    return dict(zip(calls, at_once(calls.values()), strict=True))


@pytest.mark.parametrize(
    ("victim", "seconds_allowed"),
    [(2, 6), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 6), (2, 9), (0, 9)))],
)
def test_stopped(victim: int, seconds_allowed: int, waiting: dict[Any, list[Outcome]]) -> None:
    for outcome in waiting[victim, seconds_allowed]:
        if outcome.rank != victim:
            assert outcome.status is Status.RETURNED, outcome
            message, seconds = outcome.value
            assert f"no answer from rank {victim}" in message
            assert seconds >= seconds_allowed  # not before the time-out


def test_a_rank_that_ends_early_is_not_blamed(waiting: dict[Any, list[Outcome]]) -> None:
    """The others still wait for somebody else: the hub asks, and finds that all is well."""
    outcomes = waiting[leave_early]
    assert outcomes[0].value == 3.0, outcomes[0]
    assert outcomes[1].exitcode == 0
    assert outcomes[2].status is Status.RETURNED


def raise_alone(victim: int) -> str:
    """What happens when a script's forward raises: the hook of the interpreter is called, then it ends."""
    bmtrain.synchronize()
    if bmtrain.rank() == victim:
        # When this has ended the others have left the barrier above: they fail where it is caught.
        collective(bmtrain.config["comm"], "all_reduce", 10)
        try:
            raise ValueError("a bad sample\nand more")
        except ValueError:
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    return caught("all_reduce", 10)


@pytest.mark.parametrize("victim", [0, 3])
def test_an_exception_on_one_rank(victim: int) -> None:
    outcomes = rank_outcomes(WORLD, raise_alone, victim, init={"timeout": 300}, fresh=True, timeout=60)
    assert outcomes[victim].exitcode == 1
    assert "Traceback" in outcomes[victim].output
    for message in survivors(outcomes, victim):
        assert f"rank {victim} raised ValueError: a bad sample" in message


def test_a_rank_that_does_not_come(waiting: dict[Any, list[Outcome]], flight_folder: Path) -> None:
    outcomes = waiting[skip_one]
    for message in survivors(outcomes, 1):
        assert 'rank 1 did not come to all_gather #2 for "block 7"' in message
        assert "in skip_one" in message
    assert "gives up: rank 1 did not come" in outcomes[1].output
    assert [outcome.output.count("gives up") for outcome in outcomes] == [1] * WORLD  # one report each
    flights = {
        rank: json.loads((flight_folder / f"flight-rank{rank}.json").read_text()) for rank in range(WORLD)
    }
    verdict, lines = blame.read_flights(flights)
    assert verdict.culprits == (1,)
    assert any(line.startswith("ranks 0, 2-3: in all_gather #2") for line in lines)
    zero = next(g for g in flights[0]["groups"] if g["group"] == "zero/0/gather")
    assert [r["op"] for r in zero["records"]] == ["barrier", "barrier", "all_gather"]


def disagree(op: str, kind: str) -> str:
    """Rank 2 differs in one thing."""
    comm = bmtrain.config["comm"]
    comm.barrier()
    odd = comm.rank == 2
    dtype = torch.float16 if odd and kind == "dtype" else torch.float32
    numel = 20 if odd and kind == "size" else 10
    label = "block 2" if odd and kind == "order" else "block 1"
    small, large = torch.ones(numel, dtype=dtype), torch.ones(numel * comm.size, dtype=dtype)
    root = int(odd and kind == "root or reduction")
    reduction = _C.ReduceOp.MAX if root else SUM
    if odd and kind == "operation":
        op = "broadcast" if op == "all_gather" else "all_gather"
    with pytest.raises(CommunicationError) as error:
        if op == "all_gather":
            comm.all_gather(large, small, label)
        elif op == "all_reduce":
            comm.all_reduce(small, reduction, label)
        elif op == "reduce_scatter":
            comm.reduce_scatter(small, large, reduction, label)
        else:
            comm.broadcast(small, root, label)
    assert small.eq(1).all()  # no data has moved
    return str(error.value)


def all_disagreements(op: str) -> list[str]:
    """One after the other, each in a job of its own."""
    messages = []
    for kind in ("operation", "dtype", "size", "order", "root or reduction"):
        if (op, kind) == ("all_gather", "root or reduction"):
            messages.append("")  # has neither
            continue
        if _context.current() is None:
            bmtrain.init_distributed(timeout=45)
        messages.append(disagree(op, kind))
        _context.uninstall()
    return messages


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "reduce_scatter", "broadcast"])
def test_check_mode_names_both_ranks_and_the_difference(op: str) -> None:
    checked = {"BMTRAIN_CHECK": "1"}
    kinds = ("operation", "dtype", "size", "order", "root or reduction")
    outcomes = run_ranks(3, all_disagreements, op, environment=checked, fresh=True, timeout=120)
    for messages in outcomes:
        for kind, message in zip(kinds, messages, strict=True):
            if message:
                assert f"{kind}" in message
                assert 'differs on group "zero": ranks 0-1 called' in message
                assert "rank 2 called" in message


def agree() -> float:
    """Everything that is right passes, messages included."""
    comm, x = bmtrain.config["comm"], torch.ones(10)
    for op in COLLECTIVES:
        collective(comm, op, 10)
    if comm.rank == 0:
        comm.send(x * 7, 1, "there").wait()
    elif comm.rank == 1:
        comm.recv(x, 0, "here").wait()
    comm.barrier()
    return float(x[0])


def test_check_mode_passes_what_agrees() -> None:
    assert run_ranks(2, agree, environment={"BMTRAIN_CHECK": "1"}, fresh=True) == [1.0, 7.0]


def interrupted() -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the harness ignores it
    comm = bmtrain.config["comm"]
    comm.barrier()
    if comm.rank == 1:
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        if comm.rank != 0:
            comm.recv(torch.empty(4), 0, "never sent").wait()
        else:
            comm.recv(torch.empty(4), 1, "never sent").wait()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ctrl_c_in_a_blocked_operation() -> None:
    """Long before the time-out; the rank that was interrupted raises KeyboardInterrupt, the others name it."""
    outcomes = run_ranks(3, interrupted, init={"timeout": 300}, fresh=True)
    assert outcomes[1].startswith("KeyboardInterrupt")
    for rank in (0, 2):
        assert outcomes[rank].startswith("CommunicationError")
        assert "rank 1 was interrupted (Ctrl-C)" in outcomes[rank]


def exit_with_dead_peers() -> None:
    """No collective is under way; the interpreter ends as it does after a script."""
    bmtrain.synchronize()
    if bmtrain.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    _context.uninstall()


def test_the_end_of_a_script_with_dead_peers() -> None:
    outcomes = rank_outcomes(3, exit_with_dead_peers, init={"timeout": 300}, fresh=True, timeout=60)
    assert [outcome.status for outcome in outcomes] == [Status.RETURNED, Status.DIED, Status.RETURNED]
    assert "gives up" not in outcomes[0].output + outcomes[2].output  # nobody needed it any more


SCRIPT = """
import torch, bmtrain
bmtrain.init_distributed(timeout=300)
bmtrain.synchronize()
if bmtrain.rank() == 1:
    raise ValueError("a bad sample")
while True:
    bmtrain.synchronize()
"""


@pytest.mark.slow
def test_under_torchrun_the_first_traceback_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=3",
        "--standalone",
        str(script),
    ]
    root = str(Path(bmtrain.__file__).parents[1])
    done = run_process(command, timeout=200, check=False, environment={"PYTHONPATH": root})
    assert done.returncode != 0
    assert "ValueError: a bad sample" in done.stdout
    assert "gives up: rank 1 raised ValueError: a bad sample" in done.stdout
    assert "rank      : 1 " in done.stdout.partition("Root Cause")[2]
