"""Shared memory between ranks of one host: when it is chosen, what it takes, and what a killed rank leaves."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from harness import RankError, Status, rank_outcomes, run_ranks

import bmtrain
from bmtrain import _C
from bmtrain._ranks import shm_meeting
from bmtrain._ranks.comm import REDUCE_OPS
from bmtrain.errors import CommunicationError

MIB = 2**20


def backends() -> list[str]:
    return [bmtrain.config["comm"].backend, bmtrain.config["tp_comm"].backend]


@pytest.mark.parametrize(("asked", "used"), [("", "shm"), ("auto", "shm"), ("shm", "shm"), ("gloo", "gloo")])
def test_choice(asked: str, used: str) -> None:
    environment = {"BMTRAIN_CPU_TRANSPORT": asked}
    assert run_ranks(2, backends, environment=environment) == [[used, "single"]] * 2


def test_unknown_choice() -> None:
    with pytest.raises(
        RankError, match=r"BMTRAIN_CPU_TRANSPORT: expected 'shm', 'gloo' or 'auto', got 'tcp'"
    ):
        run_ranks(2, backends, environment={"BMTRAIN_CPU_TRANSPORT": "tcp"})


def connect_from(places: list[str], lacks: list[str], file: str) -> str:
    """A second pair of communicators, between ranks that say they are elsewhere or cannot share memory."""
    from torch.distributed import FileStore

    from bmtrain._ranks import comm as _comm

    comm = bmtrain.config["comm"]
    shm_meeting.place = lambda: places[comm.rank]
    shm_meeting.why_not = lambda: lacks[comm.rank]
    store = FileStore(file, comm.size)
    made = _comm.create_gloo(store, "again", comm.rank, comm.size, 20.0, "again")
    x = torch.full((5,), comm.rank + 1.0)
    made.all_reduce(x, _C.ReduceOp.SUM).wait()
    assert x.eq(sum(range(1, comm.size + 1))).all()
    return made.backend


@pytest.mark.parametrize(
    ("places", "lacks", "used"),
    [(["a", "a"], ["", ""], "shm"), (["a", "b"], ["", ""], "gloo"), (["a", "a"], ["", "not here"], "gloo")],
)
def test_who_can_share_memory(places: list[str], lacks: list[str], used: str, tmp_path: Path) -> None:
    file = str(tmp_path / "store")
    assert run_ranks(2, connect_from, places, lacks, file, fresh=True) == [used] * 2


def forced_between_hosts(file: str) -> str:
    with pytest.raises(CommunicationError, match="shared memory cannot be used: rank 0 runs on") as error:
        connect_from(["a", "b"], ["", ""], file)
    return str(error.value)


def test_shm_forced_between_hosts(tmp_path: Path) -> None:
    environment = {"BMTRAIN_CPU_TRANSPORT": "shm"}
    file = str(tmp_path / "store")
    first, second = run_ranks(2, forced_between_hosts, file, environment=environment, fresh=True)
    assert first == second


def larger_than_the_rings() -> None:
    """More than a ring holds, in both directions at once, waited for late and by one rank before the other."""
    comm = bmtrain.config["comm"]
    size, rank = comm.size, comm.rank
    numel = 48 * MIB // 4
    whole = torch.empty(size * numel)
    gather = comm.all_gather(whole, torch.full((numel,), rank + 1.0), "large")
    values = torch.arange(numel, dtype=torch.float32) % 1000
    x = values + rank
    reduction = comm.all_reduce(x, _C.ReduceOp.SUM)
    for work in (gather, reduction) if rank else (reduction, gather):
        work.wait()
    assert torch.equal(whole.view(size, numel), (torch.arange(size) + 1.0)[:, None].expand(size, numel))
    assert torch.equal(x, values * size + sum(range(size)))
    message = torch.full((numel,), float(rank))
    incoming = torch.empty(numel)
    sends = comm.send(message, (rank + 1) % size)
    comm.recv(incoming, (rank - 1) % size).wait()
    sends.wait()
    assert incoming.eq((rank - 1) % size).all()


@pytest.mark.parametrize("world", [2, 3])
def test_larger_than_the_rings(world: int) -> None:
    run_ranks(world, larger_than_the_rings)


def progress_without_waiting(signal_file: str) -> bool:
    """A gather larger than a ring goes on while a rank does not call the library."""
    comm = bmtrain.config["comm"]
    numel = 48 * MIB // 4
    comm.barrier()
    work = comm.all_gather(torch.empty(comm.size * numel), torch.ones(numel), "large")
    if comm.rank == 0:
        work.wait()  # rank 1 has to send the last third without calling anything
        Path(signal_file).touch()
        return True
    deadline = time.monotonic() + 30
    while not os.path.exists(signal_file) and time.monotonic() < deadline:
        time.sleep(0.01)
    arrived = os.path.exists(signal_file)
    work.wait()
    return arrived


def test_background_progress(tmp_path: Path) -> None:
    assert run_ranks(2, progress_without_waiting, str(tmp_path / "arrived")) == [True, True]


def more_than_the_slots(signal_file: str) -> None:
    """More small chunks than a ring has slots (512), before the other rank reads one."""
    comm = bmtrain.config["comm"]
    expected = torch.arange(1200.0)
    messages, broadcasts = (expected.clone() if comm.rank == 0 else torch.zeros(1200) for _ in range(2))
    if comm.rank == 1:
        while not os.path.exists(signal_file):
            time.sleep(0.01)
    works = [
        comm.send(message, 1) if comm.rank == 0 else comm.recv(message, 0) for message in messages.split(1)
    ]
    works += [comm.broadcast(part, 0) for part in broadcasts.split(1)]
    Path(signal_file).touch()
    for work in works:
        work.wait()
    assert torch.equal(messages, expected)
    assert torch.equal(broadcasts, expected)


def test_more_than_the_slots(tmp_path: Path) -> None:
    run_ranks(2, more_than_the_slots, str(tmp_path / "sent"))


def random_reductions() -> list[list[float]]:
    comm = bmtrain.config["comm"]
    results = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for numel in (1000, 200_001):
            generator = torch.Generator().manual_seed(comm.rank)
            x = torch.randn(numel * comm.size, generator=generator).to(dtype)
            shard = torch.empty(numel, dtype=dtype)
            comm.reduce_scatter(shard, x, _C.ReduceOp.SUM).wait()
            comm.all_reduce(x, REDUCE_OPS["avg"]).wait()
            results += [shard.float().tolist(), x.float().tolist()]
    return results


def test_same_bits_as_gloo() -> None:
    over_gloo, over_shm = (
        run_ranks(3, random_reductions, environment={"BMTRAIN_CPU_TRANSPORT": transport})
        for transport in ("gloo", "shm")
    )
    assert over_gloo == over_shm


def mappings() -> list[tuple[int, int]]:
    """Virtual and resident KiB of each segment that this process maps."""
    found = []
    smaps = Path("/proc/self/smaps").read_text()
    for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
        if "/memfd:bmtrain" in area:
            size, resident = (
                int(re.search(rf"(?m)^{key}: +(\d+) kB", area)[1])  # type: ignore[index]
                for key in ("Size", "Rss")
            )
            found.append((size, resident))
    return found


def memory_taken() -> list[tuple[int, int]]:
    comm = bmtrain.config["comm"]
    numel = MIB // 4
    for _ in range(200):  # 200 MiB through each ring, one after the other
        comm.all_gather(torch.empty(comm.size * numel), torch.ones(numel)).wait()
        comm.barrier()
    return mappings()


def test_memory_is_what_is_under_way() -> None:
    for areas in run_ranks(2, memory_taken, fresh=True):
        assert len(areas) == 4  # two ranks, gathers and reductions
        assert all(size * 1024 == _C.ShmCommunicator.segment_bytes(2) for size, _ in areas)
        assert all(resident <= 2 * 1024 + 256 for _, resident in areas)


def killed_between() -> list[str]:
    comm = bmtrain.config["comm"]
    comm.all_reduce(torch.ones(MIB), _C.ReduceOp.SUM).wait()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError, match="rank 1 died"):
        comm.recv(torch.empty(4), 1).wait()
    return sorted(os.listdir("/dev/shm"))


def test_a_killed_rank_leaves_nothing() -> None:
    before = sorted(os.listdir("/dev/shm"))
    outcomes = rank_outcomes(2, killed_between, fresh=True)
    assert outcomes[1].status is Status.DIED
    assert outcomes[0].status is Status.RETURNED, outcomes[0]
    assert not [name for name in set(outcomes[0].value) - set(before) if "bmtrain" in name]


def fork_a_child() -> float:
    """A forked child (a data loader's worker) that ends does not close the rank's communicators."""
    comm = bmtrain.config["comm"]
    child = os.fork()
    if child == 0:
        bmtrain._ranks.context.uninstall()
        os._exit(0)
    os.waitpid(child, 0)
    comm.barrier()
    x = torch.ones(4)
    comm.all_reduce(x, _C.ReduceOp.SUM).wait()
    return float(x.sum())


def test_forked_children() -> None:
    assert run_ranks(2, fork_a_child, fresh=True) == [8.0, 8.0]


def out_of_order() -> str:
    comm = bmtrain.config["comm"]
    comm.barrier()
    with pytest.raises(CommunicationError) as error:
        if comm.rank == 0:
            comm.all_gather(torch.empty(8), torch.ones(4), "block 7").wait()
        else:
            comm.all_reduce(torch.ones(3), _C.ReduceOp.SUM, "loss").wait()
        comm.barrier()
    return str(error.value)


def test_mismatch_is_told_at_once() -> None:
    messages = run_ranks(2, out_of_order, init={"timeout": 600}, fresh=True)
    # The ranks' answers compared, or, if one of them is slow to answer, what the other has read.
    told = ("operation differs on group", "is in another operation")
    assert all(any(words in message for words in told) for message in messages), messages
    text = " ".join(messages)
    assert "all_gather #" in text
    assert "all_reduce #" in text


def close_with_work_under_way() -> bool:
    """A closed rank still gets what it has posted: its peers do not write over what it has not read."""
    comm = bmtrain.config["comm"]
    got = torch.empty(MIB * comm.size)
    work = comm.all_gather(got, torch.full((MIB,), float(comm.rank)))
    bmtrain._ranks.context.current().groups[
        "zero"
    ].reduce_comm.barrier()  # both have published, neither has read
    if comm.rank == 1:
        comm.close()
        time.sleep(0.3)  # the other rank goes on meanwhile
        work.wait()
    else:
        time.sleep(0.1)
        dropped = comm.all_gather(torch.empty(MIB * comm.size), torch.full((MIB,), 9.0))
        del dropped
        work.wait()
    return all(bool(got[r * MIB : (r + 1) * MIB].eq(r).all()) for r in range(comm.size))


def test_close_with_work_under_way() -> None:
    assert run_ranks(2, close_with_work_under_way, fresh=True) == [True, True]
