"""`init_distributed` on several ranks: what it builds and what it leaves alone."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from harness import Status, free_port, rank_outcomes, run_ranks

import bmtrain
from bmtrain._ranks import context as _context
from bmtrain.topology import GroupKind, Topology

# World size: pipe_size and tp_size of the calls made one after the other.
SEVERAL = {1: [(1, 1)], 2: [(1, 1), (2, 1), (1, 2)], 4: [(2, 2), (1, 2)], 8: [(2, 2)]}
VALUES = ("zero_rank", "zero_size", "tp_size", "tp_rank", "tp_zero_rank", "tp_zero_size", "micros")
HANDLES = ("comm", "zero_comm", "pipe_comm", "pp_zero_comm", "tp_comm", "tp_zero_comm", "pp_tp_zero_comm")


def summed(comm: Any, value: float) -> float:
    total = torch.tensor([value])
    comm.all_reduce(total, bmtrain._C.ReduceOp.SUM, "test").wait()
    return total.item()


def describe_all(shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    found = []
    for pp, tp in shapes:
        bmtrain.init_distributed(timeout=40, pipe_size=pp if pp > 1 else -1, tp_size=tp)
        found.append(describe())
        bmtrain.synchronize()
        _context.uninstall()
    return found


def describe() -> dict[str, Any]:
    """What a rank finds after init, as plain values; groups are tried with a sum over their members."""
    context = bmtrain.global_var.context()
    place, config = context.topology, bmtrain.config
    groups = {}
    for kind in GroupKind:
        group = context.groups[kind.value]
        sums = [summed(comm, float(place.rank)) for comm in (group.comm, group.reduce_comm)]
        groups[kind.value] = (group.rank, group.size, group.comm.rank, group.comm.size, group.group_id, *sums)
    flags = [(slices, pipe) for slices in (None, "tp") for pipe in (False, True)]
    return {
        "groups": groups,
        "sizes": [config[name].size for name in HANDLES],
        "values": [config[name] for name in VALUES],
        "pipe": (config["pipe_size"], config["pipe_enabled"]),
        "local": (config["local_rank"], config["local_size"], bmtrain.rank(), bmtrain.world_size()),
        "backend": context.backend,
        "separate": all(group.comm is not group.reduce_comm for group in context.groups.values()),
        "num_comms": len({id(group.comm) for group in context.groups.values()}),
        "zero_group": [context.zero_group(*pair).name for pair in flags],
    }


@pytest.mark.parametrize("world", list(SEVERAL))
def test_bc_6_groups_agree_with_the_coordinates(world: int) -> None:
    for rank, seen in enumerate(run_ranks(world, describe_all, SEVERAL[world], init=False)):
        for (pp, tp), description in zip(SEVERAL[world], seen, strict=True):
            assert_described(description, Topology(rank, world, pp, tp))


def assert_described(seen: dict[str, Any], place: Topology) -> None:
    rank, world, pp, tp = place.rank, place.world_size, place.pipe_size, place.tp_size
    for kind in GroupKind:
        members = place.members(kind)
        at, total = members.index(rank), float(sum(members))
        expected = (at, len(members), at, len(members), place.get_group_id(kind), total, total)
        assert seen["groups"][kind.value] == expected
    assert seen["sizes"] == [world, world, pp, world // pp, tp, world // tp, world // (pp * tp)]
    assert seen["values"] == [rank, world // pp, tp, rank % tp, rank // tp, world // tp, pp]
    assert seen["pipe"] == (pp, pp > 1)
    assert seen["local"] == (rank, world, rank, world)
    assert seen["backend"] == ("gloo" if world > 1 else "single")
    assert seen["separate"]
    assert seen["num_comms"] == len({place.members(kind) for kind in GroupKind})
    assert seen["zero_group"] == ["zero", "pp_zero", "tp_zero", "pp_tp_zero"]


def old_spellings() -> list[Any]:
    before, variables = threading.active_count(), dict(os.environ)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bmtrain.init_distributed(12, timeout=timedelta(seconds=30), zero_level=2, loss_scale_factor=0.25)
    drawn = [torch.rand(3).tolist(), random.random(), numpy.random.rand()]
    assert dict(os.environ) == variables
    # The watchdog, where there is somebody to watch for.
    assert threading.active_count() == before + (bmtrain.world_size() > 1)
    assert not dist.is_initialized()
    texts = sorted(str(warning.message) for warning in caught)
    if bmtrain.rank() == 0:
        assert len(texts) == 2, texts
        assert "write init_distributed(seed=SEED)" in texts[0]
        assert "zero_level=...) is deprecated" in texts[1]
        assert {warning.category for warning in caught} == {DeprecationWarning}
        assert {warning.filename for warning in caught} == {__file__}
    else:
        assert not texts
    config = bmtrain.config
    assert (config["zero_level"], config["loss_scale_factor"], config["loss_scale_steps"]) == (2, 4.0, 1024)
    assert bmtrain.global_var.context().timeout == 30
    with pytest.raises(RuntimeError, match="initialized already"):
        bmtrain.init_distributed()
    bmtrain.synchronize()
    bmtrain.wait_loader()
    return drawn


@pytest.mark.parametrize("world", [1, 2])
def test_bc_4_equal_draws_and_old_spellings(world: int) -> None:
    drawn = run_ranks(world, old_spellings, init=False, fresh=True)
    generator = torch.Generator().manual_seed(12)
    mine = random.Random(12)
    expected = [
        torch.rand(3, generator=generator).tolist(),
        mine.random(),
        numpy.random.RandomState(12).rand(),
    ]
    assert drawn == [expected] * world


def without_local_rank(sources: dict[str, str]) -> tuple[Any, ...]:
    known = {"R": os.environ["RANK"], "W": os.environ["WORLD_SIZE"]}
    port = os.environ["MASTER_PORT"]
    os.environ.clear()
    os.environ.update({name: known.get(value, value) for name, value in sources.items()}, MASTER_PORT=port)
    torch.set_num_threads(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bmtrain.init_distributed(timeout=30, pipe_size=1, num_micro_batches=4, seed=int(known["R"]) + 5)
    told = [str(warning.message) for warning in caught]
    config = bmtrain.config
    found = (
        *(bmtrain.rank(), bmtrain.world_size(), config["local_rank"], config["local_size"]),
        *(config["pipe_enabled"], config["micros"], torch.get_num_threads(), torch.rand(1).item(), told),
    )
    bmtrain.synchronize()
    _context.uninstall()
    torch.set_num_threads(1)
    return found


@pytest.mark.parametrize(
    ("sources", "divided"),
    [
        ({"OMPI_COMM_WORLD_RANK": "R", "OMPI_COMM_WORLD_SIZE": "W"}, True),
        ({"RANK": "R", "WORLD_SIZE": "W", "OMP_NUM_THREADS": "3"}, False),
    ],
)
def test_what_the_launcher_left_out_is_found_by_comparing_hosts(
    sources: dict[str, str], divided: bool
) -> None:
    found = run_ranks(2, without_local_rank, sources, init=False)
    draw = torch.rand(1, generator=torch.Generator().manual_seed(5)).item()  # the seed of rank 0 is used
    threads = min(8, max(1, len(os.sched_getaffinity(0)) // 2)) if divided else 8
    warning = "init_distributed: expected the same seed on every rank, got 6 on rank 1 and 5 on rank 0, "
    told = [[], [warning + "which is used"]]
    assert found == [(rank, 2, rank, 2, True, 4, threads, draw, told[rank]) for rank in range(2)]


def beside_the_default_group(order: str) -> float:
    if order == "before":
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    bmtrain.init_distributed(timeout=30)
    if order == "after":
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    total = torch.ones(1)
    dist.all_reduce(total)
    bmtrain.synchronize()
    return total.item()


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_default_group_of_the_script_shares_the_port(order: str) -> None:
    assert run_ranks(2, beside_the_default_group, order, init=False, fresh=True) == [2.0, 2.0]


def leave_early() -> float:
    """Rank 0, which serves the store, is gone while the others go on in their group."""
    bmtrain.init_distributed(timeout=30, pipe_size=2, tp_size=2)
    context = bmtrain.global_var.context()
    if context.topology.stage_id == 0:
        os._exit(7)
    time.sleep(0.5)
    return summed(context.groups["pp_zero"].comm, 1.0)


def test_ranks_that_go_on_do_not_need_rank_0() -> None:
    outcomes = rank_outcomes(4, leave_early, init=False, fresh=True)
    assert [(o.status, o.exitcode) for o in outcomes[:2]] == [(Status.DIED, 7)] * 2
    assert [(o.status, o.value) for o in outcomes[2:]] == [(Status.RETURNED, 2.0)] * 2, outcomes


def meet_at(url: str) -> int:
    bmtrain.init_distributed(url, timeout=30)
    bmtrain.synchronize()
    size = bmtrain.world_size()
    _context.uninstall()
    return size


def test_tcp_and_file(tmp_path: Any) -> None:
    file = tmp_path / "meeting"
    for url in (f"tcp://127.0.0.1:{free_port()}", f"file://{file}", f"file://{file}"):
        assert run_ranks(2, meet_at, url, init=False) == [2, 2]
    assert not file.exists()


def restart() -> int:
    """A later attempt shares the store of the first and does not read its keys."""
    for attempt in range(3):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        bmtrain.init_distributed(timeout=30)
        bmtrain.synchronize()
        _context.uninstall()
    return attempt


def test_one_store_serves_attempt_after_attempt() -> None:
    assert run_ranks(2, restart, init=False) == [2, 2]
