"""The guard around a communicator: what it records, and what it makes of a failure."""

from __future__ import annotations

import os

import pytest
import torch

from bmtrain import _C
from bmtrain.errors import CommunicationError

SUM = _C.ReduceOp.SUM


def guarded(watchdog: _C.Watchdog, name: str = "alone") -> _C.GuardedCommunicator:
    return _C.GuardedCommunicator(_C.SingleCommunicator(name), watchdog, f"{name}/0", [0], False)


def test_records_say_what_was_done() -> None:
    watchdog = _C.Watchdog(10.0)
    comm = guarded(watchdog)
    work = comm.all_gather(torch.empty(4), torch.ones(4), "block 1")
    comm.broadcast(torch.ones(3, dtype=torch.float16), 0, "seed")
    work.wait()
    work.wait()
    [group] = watchdog.groups(whole=True)
    first, second = group["records"]
    assert (first["op"], first["sequence"], first["label"]) == ("all_gather", 0, "block 1")
    assert (first["dtype"], first["numel"], first["state"]) == ("Float", 4, "done")
    assert first["posted"] <= first["started"] <= first["ended"]
    assert (second["sequence"], second["state"], second["detail"]) == (1, "posted", "root 0")
    assert (group["posted"], group["blocked"], group["members"]) == (2, [], [0])
    assert second["text"] == 'broadcast #1 for "seed" (3 x Half, root 0)'


def test_refused_watchdog_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ValueError, match="timeout_seconds"):
            _C.Watchdog(-1.0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_last_512_are_kept() -> None:
    watchdog = _C.Watchdog(10.0)
    comm, x = guarded(watchdog), torch.ones(1)
    for _ in range(600):
        comm.all_reduce(x, SUM).wait()
    [group] = watchdog.groups(whole=True)
    assert [record["sequence"] for record in group["records"]] == list(range(88, 600))
    assert group["posted"] == 600


def test_refused_arguments_are_not_recorded() -> None:
    """The ranks count alike, so what one refuses must not count."""
    watchdog = _C.Watchdog(10.0)
    comm = guarded(watchdog)
    with pytest.raises(ValueError, match="elements"):
        comm.all_gather(torch.empty(5), torch.ones(4))
    with pytest.raises(ValueError, match="peer"):
        comm.send(torch.ones(1), 1)
    comm.close()
    with pytest.raises(RuntimeError, match="closed"):
        comm.all_reduce(torch.ones(1), SUM)
    [group] = watchdog.groups(whole=True)
    assert (group["records"], group["posted"]) == ([], 0)


def test_a_refused_call_is_not_recorded_in_the_place_of_an_old_one() -> None:
    watchdog = _C.Watchdog(10.0)
    comm, x = guarded(watchdog), torch.ones(1)
    for _ in range(600):
        comm.all_reduce(x, SUM).wait()
    with pytest.raises(ValueError, match="elements"):
        comm.all_gather(torch.empty(5), torch.ones(4))
    [group] = watchdog.groups(whole=True)
    assert [record["sequence"] for record in group["records"]] == list(range(89, 600))


def test_messages_have_numbers_of_their_own() -> None:
    watchdog = _C.Watchdog(10.0)
    comm, x = guarded(watchdog), torch.ones(2)
    comm.send(x, 0).wait()
    comm.all_reduce(x, SUM).wait()
    comm.recv(x, 0).wait()
    [group] = watchdog.groups(whole=True)
    assert [(r["op"], r["sequence"]) for r in group["records"]] == [
        ("send", 0),
        ("all_reduce", 0),
        ("recv", 0),
    ]


def test_one_failure_aborts_every_communicator_of_the_process() -> None:
    watchdog = _C.Watchdog(10.0)
    one, other = guarded(watchdog, "one"), guarded(watchdog, "other")
    with pytest.raises(CommunicationError, match="nothing was sent"):
        one.recv(torch.ones(2), 0)  # nobody attends: what was seen is the verdict
    assert "nothing was sent" in watchdog.verdict
    for comm in (one, other, guarded(watchdog, "later")):
        with pytest.raises(CommunicationError, match="aborted: .*nothing was sent"):
            comm.all_reduce(torch.ones(1), SUM)
    assert watchdog.overdue() is None


def test_abort_and_a_second_reason() -> None:
    watchdog = _C.Watchdog(10.0)
    comm = guarded(watchdog)
    comm.abort("first")
    comm.abort("second")
    assert watchdog.verdict == "first"
    with pytest.raises(CommunicationError, match="first"):
        comm.barrier()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="timeout_seconds"):
        _C.Watchdog(0.0)
    with pytest.raises(ValueError, match="expected 1 members, got 2"):
        _C.GuardedCommunicator(_C.SingleCommunicator("x"), _C.Watchdog(1.0), "x", [0, 1], False)
