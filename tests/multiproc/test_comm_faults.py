"""A rank that dies, stalls or does something else: the others raise, and nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial

import pytest
import torch
from harness import Outcome, Status, at_once, free_port, rank_outcomes, run_ranks

import bmtrain
from bmtrain import _C
from bmtrain.errors import BMTrainError, CommunicationError

SHORT = 6  # seconds; at such a time-out a rank without an answer for half of it is taken for stopped
TRANSPORTS = ["shm", "gloo"]
LEFT = [10, 2_000_000]  # elements of the last collective before a rank leaves
STALL, DISAGREEING = 0, -1  # other jobs of `waiting`
pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def over(transport: str) -> dict[str, str]:
    return {"BMTRAIN_CPU_TRANSPORT": transport}


def gather_while_one_dies(numel: int, pause: float) -> tuple[str, str, float]:
    comm = bmtrain.config["comm"]
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 0 and pause:
        subprocess.Popen(["sh", "-c", f"sleep {pause}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(CommunicationError) as first:
        comm.all_gather(torch.empty(comm.size * numel), torch.ones(numel), "block 3").wait()
        comm.barrier("block 3")  # a small gather may end before the kernel tells of the death
    seconds = time.monotonic() - started
    with pytest.raises(CommunicationError) as second:
        comm.all_reduce(torch.ones(4), _C.ReduceOp.SUM)
    assert isinstance(first.value, BMTrainError)
    return str(first.value), str(second.value), seconds


@pytest.mark.parametrize(
    ("world", "numel", "pause"), [(2, 10, 0), (4, 10, 0), (3, 1_000_000, 0), (3, 1_000_000, 2.5)]
)
def test_killed_rank(world: int, numel: int, pause: float, transport: str) -> None:
    """Also while rank 0, which asks all ranks, does not answer for a moment."""
    run = partial(rank_outcomes, init={"timeout": 30}, timeout=60, environment=over(transport))
    outcomes = run(world, gather_while_one_dies, numel, pause)
    assert outcomes[1].status is Status.DIED
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.status is Status.RETURNED, outcome
            first, second, seconds = outcome.value
            assert seconds < 10  # far less than the time-out
            for words in ("block 3", f"rank {outcome.rank} of {world}", "rank 1 died"):
                assert words in first
            assert "aborted" in second


def stall() -> tuple[str, float]:
    comm = bmtrain.config["comm"]
    comm.barrier()
    if comm.rank == 1:
        time.sleep(SHORT + 5)
        return "", 0.0
    started = time.monotonic()
    with pytest.raises(CommunicationError) as error:
        comm.reduce_scatter(torch.ones(4), torch.ones(4 * comm.size), _C.ReduceOp.SUM, "block 5").wait()
    return str(error.value), time.monotonic() - started


def leave_first(numel: int) -> float:
    """Rank 0 ends at once after its last collective; a slow rank still gets everything."""
    comm = bmtrain.config["comm"]
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.5)
    whole = torch.empty(comm.size * numel)
    work = comm.all_gather(whole, torch.full((numel,), comm.rank + 1.0))
    if comm.rank == 1:
        time.sleep(1.0)
    work.wait()
    if comm.rank == 0:
        os._exit(0)
    time.sleep(1.0)
    return float(whole.double().mean())


@pytest.fixture(scope="module")
def waiting() -> dict[tuple[str, int], list[Outcome]]:
    """Outcomes of jobs that mostly wait, made at the same time: by transport and job."""
    calls = {}
    for transport in TRANSPORTS:
        run = partial(rank_outcomes, fresh=True, environment=over(transport))
        calls[transport, STALL] = partial(run, 3, stall, init={"timeout": SHORT}, timeout=60)
        for numel in LEFT:
            calls[transport, numel] = partial(run, 2, leave_first, numel)
        ports = [free_port() for _ in KINDS]
        calls[transport, DISAGREEING] = partial(run, 2 * len(KINDS), disagree, ports, init=False)
    return dict(zip(calls, at_once(calls.values()), strict=True))


def test_stalled_rank(transport: str, waiting: dict[tuple[str, int], list[Outcome]]) -> None:
    outcomes, waited = waiting[transport, STALL], []
    for rank in (0, 2):
        assert outcomes[rank].status is Status.RETURNED, outcomes[rank]
        message, seconds = outcomes[rank].value
        waited.append(seconds)
        assert "reduce_scatter" in message
        assert "block 5" in message
    assert max(waited) >= SHORT  # of the one that began first; the verdict ends the other's wait
    named = [rank for rank in (0, 2) if "rank 1" in outcomes[rank].value[0].split(":", 1)[1]]
    assert named == [0, 2]


KINDS = ["operation", "size", "block", "message", "parameter", "layer", "state dict"]


def disagree(ports: list[int]) -> str:
    """Jobs of two ranks at the same time: over Gloo each takes as long as the time-out."""
    kind = KINDS[int(os.environ["RANK"]) // 2]
    rank = str(int(os.environ["RANK"]) % 2)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ["MASTER_PORT"] = str(ports[KINDS.index(kind)])
    bmtrain.init_distributed(timeout=10)  # who does not answer for less than half of it is not taken for lost
    comm = bmtrain.config["comm"]
    comm.barrier()
    size, odd = comm.size, comm.rank == 1
    whole = [bmtrain.DistributedParameter(torch.full((6, 6), float(i))) for i in range(2)]
    layers = [bmtrain.nn.Linear(6, 6) for _ in range(2)]
    with pytest.raises(CommunicationError) as error:
        if kind == "operation":
            if odd:
                comm.all_reduce(torch.ones(4), _C.ReduceOp.SUM, "loss").wait()
            else:
                comm.all_gather(torch.empty(4 * size), torch.ones(4), "block 1").wait()
        elif kind == "size":
            numel = 8 if odd else 4
            comm.all_gather(torch.empty(numel * size), torch.ones(numel), "block 1").wait()
        elif kind == "block":
            comm.all_gather(torch.empty(4 * size), torch.ones(4), f"block {comm.rank}").wait()
        elif kind == "parameter":
            whole[comm.rank].gather()
        elif kind == "layer":
            layers[comm.rank](torch.ones(6))
        elif kind == "state dict":
            layers[comm.rank].state_dict()
        elif odd:  # a message of another size than the receiver expects
            comm.send(torch.ones(100), 0, "loss").wait()
            comm.barrier()  # a message is sent when it lies in shared memory, read or not
        else:
            comm.recv(torch.empty(10), 1, "block 1").wait()
    return str(error.value)


def test_ranks_that_disagree(transport: str, waiting: dict[tuple[str, int], list[Outcome]]) -> None:
    outcomes = waiting[transport, DISAGREEING]
    assert all(outcome.status is Status.RETURNED for outcome in outcomes), outcomes
    messages = [outcome.value for outcome in outcomes]
    for job, kind in enumerate(KINDS):
        for rank, message in enumerate(messages[2 * job : 2 * job + 2]):
            assert f"rank {rank} of 2" in message, kind
            assert f"rank {1 - rank}" in message.split(":", 1)[1], f"{kind}: {message}"
            if kind == "parameter":
                assert f"parameter {rank} of shape (6, 6)" in message
            elif kind == "layer":
                assert f"parameters {2 + 2 * rank}-{3 + 2 * rank}" in message


def abort_from_another_thread() -> str:
    import threading

    comm = bmtrain.config["comm"]
    comm.barrier()
    if comm.rank == 0:
        threading.Timer(0.3, comm.abort, args=["the user pressed Ctrl-C"]).start()
    with pytest.raises(CommunicationError) as error:
        comm.recv(torch.empty(4), 1 - comm.rank, "never sent").wait()
    comm.abort("again")
    comm.close()
    comm.close()
    return str(error.value)


def test_abort(transport: str) -> None:
    started = time.monotonic()
    messages = run_ranks(2, abort_from_another_thread, fresh=True, environment=over(transport))
    assert time.monotonic() - started < 40  # the time-out is 45 s
    assert "the user pressed Ctrl-C" in messages[0]
    assert "rank 0" in messages[1]


def abort_after_close(waits: bool) -> list[str]:
    import threading

    comm = bmtrain.config["comm"].inner
    comm.barrier()
    if comm.rank == 0:
        works = [comm.recv(torch.empty(4), 1), comm.all_gather(torch.empty(8), torch.ones(4))]
        comm.close()
        abort = threading.Thread(target=lambda: (time.sleep(0.3 * waits), comm.abort("it is enough")))
        abort.start()
        if not waits:
            abort.join()
    else:
        works = [comm.recv(torch.empty(4), 0)]
    messages = []
    for work in works:
        with pytest.raises(CommunicationError) as error:
            work.wait()
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("waits", [False, True])
def test_abort_of_a_closed_communicator(transport: str, waits: bool) -> None:
    """Ends what is under way at once."""
    messages = run_ranks(2, abort_after_close, waits, fresh=True, environment=over(transport))
    assert [len(of_rank) for of_rank in messages] == [2, 1]
    assert all("it is enough" in message for message in messages[0])
    assert "rank 0" in messages[1][0].split(":", 1)[1]
    assert "timed out" not in messages[1][0]


@pytest.mark.parametrize("numel", LEFT)
def test_a_rank_may_leave_after_its_last_collective(
    numel: int, transport: str, waiting: dict[tuple[str, int], list[Outcome]]
) -> None:
    outcomes = waiting[transport, numel]
    assert outcomes[0].exitcode == 0
    assert outcomes[1].status is Status.RETURNED, outcomes[1]
    assert outcomes[1].value == 1.5


def drop_works() -> None:
    """Nobody waits for these; their memory stays valid until they are through."""
    comm = bmtrain.config["comm"]
    for _ in range(20):
        comm.all_gather(torch.empty(comm.size * 1000), torch.ones(1000))
    x = torch.ones(100_000)
    comm.all_reduce(x, _C.ReduceOp.SUM).wait()
    assert x.eq(comm.size).all()


def test_works_that_nobody_waits_for(transport: str) -> None:
    run_ranks(2, drop_works, fresh=True, environment=over(transport))


def beside_the_default_group() -> None:
    """Somebody else's default group is neither needed nor touched."""
    import torch.distributed as dist

    assert not dist.is_initialized()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    default = dist.group.WORLD
    comm = bmtrain.config["comm"]
    x = torch.ones(10)
    comm.all_reduce(x, _C.ReduceOp.SUM).wait()
    assert dist.group.WORLD is default
    dist.destroy_process_group()
    comm.all_reduce(x, _C.ReduceOp.SUM).wait()
    assert x.eq(comm.size**2).all()


def test_beside_the_default_group(transport: str) -> None:
    run_ranks(2, beside_the_default_group, fresh=True, environment=over(transport))
