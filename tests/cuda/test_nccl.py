"""The NCCL communicator over a fake device and a fake NCCL (tests/cuda/fake): it moves what it should, every failure of
every call reaches the caller, one failure ends all communicators, and nothing hangs. Then the real library, if it is
installed: without a driver it can still be opened, and refuses cleanly."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from harness.fake_nccl import ROOT
from torch import Tensor

from bmtrain import _C
from bmtrain._ranks import comm_nccl, init_options
from bmtrain._ranks import groups as rank_groups
from bmtrain._ranks.groups import connect_groups
from bmtrain.errors import CommunicationError
from bmtrain.topology import GroupKind, Topology

CPU = torch.device("cpu")
RESULTS = range(1, 7)  # every error that NCCL has


class Ranks:
    """The communicators of all ranks, in one process; calls are made for one rank after the other."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.library = _C.NcclLibrary([])
        unique_id = self.library.make_unique_id()
        self.comms = [
            _C.NcclCommunicator(self.library, unique_id, rank, size, "zero", CPU, timeout)
            for rank in range(size)
        ]

    def run(self, call: Callable[[_C.NcclCommunicator], _C.Work]) -> None:
        for work in [call(comm) for comm in self.comms]:
            assert work.is_completed()
            work.wait()


def spread(size: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_moves(fake: ctypes.CDLL, size: int) -> None:
    ranks = Ranks(size)
    inputs = spread(size, 12)
    outputs = [torch.full((12 * size,), torch.nan) for _ in range(size)]
    for rank, output in enumerate(outputs):
        output[12 * rank : 12 * (rank + 1)] = inputs[rank]
    own = [output[12 * rank : 12 * (rank + 1)] for rank, output in enumerate(outputs)]
    ranks.run(lambda comm: comm.all_gather(outputs[comm.rank], own[comm.rank]))  # in place
    assert all(torch.equal(output, torch.cat(inputs)) for output in outputs)

    received = [torch.empty(12) for _ in range(size)]
    ranks.run(lambda comm: comm.all_to_all(received[comm.rank], inputs[comm.rank]))
    for rank in range(size):
        assert torch.equal(received[rank], torch.cat([x.chunk(size)[rank] for x in inputs]))

    copies = [x.clone() for x in inputs]
    ranks.run(lambda comm: comm.broadcast(copies[comm.rank], size - 1))
    assert all(torch.equal(copy, inputs[-1]) for copy in copies)
    assert ranks.comms[0].traffic()["all_gather"] == (1, 48 * (size - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_reduce_scatter_sums_in_rank_order_and_fp32(fake: ctypes.CDLL, dtype: torch.dtype, op: str) -> None:
    ranks = Ranks(4)
    inputs = spread(4, 64, dtype)
    outputs = [torch.empty(16, dtype=dtype) for _ in range(4)]
    ranks.run(
        lambda comm: comm.reduce_scatter(outputs[comm.rank], inputs[comm.rank], getattr(_C.ReduceOp, op))
    )
    total = inputs[0].float() + inputs[1].float() + inputs[2].float() + inputs[3].float()
    expected = (total / (4 if op == "AVG" else 1)).to(dtype)
    assert torch.equal(torch.cat(outputs), expected)
    assert (fake.fake_calls(b"ReduceScatter") > 0) == (dtype == torch.float32)


@pytest.mark.parametrize(("peers", "groups"), [(5, 1), (3, 2), (2, 3), (1, 5)])
def test_an_exchange_with_many_ranks_is_several_groups(fake: ctypes.CDLL, peers: int, groups: int) -> None:
    """NCCL takes 2,048 calls in a group, two for each peer."""
    ranks = Ranks(5)
    assert [comm.peers_per_group for comm in ranks.comms] == [1024] * 5
    for comm in ranks.comms:
        comm.peers_per_group = peers
    inputs, received = spread(5, 20), [torch.full((20,), torch.nan) for _ in range(5)]
    ranks.run(lambda comm: comm.all_to_all(received[comm.rank], inputs[comm.rank]))
    for rank in range(5):
        assert torch.equal(received[rank], torch.cat([x.chunk(5)[rank] for x in inputs]))
    assert fake.fake_calls(b"GroupStart") == 5 * groups
    assert fake.fake_calls(b"Send") == fake.fake_calls(b"Recv") == 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_reduce_scatter_is_the_librarys_own(fake: ctypes.CDLL, dtype: torch.dtype) -> None:
    ranks = Ranks(2)
    inputs, outputs = (
        [torch.ones(8, dtype=dtype) for _ in range(2)],
        [torch.zeros(4, dtype=dtype) for _ in range(2)],
    )
    for comm in ranks.comms:
        comm.ring_reduce_scatter(outputs[comm.rank], inputs[comm.rank])
    assert fake.fake_calls(b"ReduceScatter") == 2
    assert fake.fake_calls(b"Send") == 0
    assert ranks.comms[0].traffic()["reduce_scatter"] == (1, 4 * dtype.itemsize)


def test_what_has_completed_is_not_asked_again(fake: ctypes.CDLL) -> None:
    """So that nobody asks events while a program captures a graph after `synchronize`."""
    comm, watchdog = Ranks(1).comms[0], _C.Watchdog(60.0)
    guarded = _C.GuardedCommunicator(comm, watchdog, "zero/0", [0], False)
    fake.fake_stuck(1, 0)
    works = [guarded.all_reduce(torch.ones(1), _C.ReduceOp.SUM) for _ in range(3)]
    works[-1].wait()
    fake.fake_stuck(0, 0)
    guarded.forget_completed()
    asked = fake.fake_asked()
    comm.poll()
    assert watchdog.overdue() is None
    assert works[0].is_completed()
    assert fake.fake_asked() == asked


@pytest.mark.parametrize(
    ("version", "driver", "before", "after"),
    [
        ("2.28.9", 12030, None, "1"),
        ("2.26.2", 13000, None, "1"),
        ("2.25.1", 13000, None, None),
        ("2.28.9", 12020, None, None),
        ("2.28.9", 13000, "0", "0"),
    ],
)
def test_the_order_of_launches_is_asked_for_where_it_can_be_had(
    monkeypatch: pytest.MonkeyPatch, version: str, driver: int, before: str | None, after: str | None
) -> None:
    environment = {} if before is None else {"NCCL_LAUNCH_ORDER_IMPLICIT": before}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(comm_nccl, "_driver_version", lambda: driver)
    comm_nccl.order_launches(version)
    assert environment.get("NCCL_LAUNCH_ORDER_IMPLICIT") == after


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_rocm_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"backend: .*ROCm.*not supported.*use 'gloo'"):
        init_options._choose_backend(backend)
    assert init_options._choose_backend("gloo") == "gloo"


def test_the_host_sleeps_shortly_while_nccl_launches() -> None:
    compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", "-Wall", "-Icsrc"]
    subprocess.run([*compiler, "tests/cuda/host/pause.cpp"], cwd=ROOT, check=True, timeout=120)


def test_reductions_and_messages(fake: ctypes.CDLL) -> None:
    ranks = Ranks(2)
    x = spread(2, 5)
    both = [t.clone() for t in x]
    ranks.run(lambda comm: comm.all_reduce(both[comm.rank], _C.ReduceOp.MAX))
    assert all(torch.equal(t, torch.maximum(*x)) for t in both)
    at_root = [t.clone() for t in x]
    ranks.run(lambda comm: comm.reduce(at_root[comm.rank], _C.ReduceOp.SUM, 1))
    assert torch.equal(at_root[1], x[0] + x[1])
    here, there = torch.empty(5), torch.empty(5)
    works = []
    for comm, out in zip(ranks.comms, (here, there), strict=True):
        comm.begin_group()  # both send first: without a group neither would get to its recv
        works.append(comm.send(x[comm.rank], 1 - comm.rank))
        works.append(comm.recv(out, 1 - comm.rank))
        with pytest.raises(RuntimeError, match="group has not ended"):
            works[-1].wait()
        comm.end_group()
    for work in works:
        work.wait()
    assert torch.equal(here, x[1])
    assert torch.equal(there, x[0])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda comm: comm.barrier(), ranks.comms))


