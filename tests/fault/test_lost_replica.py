"""A rank is killed while blocks are shared by some ranks and held alike by others: everybody else names it."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from harness import Status, rank_outcomes
from harness.kits import TanhLinear

import bmtrain as bmt
from bmtrain.errors import CommunicationError

WORLD, SHARING, DIM = 4, 2, 64


def train_until_lost(victim: int, accumulates: bool) -> str:
    """Ranks 0-1 and 2-3 share; a victim has a partner in its shards, a twin that holds the same, and a stranger."""
    with bmt.default_policy(bmt.BlockPolicy(zero_size=SHARING)):
        model = bmt.TransformerBlockList([bmt.Block(TanhLinear(DIM)) for _ in range(3)])
    manager = bmt.optim.OptimManager(accumulate=2 if accumulates else 1)
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=0.01))
    bmt.synchronize()
    if bmt.rank() == victim:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGKILL]).start()
    with pytest.raises(CommunicationError) as first:
        while True:
            manager.zero_grad()
            manager.backward(model(torch.ones(2, DIM)).square().mean())
            manager.step()
    with pytest.raises(CommunicationError):  # and nothing of any group goes on
        model(torch.ones(2, DIM))
    return str(first.value)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize(("victim", "accumulates"), [(0, False), (3, False), (2, True)])
def test_all_others_name_it(victim: int, accumulates: bool, transport: str) -> None:
    outcomes = rank_outcomes(
        WORLD,
        train_until_lost,
        victim,
        accumulates,
        init={"timeout": 40},
        environment={"BMTRAIN_CPU_TRANSPORT": transport},
        fresh=True,
        timeout=60,
    )
    assert outcomes[victim].status is Status.DIED
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.status is Status.RETURNED, outcome
            assert f"rank {victim} died: connections closed without a word" in outcome.value
