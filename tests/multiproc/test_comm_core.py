"""Communicators of the core: every operation, dtype and size, several in flight, order of the reduction."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

import bmtrain
from bmtrain import _C
from bmtrain._ranks import shm_meeting
from bmtrain._ranks.comm import REDUCE_OPS

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
SIZES = [
    0,
    1,
    7,
    1025,
    40000,
]  # the last one is beyond what one exchange reduces, in every dtype but the 1-byte ones


def cases(worlds: list[int], of_hosts: list[int]) -> Any:
    """Transports with numbers of ranks; several hosts have two each."""
    found = [(transport, world) for transport in ("shm", "gloo") for world in worlds]
    found += [("shm+gloo", world) for world in of_hosts]
    return pytest.mark.parametrize(("transport", "world"), found)


def run_over(transport: str, world: int, function: Callable[[], Any], **options: Any) -> list[Any]:
    if transport == "shm+gloo":
        return run_ranks(world, on_hosts_of_two, function.__name__, init=False, fresh=True, **options)
    return run_ranks(world, function, environment={"BMTRAIN_CPU_TRANSPORT": transport}, **options)


def on_hosts_of_two(function: str) -> Any:
    """Ranks of one machine that take it for several."""
    host = int(os.environ["RANK"]) // 2
    shm_meeting.place = lambda: f"host {host}"  # type: ignore[assignment]
    bmtrain.init_distributed(timeout=60)
    assert bmtrain.config["comm"].backend == "shm+gloo"
    return globals()[function]()


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    seed = rank * 1000 + numel
    if dtype.is_floating_point:
        return normal(seed, numel).to(dtype, copy=True)
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 120, (numel,), generator=random).to(dtype)


@functools.cache
def normal(seed: int, numel: int) -> torch.Tensor:
    """Drawn once for all dtypes and operations."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reference: one rank after the other, 16-bit in fp32, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    combine = {
        "sum": torch.add,
        "avg": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
        "prod": torch.mul,
    }[op]
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = combine(result, part.to(wide))
    if op == "avg":
        result = result / len(parts)
    return result.to(dtype)


def ops_of(dtype: torch.dtype) -> list[str]:
    return [op for op in REDUCE_OPS if op != "avg" or dtype.is_floating_point]


def movement() -> None:
    comm = bmtrain.config["comm"]
    size, rank = comm.size, comm.rank
    for dtype in DTYPES:
        for numel in SIZES:
            parts = [values(r, numel, dtype) for r in range(size)]
            whole = torch.empty(size * numel, dtype=dtype)
            comm.all_gather(whole, parts[rank], "test").wait()
            assert torch.equal(whole, torch.cat(parts))
            inplace = torch.zeros(size * numel, dtype=dtype)
            own = inplace[rank * numel : (rank + 1) * numel]
            own.copy_(parts[rank])
            comm.all_gather(inplace, own).wait()
            assert torch.equal(inplace, whole)
            outgoing = torch.cat([values(rank * size + r, numel, dtype) for r in range(size)])
            incoming = torch.empty_like(outgoing)
            comm.all_to_all(incoming, outgoing).wait()
            assert torch.equal(
                incoming, torch.cat([values(r * size + rank, numel, dtype) for r in range(size)])
            )
            root = size - 1
            copy = parts[rank].clone()
            comm.broadcast(copy, root).wait()
            assert torch.equal(copy, parts[root])


def count_of(source: int, target: int) -> int:
    """Elements that a rank sends to another, or keeps: none for some, more than a ring of shared memory has for one."""
    return (
        0 if (source + target) % 3 == 2 else 2_000_003 if source == 1 and target == 0 else 5 * source + target
    )


def uneven() -> None:
    comm = bmtrain.config["comm"]
    size, rank = comm.size, comm.rank
    for dtype in (torch.bfloat16, torch.int64):
        sent = [values(rank * size + r, count_of(rank, r), dtype) for r in range(size)]
        received = [values(r * size + rank, count_of(r, rank), dtype) for r in range(size)]
        result = torch.empty(sum(map(len, received)), dtype=dtype)
        counts = [len(part) for part in received], [len(part) for part in sent]
        comm.reset_traffic()
        comm.all_to_all_uneven(result, torch.cat(sent), *counts).wait()
        assert torch.equal(result, torch.cat(received))
        others = sum(counts[1]) - counts[1][rank]
        assert comm.traffic()["all_to_all"] == (1, others * dtype.itemsize)


@cases([1, 2, 4], [4])
def test_all_to_all_of_any_sizes(transport: str, world: int) -> None:
    run_over(transport, world, uneven)


