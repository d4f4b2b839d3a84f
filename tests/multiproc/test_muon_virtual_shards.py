"""The example's GPT-2 by Muon with virtual shards: the same bits on any number of ranks, also after a resume.

``BMTRAIN_MUON_STEPS`` sets the number of steps (8).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.distributed import checkpoint

EXAMPLE = Path(__file__).parents[2] / "example"
STEPS = int(os.environ.get("BMTRAIN_MUON_STEPS", "8"))
SEQ, VOCAB = 8, 31


def train(
    dtype: str, level: int, folder: str, save_at: int | None, offload: bool = False
) -> tuple[int, dict[str, torch.Tensor]]:
    """Trains to the end, from the checkpoint if there is one; returns the first step and all bits."""
    sys.path.insert(0, str(EXAMPLE))
    from models import GPT

    with bmt.default_policy(bmt.BlockPolicy(level=level)):
        model = GPT(2, VOCAB, 16, 8, 2, 32, SEQ, dtype=getattr(torch, dtype), zero_level=level)
    bmt.init_parameters(model)
    splits = {"*.project_qkv": 3}
    muon = bmt.optim.MuonOffloadOptimizer if offload else bmt.optim.MuonOptimizer
    optimizer = muon(model.named_parameters(), lr=5e-3, adjust_lr_fn="match_rms_adamw", splits=splits)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    first = 0
    if save_at is None and checkpoint.latest(folder) is not None:
        first = checkpoint.load(folder, model, manager).step
    for step in range(first, STEPS):
        if step == save_at:
            checkpoint.save(folder, step, model, manager)
        ids = torch.randint(VOCAB, (8, SEQ + 1), generator=torch.Generator().manual_seed(step))
        manager.zero_grad()
        for shard in bmt.virtual_shards(step):
            rows = shard.of(ids)
            position = torch.arange(SEQ).expand(len(rows), SEQ)
            logits = model(rows[:, :-1], position, torch.ones(len(rows), SEQ, dtype=torch.bool))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, 0.5)
        manager.step()
    values = dict(model.state_dict())
    for index, entry in optimizer.state_dict(gather=True)["state"].items():
        values.update({f"{index}.{name}": torch.as_tensor(value) for name, value in entry.items()})
    if dtype == "float32":  # the host has a master of fp32 parameters too, which is the parameter
        values = {name: value for name, value in values.items() if not name.endswith("._param_fp32")}
    return first, values


def run_on(world: int, shards: int, *arguments: Any) -> tuple[int, dict[str, torch.Tensor]]:
    ranks = run_ranks(world, train, *arguments, init={"virtual_shards": shards}, timeout=600)
    assert all(same_bits(values, ranks[0][1]) for _, values in ranks)
    return ranks[0]


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name, value in one.items()
    )


@pytest.mark.parametrize(
    ("dtype", "shards", "level"),
    [("float32", 8, 3), ("bfloat16", 4, 3), ("float32", 2, 2), ("bfloat16", 1, 3)],
)
def test_muon_has_the_same_bits_on_any_number_of_ranks(
    dtype: str, shards: int, level: int, tmp_path: Path
) -> None:
    worlds = [world for world in (1, 2, 4) if shards % world == 0]
    _, values = run_on(worlds[-1], shards, dtype, level, str(tmp_path), STEPS // 2)
    for world in worlds[:-1]:
        assert same_bits(run_on(world, shards, dtype, level, str(tmp_path / "none"), None)[1], values)
    first, resumed = run_on(worlds[0], shards, dtype, level, str(tmp_path), None, True)
    assert first == STEPS // 2
    assert same_bits(resumed, values)
