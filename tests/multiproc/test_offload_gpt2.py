"""The example's GPT-2 trained by offloading optimizers: overlapped updates give the bits of synchronous ones.

``BMTRAIN_OFFLOAD_STEPS=200`` trains longer, and in each dtype on each number of ranks.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from reference_gpt import SMALL_SHAPE

import bmtrain as bmt
from bmtrain import _C
from bmtrain.optim import (
    AdamOffloadOptimizer,
    LionOffloadOptimizer,
    OptimManager,
    SGDOffloadOptimizer,
)
from bmtrain.parameter import full_value

EXAMPLE = str(Path(__file__).parents[2] / "example")
BATCH, SEQ_LEN = 4, 16
STEPS = int(os.environ.get("BMTRAIN_OFFLOAD_STEPS", "30"))
SHAPE = {**SMALL_SHAPE, "max_distance": SEQ_LEN}


def make_model(dtype: torch.dtype) -> torch.nn.Module:
    if EXAMPLE not in sys.path:
        sys.path.insert(0, EXAMPLE)
    from models import GPT  # the example's folder is no package

    torch.manual_seed(7)
    model = GPT(**SHAPE, dtype=dtype)
    bmt.init_parameters(model)
    model.layers[1].requires_grad_(False)  # a frozen block
    return model


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    ids = torch.randint(SHAPE["vocab_size"], (BATCH, SEQ_LEN + 1), generator=generator)
    ids = ids.chunk(bmt.world_size())[bmt.rank()]
    pos = torch.arange(SEQ_LEN).repeat(len(ids), 1)
    logits = model(ids[:, :-1], pos, torch.ones_like(pos, dtype=torch.bool))
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


CLASSES: dict[str, Any] = {
    "adam": AdamOffloadOptimizer,
    "sgd": partial(SGDOffloadOptimizer, momentum=0.9, nesterov=True),
    "lion": LionOffloadOptimizer,
}


def train(
    dtype: torch.dtype, overlap: bool, steps: int, kind: str
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Clipping, a loss scale with an overflow, accumulation, groups, a schedule, and a state in mid-flight."""
    _C.disturb_updates(100 if overlap else 0)
    model = make_model(dtype)
    decayed = [p for p in model.parameters() if len(p.full_shape) > 1]
    others = [p for p in model.parameters() if len(p.full_shape) <= 1]
    optimizer = CLASSES[kind](
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], weight_decay=0.1, overlap=overlap
    )
    scheduler = bmt.lr_scheduler.Cosine(optimizer, start_lr=3e-3, warmup_iter=4, end_iter=2 * steps)
    manager = OptimManager(loss_scale=2.0**12, loss_scale_steps=5)
    manager.add_optimizer(optimizer, scheduler)
    losses, state, num_pending = [], None, 0
    for step in range(steps):
        loss = loss_of(model, 2 * step)
        if step % 2:  # the forward comes first, or the gradients are zeroed first
            manager.zero_grad()
        manager.backward(loss)
        manager.backward(loss_of(model, 2 * step + 1))
        if step == steps // 3 and bmt.rank() == bmt.world_size() - 1:
            next(p for p in decayed if p.grad is not None and p.numel()).grad[0] = torch.inf
        manager.clip_grad_norm(optimizer.param_groups, max_norm=0.5)
        manager.step()
        num_pending += sum("_pending" in p.__dict__ for p in model.parameters())
        if step == steps // 2:
            state = optimizer.state_dict(gather=True)
        if not step % 2:
            manager.zero_grad()
        losses.append(loss.item())
    weights = [full_value(p) for p in model.parameters()]
    entries = optimizer.state_dict(gather=True)["state"].values()
    arrays = [value for entry in entries for value in entry.values() if torch.is_tensor(value)]
    _C.disturb_updates(0)
    trained = sum(p.requires_grad and p.numel() > 0 for p in model.parameters())
    assert num_pending == (trained * (steps - 1) if overlap else 0), (num_pending, trained)
    return losses, [*weights, *arrays], state


def compare(dtype: torch.dtype, steps: int, kind: str = "adam") -> None:
    losses, tensors, state = train(dtype, True, steps, kind)
    expected_losses, expected_tensors, expected_state = train(dtype, False, steps, kind)
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected_tensors, strict=True))
    for number, entry in expected_state["state"].items():
        for name, value in entry.items():
            same = state["state"][number][name]
            assert torch.equal(same, value) if torch.is_tensor(value) else same == value


@pytest.mark.parametrize("world", (1, 2, 4))
def test_twelve_steps(world: int) -> None:
    run_ranks(world, compare, torch.bfloat16, 12, timeout=300)


@pytest.mark.parametrize("kind", ("sgd", "lion"))
def test_other_formulas(kind: str) -> None:
    run_ranks(2, compare, torch.bfloat16, 6, kind, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "dtype"),
    [(world, dtype) for dtype in (torch.float32, torch.bfloat16) for world in (1, 2, 4)]
    if STEPS >= 200
    else [(2, torch.bfloat16), (4, torch.float32)],
    ids=str,
)
def test_many_steps(world: int, dtype: torch.dtype) -> None:
    """A bit that differs does so in the first steps after an overflow, or after a growth of the loss scale."""
    run_ranks(world, compare, dtype, STEPS, timeout=600)