def test_split(fake: ctypes.CDLL) -> None:
    ranks = Ranks(4)
    parts = [comm.split(comm.rank % 2, comm.rank // 2, 2, f"part{comm.rank % 2}") for comm in ranks.comms]
    x = [torch.tensor([float(rank)]) for rank in range(4)]
    works = []
    for part, value in zip(parts, x, strict=True):
        assert (part.size, part.backend) == (2, "nccl")
        works.append(part.all_reduce(value, _C.ReduceOp.SUM))
    for work in works:
        work.wait()
    assert [value.item() for value in x] == [2.0, 4.0, 2.0, 4.0]


class Unwatched:
    """A watchdog's place, in a process that stands for all ranks."""

    def guard(self, comm: _C.Communicator, key: str, members: tuple[int, ...]) -> _C.Communicator:
        return comm


@pytest.mark.parametrize(("tp_size", "pipe_size", "num_groups"), [(1, 1, 1), (2, 1, 3), (2, 2, 6)])
def test_groups_are_split_off_the_world(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tp_size: int, pipe_size: int, num_groups: int
) -> None:
    library = _C.NcclLibrary([])
    ids = {purpose: library.make_unique_id() for purpose in ("gather", "reduce")}

    def create(store: Any, key: str, rank: int, size: int, timeout: float, name: str) -> _C.Communicator:
        unique_id = ids[key.rpartition("/")[2]]
        return _C.NcclCommunicator(library, unique_id, rank, size, name, CPU, timeout)

    monkeypatch.setattr(rank_groups, "create_nccl", create)
    watch: Any = Unwatched()
    places = [Topology(rank, 8, tp_size, pipe_size) for rank in range(8)]
    ranks = [connect_groups(place, "nccl", 60.0, None, watch) for place in places]
    assert fake.fake_calls(b"CommInitRankConfig") == 2 * 8
    assert fake.fake_calls(b"CommSplit") == 2 * 8 * (num_groups - 1)
    for kind in GroupKind:
        for purpose in ("comm", "reduce_comm"):
            values = [torch.tensor([2.0**rank]) for rank in range(8)]
            works = [
                getattr(groups[kind.value], purpose).all_reduce(value, _C.ReduceOp.SUM)
                for groups, value in zip(ranks, values, strict=True)
            ]
            for work in works:
                work.wait()
            for place, value in zip(places, values, strict=True):
                assert value.item() == sum(2.0**rank for rank in place.members(kind))


CALLS = (
    "AllGather",
    "ReduceScatter",
    "AllReduce",
    "Reduce",
    "Broadcast",
    "Send",
    "Recv",
    "GroupStart",
    "GroupEnd",
    "CommGetAsyncError",
    "CommSplit",
)


def operations(comm: _C.NcclCommunicator) -> dict[str, Callable[[], Any]]:
    small, large = torch.zeros(4), torch.zeros(4 * comm.size)
    total = _C.ReduceOp.SUM
    return {
        "AllGather": lambda: comm.all_gather(large, small),
        "ReduceScatter": lambda: comm.reduce_scatter(small, large, total),
        "AllReduce": lambda: comm.all_reduce(small, total),
        "Reduce": lambda: comm.reduce(small, total, 0),
        "Broadcast": lambda: comm.broadcast(small, 0),
        "Send": lambda: comm.send(small, 1 - comm.rank),
        "Recv": lambda: comm.recv(small, 1 - comm.rank),
        "GroupStart": lambda: comm.all_reduce(small, total),
        "GroupEnd": lambda: comm.all_reduce(small, total),
        "CommGetAsyncError": lambda: comm.all_reduce(small, total),
        "CommSplit": lambda: comm.split(0, comm.rank, comm.size, "part"),
    }


def assert_all_aborted(fake: ctypes.CDLL, comms: Sequence[_C.NcclCommunicator]) -> None:
    for comm in comms:
        with pytest.raises(CommunicationError, match="was aborted"):
            comm.all_reduce(torch.zeros(1), _C.ReduceOp.SUM)
    deadline = time.monotonic() + 30
    while fake.fake_open() > 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert fake.fake_open() == 0


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("call", CALLS)
def test_every_failure_of_every_call_aborts_all(fake: ctypes.CDLL, call: str, result: int) -> None:
    ranks = Ranks(2)
    library = ranks.library
    bystander = _C.NcclCommunicator(library, library.make_unique_id(), 0, 1, "other", CPU, 60.0)
    fake.fake_fail(call.encode(), result, 0)
    # What asks for late errors may be the thread that polls, of any of the communicators.
    where = "" if call == "CommGetAsyncError" else r'group "zero", rank 0 of 2.*'
    with pytest.raises(CommunicationError, match=rf"{where}result {result}"):
        operations(ranks.comms[0])[call]()
    fake.fake_fail(call.encode(), 0, 0)
    assert_all_aborted(fake, [*ranks.comms, bystander])


@pytest.mark.parametrize("call", ["GetUniqueId", "CommInitRankConfig"])
@pytest.mark.parametrize("result", RESULTS)
def test_failures_before_there_is_a_communicator(fake: ctypes.CDLL, call: str, result: int) -> None:
    fake.fake_fail(call.encode(), result, 0)
    with pytest.raises(CommunicationError, match=f"result {result}"):
        Ranks(1)
    assert fake.fake_open() == 0


@pytest.mark.parametrize("call", ["CommAbort", "CommFinalize", "CommDestroy"])
@pytest.mark.parametrize("result", RESULTS)
def test_failures_at_the_end_are_silent(fake: ctypes.CDLL, call: str, result: int) -> None:
    ranks = Ranks(2)
    fake.fake_fail(call.encode(), result, 0)
    for comm in ranks.comms:
        comm.close()
        comm.close()
        assert comm.closed
        with pytest.raises(RuntimeError, match="is closed"):
            comm.all_reduce(torch.zeros(1), _C.ReduceOp.SUM)
    del ranks, comm


@pytest.mark.parametrize("aborts", [True, False])
def test_what_a_closed_communicator_had_under_way_has_no_result(fake: ctypes.CDLL, aborts: bool) -> None:
    """Whether it is aborted then, or ends when it has waited long enough."""
    comm, _ = Ranks(2).comms  # rank 1 never takes part
    work = comm.all_gather(torch.zeros(8), torch.zeros(4))
    comm.close()
    if aborts:
        comm.abort("it is enough")
    else:
        assert comm.settle(60)
    with pytest.raises(CommunicationError, match="enough" if aborts else "closed before this had ended"):
        work.wait()


def test_errors_that_come_later(fake: ctypes.CDLL) -> None:
    ranks = Ranks(2)
    fake.fake_stuck(1, 0)
    work = ranks.comms[0].all_gather(torch.zeros(8), torch.zeros(4), "block 3")
    ranks.comms[0].poll()
    assert not work.is_completed()
    fake.fake_async_error(6)
    ranks.comms[0].poll()
    with pytest.raises(CommunicationError, match=r"for block 3, operation 1.*aborted.*remote process exited"):
        work.wait()
    assert_all_aborted(fake, ranks.comms)


def test_an_operation_that_never_completes_is_told_by_its_time_out(fake: ctypes.CDLL) -> None:
    ranks = Ranks(2, timeout=0.05)
    work = ranks.comms[1].all_gather(torch.zeros(8), torch.zeros(4), "block 5")
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)  # nobody asks for it but the thread that polls
    with pytest.raises(CommunicationError, match=r"all_gather .* block 5.*not completed within 0.05 s"):
        work.wait()
    assert_all_aborted(fake, ranks.comms)


def test_a_split_waits_for_what_is_under_way(fake: ctypes.CDLL) -> None:
    ranks = Ranks(2, timeout=0.2)
    ranks.comms[0].all_reduce(torch.ones(3), _C.ReduceOp.SUM)  # rank 1 never takes part
    with pytest.raises(CommunicationError, match=r"all_reduce .* not completed within 0.2 s"):
        ranks.comms[0].split(0, 0, 2, "part")
    assert_all_aborted(fake, ranks.comms)


def test_what_a_split_that_timed_out_had_made_is_ended_too(fake: ctypes.CDLL) -> None:
    """NCCL tells of it when the communicator that was split is aborted."""
    ranks = Ranks(2, timeout=0.05)
    fake.fake_stuck(0, 1)
    with pytest.raises(CommunicationError, match=r"splitting.*not all ranks took part within 0.05 s"):
        ranks.comms[0].split(0, 0, 2, "part")
    assert_all_aborted(fake, ranks.comms)


def test_messages_of_an_exchange_may_be_in_progress(fake: ctypes.CDLL) -> None:
    ranks = Ranks(2)
    in_progress = 7
    fake.fake_fail(b"Send", in_progress, 0)
    inputs, received = spread(2, 6), [torch.full((6,), torch.nan) for _ in range(2)]
    ranks.run(lambda comm: comm.all_to_all(received[comm.rank], inputs[comm.rank]))
    for rank in range(2):
        assert torch.equal(received[rank], torch.cat([x.chunk(2)[rank] for x in inputs]))


def test_the_watchdog_lets_python_run_while_it_asks_a_device(fake: ctypes.CDLL) -> None:
    comm, watchdog = Ranks(1).comms[0], _C.Watchdog(60.0)
    fake.fake_stuck(1, 0)
    guarded = _C.GuardedCommunicator(comm, watchdog, "zero/0", [0], False)
    work = guarded.all_reduce(torch.ones(1), _C.ReduceOp.SUM)
    work.wait()
    asked = fake.fake_asked_with_lock()
    assert watchdog.overdue() is None
    assert not work.is_completed()
    assert fake.fake_asked_with_lock() == asked
    comm.abort("over")


def test_an_operation_whose_result_nobody_asks_for_is_watched(fake: ctypes.CDLL) -> None:
    """So that the exit of another rank is noticed long before the time-out."""
    comm, watchdog = Ranks(1).comms[0], _C.Watchdog(60.0)
    fake.fake_stuck(1, 0)
    guarded = _C.GuardedCommunicator(comm, watchdog, "zero/0", [0], False)
    guarded.all_reduce(torch.ones(1), _C.ReduceOp.SUM).wait()
    assert watchdog.overdue() is None
    assert watchdog.blocked_for(0.0)
    fake.fake_stuck(0, 0)
    assert watchdog.overdue() is None
    assert not watchdog.blocked_for(0.0)


def test_calls_that_stay_in_progress_time_out(fake: ctypes.CDLL) -> None:
    ranks = Ranks(2, timeout=0.05)
    fake.fake_stuck(0, 1)
    with pytest.raises(CommunicationError, match=r"all_reduce.*not all ranks took part within 0.05 s"):
        ranks.comms[0].all_reduce(torch.zeros(1), _C.ReduceOp.SUM)
    with pytest.raises(CommunicationError, match="connecting.*not all ranks took part"):
        Ranks(1, timeout=0.05)
    assert_all_aborted(fake, ranks.comms)


def test_a_barrier_that_nobody_else_reaches_raises(fake: ctypes.CDLL) -> None:
    ranks = Ranks(2, timeout=0.05)
    with pytest.raises(CommunicationError, match="barrier.*not completed within"):
        ranks.comms[0].barrier("epoch")
    assert_all_aborted(fake, ranks.comms)


def test_abort_from_another_thread_frees_who_waits(fake: ctypes.CDLL) -> None:
    ranks = Ranks(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks.comms[0].barrier)
        while not fake.fake_calls(b"AllReduce"):
            time.sleep(0.001)
        ranks.comms[0].abort("a test said so")
        with pytest.raises(CommunicationError, match="a test said so"):
            waiting.result(timeout=30)


def test_a_call_that_stays_inside_nccl_holds_up_nobody_else(fake: ctypes.CDLL) -> None:
    comm = Ranks(2).comms[0]
    work = comm.all_gather(torch.zeros(8), torch.zeros(4))
    fake.fake_stuck(0, 1)
    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(comm.all_reduce, torch.zeros(1), _C.ReduceOp.SUM)
        while not fake.fake_calls(b"AllReduce"):
            time.sleep(0.001)
        assert not work.is_completed()
        comm.abort("a test said so")
        with pytest.raises(CommunicationError, match="a test said so"):
            inside.result(timeout=30)


def test_closing_with_operations_under_way_does_not_hang(fake: ctypes.CDLL) -> None:
    ranks = Ranks(2)
    work = ranks.comms[0].all_gather(torch.zeros(8), torch.zeros(4))
    ranks.comms[0].abort("over")
    del ranks
    assert work.is_completed()


def test_tensors_that_only_an_operation_holds_are_dropped_at_the_end(fake: ctypes.CDLL) -> None:
    """Dropping them takes the interpreter's lock, which the thread that destroys the communicator holds."""
    ranks = Ranks(2)
    input = torch.zeros(4)
    gone = weakref.ref(input)
    ranks.comms[0].all_gather(torch.zeros(8), input)
    del input
    assert gone() is not None
    ranks.comms[0].abort("over")
    del ranks
    assert gone() is None


def test_memory_of_a_launch_that_failed_half_way_is_kept(fake: ctypes.CDLL) -> None:
    comm = Ranks(2).comms[0]
    input = torch.zeros(4)
    gone = weakref.ref(input)
    fake.fake_fail_record(1)  # the first mark is before the operation, the second after it
    with pytest.raises(RuntimeError, match="the device failed"):
        comm.all_gather(torch.zeros(8), input)
    del input
    comm.all_gather(torch.zeros(8), torch.zeros(4))
    assert gone() is not None
    comm.abort("over")
    del comm
    assert gone() is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((torch.zeros(8), torch.zeros(3)), ValueError),
        ((torch.zeros(8), torch.zeros(4, dtype=torch.float16)), TypeError),
    ],
)
def test_arguments_are_checked_before_anything_moves(
    fake: ctypes.CDLL, arguments: tuple[Tensor, Tensor], error: type[Exception]
) -> None:
    ranks = Ranks(2)
    with pytest.raises(error):
        ranks.comms[0].all_gather(*arguments)
    with pytest.raises(TypeError, match="does not reduce"):
        ranks.comms[0].all_reduce(torch.zeros(2, dtype=torch.int16), _C.ReduceOp.SUM)
    assert fake.fake_calls(b"GroupStart") == 0
