"""Layouts drawn at random out of the whole product train as one process does.

``BMTRAIN_RANDOM_LAYOUTS=100`` runs that many in place of a few.
"""

from __future__ import annotations

import os

import pytest
import torch
from harness import rank_outcomes, run_ranks
from harness.outcome import Status
from harness.random_layout import draw, initial_weights, train, train_whole

from bmtrain._tools.parity import compare

COUNT = int(os.environ.get("BMTRAIN_RANDOM_LAYOUTS", "8"))
FIRST = int(os.environ.get("BMTRAIN_RANDOM_LAYOUTS_FROM", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_random_layout_trains_as_one_process(seed):
    layout = draw(seed)
    weights = run_ranks(1, initial_weights, layout)[0]
    outcomes = rank_outcomes(layout.ranks, train, layout, weights, init=layout.init, grace=3)
    for outcome in outcomes:
        assert outcome.status is Status.RETURNED, f"{outcome}\n{layout}"
    found = outcomes[0].value
    for outcome in outcomes[1:]:
        for (name, value), (_, other) in zip(found, outcome.value, strict=True):
            assert torch.equal(value, other), f"{name} on rank {outcome.rank}: {layout}"
    wanted = train_whole(layout, weights, dict(found))
    exact = 1e-6 if layout.dtype == "float32" else 1e-2
    for kinds, allowed in ((("loss", "norm"), exact), (("gradient", "weight"), 5 * exact)):
        parts = [
            [pair for pair in run if pair[0].split(": ")[1].startswith(kinds)] for run in (wanted, found)
        ]
        difference = compare(*parts, allowed)
        assert not difference, f"{difference}: {layout}"
