"""The example's GPT-2 with each kind of tier: every loss, weight and state has the bits of training in memory.

``BMTRAIN_TIER_STEPS=200`` trains longer, and in each dtype on 1, 2 and 4 ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.disk_tier import MIXED, TIERS, small_chunks
from harness.offloaded import values_of
from reference_gpt import SMALL_SHAPE

import bmtrain as bmt
from bmtrain import _C

EXAMPLE = str(Path(__file__).parents[2] / "example")
BATCH, SEQ_LEN = 4, 16
STEPS = int(os.environ.get("BMTRAIN_TIER_STEPS", "3"))


def train(kind: str, dtype: torch.dtype, places: dict[str, Any]) -> list[torch.Tensor]:
    if EXAMPLE not in sys.path:
        sys.path.insert(0, EXAMPLE)
    from models import GPT  # the example's folder is no package

    torch.manual_seed(7)
    with bmt.default_policy(bmt.BlockPolicy(**places)):
        model = GPT(**SMALL_SHAPE | {"max_distance": SEQ_LEN}, dtype=dtype)
    bmt.init_parameters(model)
    optimizer = getattr(bmt.optim, kind)(model.parameters(), lr=3e-3, weight_decay=0.1)
    manager = bmt.optim.OptimManager(
        loss_scale=2.0**10 if dtype == torch.float16 else None, loss_scale_steps=5
    )
    manager.add_optimizer(optimizer)
    seen: list[torch.Tensor] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(SMALL_SHAPE["vocab_size"], (BATCH, SEQ_LEN + 1), generator=generator)
        ids = ids.chunk(bmt.world_size())[bmt.rank()]
        pos = torch.arange(SEQ_LEN).repeat(len(ids), 1)
        logits = model(ids[:, :-1], pos, torch.ones_like(pos, dtype=torch.bool))
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        manager.zero_grad()
        manager.backward(loss)
        seen += [loss.detach(), torch.as_tensor(manager.clip_grad_norm(optimizer.param_groups, max_norm=0.5))]
        manager.step()
    return [*seen, *values_of(model, [optimizer])]


def compare(kind: str, dtype: torch.dtype) -> None:
    small_chunks()
    expected = train(kind, dtype, TIERS[0])
    _C.disturb_transfers(200)
    try:
        for places in (*TIERS[1:], MIXED):
            for number, (a, b) in enumerate(zip(train(kind, dtype, places), expected, strict=True)):
                assert torch.equal(a, b), f"{places}: value {number} of {len(expected)} differs"
    finally:
        _C.disturb_transfers(0)


LONG = [(dtype, world) for dtype in (torch.float32, torch.bfloat16, torch.float16) for world in (1, 2, 4)]


@pytest.mark.parametrize("kind", ["AdamOptimizer", "MuonOptimizer"])
@pytest.mark.parametrize(("dtype", "world"), LONG if STEPS >= 200 else [(torch.float16, 2)], ids=str)
def test_same_bits(dtype: torch.dtype, world: int, kind: str, tmp_path: Path) -> None:
    init = {"tier_directories": [str(tmp_path)]}
    run_ranks(
        world,
        compare,
        kind,
        dtype,
        init=init,
        environment={"BMTRAIN_POISON_BUFFERS": "1"},
        timeout=300 + 3 * STEPS,
    )
