"""Layouts drawn at random out of the whole product train as one process does.

``BMTRAIN_RANDOM_LAYOUTS=100`` runs that many in place of a few.
"""

from __future__ import annotations

import os

import pytest
import torch
from harness import rank_outcomes, run_ranks
from harness.outcome import Status
from harness.random_layout import draw
from harness.random_layout_peer import train_whole
from harness.random_layout_run import initial_weights, train

from bmtrain._tools.parity import compare

COUNT = int(os.environ.get("BMTRAIN_RANDOM_LAYOUTS", "8"))
FIRST = int(os.environ.get("BMTRAIN_RANDOM_LAYOUTS_FROM", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_random_layout_trains_as_one_process(seed, tmp_path):
    layout = draw(seed)
    init = {
        **layout.init,
        "timeout": 300,
        **({"tier_directories": [str(tmp_path)]} if layout.on_disk else {}),
    }
    weights = run_ranks(1, initial_weights, layout)[0]
    outcomes = rank_outcomes(layout.ranks, train, layout, weights, init=init, timeout=600, grace=3)
    for outcome in outcomes:
        assert outcome.status is Status.RETURNED, f"{outcome}\n{layout}"
    found = outcomes[0].value
    for outcome in outcomes[1:]:
        for (name, value), (_, other) in zip(found, outcome.value, strict=True):
            assert torch.equal(value, other), f"{name} on rank {outcome.rank}: {layout}"
    if layout.pipeline is not None and layout.accumulates_in == "virtual":
        flat = layout.without_stages
        run = run_ranks(flat.ranks, train, flat, weights, init={**init, **flat.init}, timeout=600)[0]
        for (name, value), (_, other) in zip(found, run, strict=True):
            # An evaluation is over the parts of all ranks.
            assert "evaluation" in name or torch.equal(value, other), f"{name} without stages: {layout}"
    wanted = train_whole(layout, weights, dict(found))
    exact = 1e-6 if layout.dtype == "float32" else 1e-2
    # Muon's products are in bf16: in one process 1e-6 in a gradient moves weights by up to 2e-3 (seed 85).
    of_weights = 4e-3 if layout.optimizer == "muon" else 5 * exact
    kinds_allowed = {
        "loss": exact,
        "evaluation": exact,
        "norm": exact,
        "gradient": 5 * exact,
        "weight": of_weights,
    }
    for kind, allowed in kinds_allowed.items():
        parts = [[pair for pair in run if pair[0].split(": ")[1].startswith(kind)] for run in (wanted, found)]
        difference = compare(*parts, allowed)
        assert not difference, f"{difference}: {layout}"
