"""A rank is killed outside of the steps: in the meeting, in a save, in an evaluation, at the end."""

from __future__ import annotations

import functools
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Status, rank_outcomes, run_ranks

import bmtrain as bmt
import bmtrain.init
from bmtrain.distributed import checkpoint
from bmtrain.distributed.checkpoint.writer import Saving
from bmtrain.errors import CommunicationError

SHARDS, STEPS, LOST = 8, 4, 2


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(moment: str, folder: str) -> dict[Any, Any]:
    """``moment``: when one of several ranks dies; without, a single process."""
    lost = moment if os.environ.get("RANK") == str(LOST) else ""
    if lost == "before the meeting":
        die()
    if lost == "in the meeting":
        bmtrain.init.surviving = die
    seconds = 4 if moment == "before the meeting" else 10  # which the others wait in full
    bmt.init_distributed(seed=1, virtual_shards=SHARDS, survive=int(bool(moment)), timeout=seconds)
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(12, 30), torch.nn.Dropout(0.1), torch.nn.Linear(30, 5))
    model = bmt.BMTrainModelWrapper(plain)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    batches = bmt.batches(torch.randn(64, 12, generator=torch.Generator().manual_seed(1)), 2, seed=1)
    if lost == "before the first step":
        die()
    for step in range(STEPS):
        model.train()
        manager.zero_grad()
        for shard in bmt.virtual_shards(step):
            manager.backward(model(shard.of(batches[step])).square().mean())
            if lost == "in the last loop" and step == STEPS - 1:
                die()
        if lost == "in the last step" and step == STEPS - 1:
            die()
        manager.step()
        if step == 1 and moment:
            checkpoint.save(folder, step + 1, model, manager)
        if step == 2 and moment:
            try:
                between_steps(model, manager, lost, folder)
            except CommunicationError:
                if "caught" not in moment:
                    raise
    if lost in ("after the last step", "at the end"):
        die()
    if moment == "at the end":
        return {}
    state = optimizer.state_dict(gather=True)["state"]
    return {**model.state_dict(), **dict(enumerate(torch.utils._pytree.tree_leaves(state)))}


def between_steps(model: torch.nn.Module, manager: Any, lost: str, folder: str) -> None:
    """Evaluates, and saves."""
    with torch.no_grad():
        if lost.startswith("in an evaluation"):
            die()
        model.eval()(torch.ones(2, 12))
    if lost.startswith("in a save"):
        Saving.write_shard = die
    checkpoint.save(folder, 3, model, manager)


DIED = r"rank 2 died: connections closed without a word( \(SIGKILL\))?"  # if the status is known in time
STARTS_AGAIN = (
    f"{DIED}; outside of a step that ends the job: start the job again from the last checkpoint: cont"
)

#: What the others raise; None: they continue.
MOMENTS = {
    "before the meeting": "expected 4 ranks within 4 s, got 3; missing rank 2",
    "in the meeting": DIED,
    "before the first step": DIED,
    "in an evaluation": STARTS_AGAIN,
    "in a save": STARTS_AGAIN,
    "in an evaluation, caught": None,
    "in a save, caught": None,
    "in the last loop": None,
    "in the last step": None,
    "after the last step": STARTS_AGAIN,
    "at the end": None,
}


@functools.cache
def undisturbed() -> dict[Any, Any]:
    (values,) = run_ranks(1, train, "", "", init=False, fresh=True)
    return values


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_is_lost(moment: str, tmp_path: Path) -> None:
    outcomes = rank_outcomes(4, train, moment, str(tmp_path), init=False, fresh=True, timeout=60)
    for rank in (0, 1, 3):
        if MOMENTS[moment] is None:
            assert outcomes[rank].status is Status.RETURNED
            found, values = outcomes[rank].value, undisturbed()
            assert all(torch.equal(torch.as_tensor(found[k]), torch.as_tensor(values[k])) for k in found)
        else:
            assert re.search(MOMENTS[moment], str(outcomes[rank]))
