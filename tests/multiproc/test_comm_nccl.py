"""bmtrain.nccl: raw buffers, storages, grouped calls, groups made by a program."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness import run_ranks

import bmtrain
from bmtrain import nccl
from bmtrain._ranks import objects as _objects

WORLDS = pytest.mark.parametrize("world", [1, 2, 4])


def library_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [f"{w.filename}: {w.message}" for w in caught if "/bmtrain/" in w.filename]


def storages() -> None:  # BC-72
    comm = bmtrain.config["comm"]
    size, rank = comm.size, comm.rank
    total = sum(range(1, size + 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t = torch.full((5,), rank + 1.0)
        nccl.allReduce(t.storage(), t.storage(), "sum", comm)
        assert t.eq(total).all()
        src, dst = torch.full((5,), rank + 1.0), torch.zeros(5)
        nccl.allReduce(src, dst.storage(), "max", comm)
        assert dst.eq(size).all()
        assert src.eq(rank + 1).all()
        nccl.reduce(src, dst, "sum", size - 1, comm)
        if rank == size - 1:
            assert dst.eq(total).all()
        nccl.broadcast(src, dst, size - 1, comm)
        assert dst.eq(size).all()
        nccl.broadcast(src.untyped_storage(), dst.untyped_storage(), 0, comm)
        assert dst.eq(1).all()
        whole = torch.zeros(5 * size)
        nccl.allGather(src.storage(), whole.storage(), comm)
        assert torch.equal(whole, torch.arange(1.0, size + 1).repeat_interleave(5))
        nccl.allGather(src.untyped_storage(), whole.untyped_storage(), comm)
        nccl.reduceScatter(whole, dst, "sum", comm)
        assert dst.eq((rank + 1) * size).all()
        # a storage means all of it, whatever view it came from
        t = torch.full((2, 5), rank + 1.0)
        nccl.allReduce(t[0].storage(), t[0].storage(), "sum", comm)
        assert t.eq(total).all()
        legacy = torch.FloatStorage(3)
        nccl.broadcast(legacy, legacy, 0, comm)
    assert library_warnings(caught) == []
    assert nccl.commCount(comm) == size
    assert nccl.commRank(comm) == rank
    assert isinstance(comm, nccl.NCCLCommunicator)


@WORLDS
def test_storages(world: int) -> None:
    run_ranks(world, storages)


def exchange() -> None:  # BC-72
    comm = bmtrain.config["comm"]
    peer = comm.rank ^ 1
    mine, theirs = torch.full((70_000,), float(comm.rank)), torch.zeros(70_000)
    extra = torch.ones(3)
    nccl.groupStart()
    nccl.groupStart()
    nccl.send(mine.storage(), peer, comm)
    nccl.recv(theirs.storage(), peer, comm)
    nccl.groupEnd()
    nccl.allReduce(extra, extra, "sum", comm)
    nccl.groupEnd()
    assert theirs.eq(peer).all()
    assert extra.eq(comm.size).all()
    with pytest.raises(RuntimeError, match="groupStart"):
        nccl.groupEnd()


@pytest.mark.parametrize("world", [2, 4])
def test_send_and_receive_in_a_group(world: int) -> None:
    run_ranks(world, exchange)


def user_group() -> None:
    size, rank = bmtrain.world_size(), bmtrain.rank()
    members = [r for r in range(size) if r % 2 == rank % 2]
    ids = _objects.allgather_objects(nccl.getUniqueId() if rank == members[0] else b"")
    unique_id = ids[members[0]]
    assert len(unique_id) == 128
    comm = nccl.commInitRank(unique_id, len(members), members.index(rank))
    assert (nccl.commCount(comm), nccl.commRank(comm)) == (len(members), members.index(rank))
    x = torch.tensor([float(rank)])
    nccl.allReduce(x, x, "sum", comm)
    assert x.item() == sum(members)
    assert bmtrain.distributed.all_gather(torch.tensor(rank), comm).tolist() == members
    nccl.commDestroy(comm)
    for call in (
        lambda: nccl.allReduce(x, x, "sum", comm),
        lambda: nccl.commCount(comm),
        lambda: nccl.commDestroy(comm),
    ):
        with pytest.raises(RuntimeError, match=r"closed|destroyed"):
            call()
    if len(members) > 1:
        with pytest.raises(ValueError, match="before"):
            nccl.commInitRank(unique_id, len(members), members.index(rank))


@WORLDS
def test_groups_made_by_a_program(world: int) -> None:
    run_ranks(world, user_group)


def bad_calls() -> None:
    comm = bmtrain.config["comm"]
    size = comm.size
    x, y = torch.ones(4), torch.ones(4 * size)
    cases = [
        (ValueError, "sum, avg, max, min, prod", lambda: nccl.allReduce(x, x, "median", comm)),
        (ValueError, "equal size", lambda: nccl.allReduce(x, torch.ones(5), "sum", comm)),
        (TypeError, "dtype", lambda: nccl.allReduce(x, x.double(), "sum", comm)),
        (TypeError, "untyped", lambda: nccl.allReduce(x.untyped_storage(), x.untyped_storage(), "sum", comm)),
        (TypeError, "contiguous", lambda: nccl.broadcast(y[::2], y[::2], 0, comm)),
        (TypeError, "tensor or a storage", lambda: nccl.send([1.0], 0, comm)),
        (ValueError, "elements", lambda: nccl.allGather(x, torch.ones(4 * size + 1), comm)),
        (ValueError, "elements", lambda: nccl.reduceScatter(torch.ones(4 * size + 1), x, "sum", comm)),
        (TypeError, "communicator", lambda: nccl.commCount(3)),
        (ValueError, "getUniqueId", lambda: nccl.commInitRank(b"rubbish", 2, 0)),
        (ValueError, "rank", lambda: nccl.commInitRank(nccl.getUniqueId(), 2, 2)),
    ]
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()
    nccl.allGather(x, y, comm)


@pytest.mark.parametrize("world", [1, 2])
def test_bad_calls(world: int) -> None:
    run_ranks(world, bad_calls)


def objects() -> None:  # BC-73
    size, rank = bmtrain.world_size(), bmtrain.rank()
    mine = {"rank": rank, "data": "x" * (rank * 10_000), "none": None}
    everyone = _objects.allgather_objects(mine)
    assert [o["rank"] for o in everyone] == list(range(size))
    assert [len(o["data"]) for o in everyone] == [r * 10_000 for r in range(size)]
    assert _objects.allgather_object(rank, bmtrain.config["comm"]) == list(range(size))
    assert _objects.broadcast_object([rank] * 3, src=size - 1) == [size - 1] * 3
    with pytest.raises(ValueError, match="src"):
        _objects.broadcast_object(1, src=size)
    if size > 1:
        bad = (lambda: 1) if rank == 1 else 1
        for _ in range(2):  # on all ranks, and the communicator lives on
            with pytest.raises(RuntimeError, match="rank 1"):
                _objects.allgather_objects(bad)
            with pytest.raises(RuntimeError, match="rank 1"):
                _objects.broadcast_object(bad, src=1)
    assert _objects.allgather_objects(rank) == list(range(size))


@WORLDS
def test_objects(world: int) -> None:
    run_ranks(world, objects)


def benchmarks() -> str:
    import contextlib
    import io

    from bmtrain import benchmark

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for run in (benchmark.all_gather, benchmark.reduce_scatter, benchmark.send_recv):
            assert run(max_bytes=2**14) is None
    return text.getvalue()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_benchmarks(world: int) -> None:
    first, *others = run_ranks(world, benchmarks)
    for name in ("all_gather", "reduce_scatter", "send_recv"):
        assert name in first
    assert first.count("16384") == 3
    assert all(text == "" for text in others)
