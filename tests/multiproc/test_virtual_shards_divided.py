"""Virtual shards that several ranks compute together have the same bits on any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from harness.random_layout import Layout
from harness.random_layout_peer import train_whole
from harness.random_layout_run import initial_weights, train

from bmtrain._tools.parity import compare

SHARDS = 3
REPLICAS = [{"recompute": "whole", "level": 0}, {"zero_size": 2}]
LAYOUT = Layout(
    seed=3,
    ranks=0,
    init={"virtual_shards": SHARDS},
    policies=[{"recompute": "whole"}, {}],
    accumulate=SHARDS,
    accumulates_in="virtual",
    tied=True,
    ignored=True,
    moe={"scoring": "softmax", "shared_hidden_dim": 8},
)


STAGES = {"pipe_size": 2, "num_micro_batches": 2}


@pytest.mark.parametrize(
    ("options", "sizes", "layouts"),
    [  # layouts: (ranks, further sizes, schedule of a pipeline with the loss inside)
        (
            {"optimizer": "adam"},
            {"tp_size": 2},
            [(2, {}, ""), (4, {"ep_size": 2}, ""), (4, STAGES, "zb1p")],
        ),
        (
            {"mixture": True},
            {"tp_size": 2, "sp_size": 2},
            [(4, {"ep_size": 4}, ""), (8, {}, ""), (8, {"ep_size": 2, **STAGES}, "1f1b")],
        ),
    ],
)
def test_ranks_that_share_a_shard(options, sizes, layouts) -> None:
    """In the last micro-step of two groups, one repeats its shard; the most ranks have replicas of Blocks."""
    layout = replace(LAYOUT, **options)
    weights = run_ranks(1, initial_weights, layout)[0]
    runs = []
    for ranks, further, schedule in layouts:
        of_ranks = replace(layout, policies=REPLICAS) if ranks == layouts[1][0] else layout
        if schedule:
            of_ranks = replace(of_ranks, pipeline={"schedule": schedule}, loss_inside=True)
        init = {**layout.init, **sizes, **further}
        runs += run_ranks(ranks, train, of_ranks, weights, init=init, timeout=300)
    for run in runs[1:]:
        for (name, value), (_, other) in zip(runs[0], run, strict=True):
            assert torch.equal(value, other), name
    difference = compare(train_whole(layout, weights, dict(runs[0])), runs[0], 5e-6)
    assert not difference, difference