def reductions() -> None:
    comm = bmtrain.config["comm"]
    size, rank = comm.size, comm.rank
    for dtype in DTYPES:
        for numel in SIZES:
            parts = [values(r, numel, dtype) for r in range(size)]
            for op in ops_of(dtype):
                expected = reduced(parts, op)
                result = parts[rank].clone()
                comm.all_reduce(result, REDUCE_OPS[op]).wait()
                assert torch.equal(result, expected), (dtype, numel, op)
                result = parts[rank].clone()
                comm.reduce(result, REDUCE_OPS[op], size - 1).wait()
                if rank == size - 1:
                    assert torch.equal(result, expected), (dtype, numel, op)
                shards = [values(r, size * numel, dtype) for r in range(size)]
                shard = torch.empty(numel, dtype=dtype)
                comm.reduce_scatter(shard, shards[rank], REDUCE_OPS[op]).wait()
                mine = slice(rank * numel, (rank + 1) * numel)
                assert torch.equal(shard, reduced([s[mine] for s in shards], op)), (dtype, numel, op)


@cases([1, 2, 4], [4, 6])
def test_movement(transport: str, world: int) -> None:
    run_over(transport, world, movement)


@cases([1, 2, 4], [4])
def test_reductions_are_in_rank_order(transport: str, world: int) -> None:
    run_over(transport, world, reductions, timeout=120)


def special_values() -> None:
    comm = bmtrain.config["comm"]
    nan, inf = float("nan"), float("inf")
    rows = [[nan, 1.0, inf, -inf, 1.0], [2.0, nan, 1.0, inf, inf]]
    for op, expected in (
        ("max", [nan, nan, inf, inf, inf]),
        ("min", [nan, nan, 1.0, -inf, 1.0]),
        ("sum", [nan, nan, inf, nan, inf]),
    ):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = torch.tensor(rows[comm.rank], dtype=dtype)
            comm.all_reduce(x, REDUCE_OPS[op]).wait()
            torch.testing.assert_close(x.double(), torch.tensor(expected).double(), equal_nan=True)
    # 2048 + 1 + 1 is 2048 in fp16 when it rounds after each addition
    x = torch.tensor([2048.0 if comm.rank == 0 else 2.0], dtype=torch.float16)
    comm.all_reduce(x, _C.ReduceOp.SUM).wait()
    assert x.item() == 2050.0


@cases([2], [])
def test_special_values(transport: str, world: int) -> None:
    run_over(transport, world, special_values)


