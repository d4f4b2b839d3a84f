"""Coordinates of ranks and members of groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import pytest

from bmtrain import init
from bmtrain.topology import GroupKind, Topology


def worlds(limit: int) -> Iterator[tuple[int, int, int]]:
    """Every (world size, pp, tp) that factors, up to a world size."""
    for world in range(1, limit + 1):
        for pp in range(1, world + 1):
            for tp in range(1, world // pp + 1):
                if world % (pp * tp) == 0:
                    yield world, pp, tp


def test_bc_6_coordinates_of_every_factorisation_up_to_64_ranks() -> None:
    for world, pp, tp in worlds(64):
        stage = world // pp
        for r in range(world):
            t = Topology(r, world, pp, tp)
            assert (t.stages, t.stage_id, t.pipe_idx) == (pp, r // stage, r % stage)
            assert (t.tp_id, t.tp_idx) == (r % tp, r // tp)
            assert (t.tp_zero_id, t.tp_zero_idx) == (r // tp, r % tp)
            assert (t.pp_zero_id, t.pp_zero_idx) == (r % stage, r // stage)
            assert (t.pp_tp_zero_id, t.pp_tp_zero_idx) == ((r % stage) // tp, (r // stage) * tp + r % tp)
            assert (t.zero_id, t.zero_idx) == (r, 0)


@pytest.mark.parametrize("kind", list(GroupKind))
def test_groups_are_a_partition_and_the_coordinate_is_the_position(kind: GroupKind) -> None:
    for world, pp, tp in worlds(24):
        groups = Topology(0, world, pp, tp).groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for r in range(world):
            t = Topology(r, world, pp, tp)
            assert t.groups(kind) == groups
            assert t.members(kind)[t.get_group_rank(kind)] == r


def test_group_sizes() -> None:
    t = Topology(0, 24, pipe_size=3, tp_size=2)
    sizes = {kind.value: len(t.members(kind)) for kind in GroupKind}
    expected = {"zero": 24, "tp": 2, "pipe": 3, "tp_zero": 12, "pp_zero": 8, "pp_tp_zero": 4}
    assert sizes == {**expected, "sp": 1, "ep": 1, "ep_zero": 24, "pp_ep_zero": 8}
    t = Topology(0, 24, pipe_size=3, ep_size=4)
    assert [len(t.members(kind)) for kind in ("ep", "ep_zero", "pp_ep_zero")] == [4, 6, 2]


def test_expert_parallel_groups() -> None:
    t = Topology(5, 8, pipe_size=2, ep_size=2)
    assert (t.members("ep"), t.members("ep_zero"), t.members("pp_ep_zero")) == ((4, 5), (1, 3, 5, 7), (5, 7))
    for rank in range(8):
        t = Topology(rank, 8, pipe_size=2, ep_size=2)
        for kind in ("ep", "ep_zero", "pp_ep_zero"):
            assert t.members(kind)[t.get_group_rank(kind)] == rank
    with pytest.raises(ValueError, match="ep_size: expected a divisor of 4 ranks of a pipeline stage, got 3"):
        Topology(0, 8, pipe_size=2, ep_size=3)
    t = Topology(5, 8, tp_size=2, ep_size=4)
    assert (t.members("tp"), t.members("ep"), t.members("ep_zero")) == ((4, 5), (4, 5, 6, 7), (1, 5))


def test_sequence_ranks_have_one_batch() -> None:
    places = [Topology(rank, 16, tp_size=2, sp_size=4) for rank in range(16)]
    assert places[0].groups("sp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert [place.dp_id for place in places] == [0] * 8 + [1] * 8
    for place in places:
        assert place.dp_size == 2
        assert place.members("sp")[place.get_group_rank("sp")] == place.rank
    with pytest.raises(
        ValueError, match=r"pipe_size \* tp_size \* sp_size = 1 \* 2 \* 3 = 6 \(remainder 2\)"
    ):
        Topology(0, 8, tp_size=2, sp_size=3)


def test_documented_group_names() -> None:
    t = Topology(5, 8, pipe_size=2, tp_size=2)
    assert (t.get_group_id("pipe"), t.get_group_rank("pipe")) == (t.pipe_idx, t.stage_id) == (1, 1)
    assert (t.get_group_id("zero"), t.get_group_rank("zero")) == (0, 5)
    assert (t.get_group_id("tp_zero"), t.get_group_rank("tp_zero")) == (1, 2)
    assert (t.get_group_id("tp"), t.get_group_rank("tp")) == (2, 1)
    for ask in (t.get_group_id, t.get_group_rank):
        with pytest.raises(ValueError, match=r"expected one of 'zero', 'tp'.* got 'data'"):
            ask("data")


def test_names_of_the_02_releases() -> None:
    first, last = Topology(1, 8, pipe_size=4), Topology(7, 8, pipe_size=4)
    assert (first.prev_rank, first.next_rank) == (-1, 1)
    assert (last.prev_rank, last.next_rank) == (2, -1)
    assert first.pp_group == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert first.dp_group == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (first.heads, first.tails) == ([0, 1], [6, 7])
    assert init.topology is Topology


def test_factors_that_do_not_fit_are_all_named() -> None:
    message = "world_size 6 must be divisible by pipe_size * tp_size = 2 * 2 = 4 (remainder 2)"
    with pytest.raises(ValueError, match=re.escape(message)):
        Topology(0, 6, pipe_size=2, tp_size=2)
    with pytest.raises(ValueError, match="rank: expected 0 <= rank < world_size 2, got 2"):
        Topology(2, 2)
    with pytest.raises(ValueError, match="world_size: expected at least 1, got 0"):
        Topology(0, 0)
    with pytest.raises(ValueError, match="got pipe_size 0, tp_size 1"):
        Topology(0, 2, pipe_size=0)


def test_sequence_ranks_share_the_shards_of_their_stage_and_slice() -> None:
    for pp, tp, sp, batches in product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2)):
        place = Topology(0, pp * tp * sp * batches, pp, tp, sp_size=sp)
        groups = place.groups(GroupKind.SP)
        assert sorted(rank for group in groups for rank in group) == list(range(place.world_size))
        assert {len(group) for group in groups} == {sp}
        for group in groups:
            assert any(set(group) <= set(shards) for shards in place.groups(GroupKind.PP_TP_ZERO))


def test_a_printed_topology_has_the_ranks_of_every_group() -> None:
    assert str(Topology(0, 8, pipe_size=2, tp_size=2, sp_size=2)).splitlines() == [
        "8 ranks = 2 stages x 2 sequence parts x 2 tensor slices",
        "  zero, ep_zero: 0,1,2,3,4,5,6,7",
        "  tp: 0,1 | 2,3 | 4,5 | 6,7",
        "  pipe: 0,4 | 1,5 | 2,6 | 3,7",
        "  tp_zero: 0,2,4,6 | 1,3,5,7",
        "  pp_zero, pp_ep_zero: 0,1,2,3 | 4,5,6,7",
        "  pp_tp_zero, sp: 0,2 | 1,3 | 4,6 | 5,7",
    ]
    assert str(Topology(0, 4, tp_size=2, ep_size=2)).splitlines()[2:] == [
        "  tp, ep: 0,1 | 2,3",
        "  tp_zero, pp_tp_zero, ep_zero, pp_ep_zero: 0,2 | 1,3",
    ]