def in_flight() -> None:
    """Posted in one order on all ranks, waited for in a different one on each."""
    comm = bmtrain.config["comm"]
    size, rank = comm.size, comm.rank
    big = 50_000
    gathers, reduces, scatters, works = [], [], [], []
    for i in range(4):
        whole = torch.empty(size * big)
        works.append(comm.all_gather(whole, torch.full((big,), 10.0 * i + rank), f"block {i}"))
        gathers.append(whole)
        x = torch.full((big,), 1.0 + i + rank)
        works.append(comm.all_reduce(x, _C.ReduceOp.SUM))  # two exchanges
        reduces.append(x)
        shard = torch.empty(big // 10)
        works.append(
            comm.reduce_scatter(shard, torch.full((size * big // 10,), float(rank)), _C.ReduceOp.SUM)
        )
        scatters.append(shard)
    order = list(range(len(works)))
    if rank % 2:
        order.reverse()
    else:
        order = order[::3] + order[1::3] + order[2::3]
    for i in order:
        works[i].wait()
        works[i].wait()
        assert works[i].is_completed()
    for i in range(4):
        expected = torch.arange(size).repeat_interleave(big) + 10.0 * i
        assert torch.equal(gathers[i], expected)
        assert reduces[i].eq(size * (1.0 + i) + sum(range(size))).all()
        assert scatters[i].eq(sum(range(size))).all()


@cases([2, 4], [4])
def test_in_flight_out_of_order(transport: str, world: int) -> None:
    run_over(transport, world, in_flight)


def messages() -> None:
    comm = bmtrain.config["comm"]
    size, rank = comm.size, comm.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    incoming = [torch.empty(i * 100, dtype=torch.int64) for i in range(5)]
    receives = [comm.recv(x, before, "ring") for x in incoming]
    sends = [comm.send(torch.full((i * 100,), rank * 10 + i), after, "ring") for i in range(5)]
    for work in [*receives[::-1], *sends]:
        work.wait()
    for i, x in enumerate(incoming):
        assert x.eq(before * 10 + i).all()


@cases([1, 2, 4], [4])
def test_messages_keep_their_order(transport: str, world: int) -> None:
    run_over(transport, world, messages if world > 1 else messages_to_itself)


def messages_to_itself() -> None:
    comm = bmtrain.config["comm"]
    comm.send(torch.tensor([1, 2]), 0).wait()
    comm.send(torch.tensor([3.0]), 0).wait()
    x, y = torch.empty(2, dtype=torch.int64), torch.empty(1)
    comm.recv(x, 0).wait()
    comm.recv(y, 0).wait()
    assert x.tolist() == [1, 2]
    assert y.tolist() == [3.0]


def one_work_from_many_threads() -> None:
    comm = bmtrain.config["comm"]
    x = torch.full((100_000,), float(comm.rank + 1))
    work = comm.all_reduce(x, _C.ReduceOp.SUM)
    threads = [threading.Thread(target=work.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert x.eq(sum(range(1, comm.size + 1))).all()  # reduced exactly once


@cases([2], [4])
def test_one_work_from_many_threads(transport: str, world: int) -> None:
    run_over(transport, world, one_work_from_many_threads)


def traffic() -> dict[str, tuple[int, int]]:
    comm = bmtrain.config["comm"]
    size, rank = comm.size, comm.rank
    comm.reset_traffic()
    comm.all_gather(torch.empty(size * 10), torch.zeros(10)).wait()
    comm.all_to_all(torch.empty(size * 10), torch.zeros(size * 10)).wait()
    comm.reduce_scatter(torch.empty(10), torch.zeros(size * 10), _C.ReduceOp.SUM).wait()
    comm.all_reduce(torch.zeros(10), _C.ReduceOp.SUM).wait()
    comm.all_reduce(torch.zeros(size * 20_000), _C.ReduceOp.SUM).wait()
    comm.broadcast(torch.zeros(10), 0).wait()
    comm.barrier()
    assert "rank " + str(rank) in repr(comm)
    counted: dict[str, tuple[int, int]] = comm.traffic()
    return counted


@cases([1, 2, 4], [4])
def test_traffic(transport: str, world: int) -> None:
    others = world - 1
    for rank, counted in enumerate(run_over(transport, world, traffic)):
        large = 2 * others * 80_000 if world > 1 else 0
        assert counted["all_gather"] == (1, 40 * others)
        assert counted["all_to_all"] == (1, 40 * others)
        assert counted["reduce_scatter"] == (1, 40 * others)
        assert counted["all_reduce"] == (2, 40 * others + large)
        assert counted["broadcast"] == (1, 40 * others if rank == 0 else 0)
        assert counted["barrier"][0] == 1


def bad_arguments() -> None:
    comm = bmtrain.config["comm"]
    size = comm.size
    whole, part = torch.empty(size * 4), torch.ones(4)
    square = torch.ones(4, 4)
    add = _C.ReduceOp.SUM
    with FakeTensorMode():
        fake = torch.ones(4)
    cases = [
        (ValueError, "elements", lambda: comm.all_gather(torch.empty(size * 4 + 1), part)),
        (TypeError, "dtype", lambda: comm.all_gather(whole.double(), part)),
        (
            ValueError,
            "a number for each of",
            lambda: comm.all_to_all_uneven(part.clone(), part, [], [4]),
        ),
        (
            ValueError,
            "add up to 4 elements",
            lambda: comm.all_to_all_uneven(part.clone(), part, [1] * size, [5] + [0] * (size - 1)),
        ),
        (TypeError, "contiguous", lambda: comm.all_reduce(square.t(), add)),
        (TypeError, "must have memory", lambda: comm.all_reduce(fake, add)),
        (TypeError, "must be on", lambda: comm.all_reduce(torch.empty(4, device="meta"), add)),
        (ValueError, "root", lambda: comm.broadcast(part, size)),
        (ValueError, "peer", lambda: comm.send(part, -1)),
        (
            ValueError,
            "floating-point",
            lambda: comm.all_reduce(torch.ones(4, dtype=torch.int32), _C.ReduceOp.AVG),
        ),
        (TypeError, "dtype", lambda: comm.all_reduce(torch.ones(4, dtype=torch.complex64), add)),
        (ValueError, "elements", lambda: comm.reduce_scatter(part, torch.empty(size * 4 + 1), add)),
        (TypeError, "incompatible", lambda: comm.all_reduce(None, add)),
    ]
    if size > 1:
        neighbour = comm.rank ^ 1  # of the same host
        cases += [
            (TypeError, "contiguous", lambda: comm.send(square.t(), neighbour)),
            (TypeError, "contiguous", lambda: comm.recv(square.t(), neighbour)),
        ]
    counted = comm.traffic()
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()
    assert comm.traffic() == counted
    comm.all_gather(whole, part).wait()  # nothing has moved: the ranks still agree
    assert whole.eq(1).all()


@cases([1, 2], [4])
def test_bad_arguments(transport: str, world: int) -> None:
    run_over(transport, world, bad_arguments)
