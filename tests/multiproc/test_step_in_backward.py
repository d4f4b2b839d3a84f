"""OptimManager(step_in_backward=True): updates that start inside backward have the bits of those within step()."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import nn

import bmtrain
from bmtrain import _C
from bmtrain.distributed import checkpoint
from bmtrain.optim import (
    AdamOffloadOptimizer,
    AdamOptimizer,
    LionOffloadOptimizer,
    OptimManager,
    SGDOptimizer,
)
from bmtrain.parameter import full_value
from bmtrain.wrapper import BMTrainModelWrapper, model_wrapper_dispatch

NUM_BLOCKS = 4
Hook = Callable[["Model"], Any]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks, called in the order ``path``, and a head outside of them."""

    def __init__(self, path: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [bmtrain.Block(model_wrapper_dispatch(Inner())) for _ in range(NUM_BLOCKS)]
        )
        self.head = nn.Linear(12, 3)
        self.path = path
        self.extra: Hook | None = None  # a term of the loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.path:
            x = self.blocks[number](x)
        loss = self.head(x).square().mean()
        return loss if self.extra is None else loss + self.extra(self)


def shard_of_first(model: Model) -> torch.Tensor:
    return next(model.blocks[1].parameters()).square().sum() * 0.01


def read_of_first(model: Model) -> torch.Tensor:
    weight: Any = next(model.blocks[1].parameters())
    return weight.gather().square().sum() * 0.01


def freeze(model: Model) -> None:
    model.blocks[2].requires_grad_(False)


def watch(model: Model) -> None:
    """A hook that changes a gradient once it is complete."""
    next(model.blocks[3].parameters()).register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))


STRAIGHT = (0, 1, 2, 3)
#: Name -> order of the blocks, what is done to the model, a term of the loss, blocks that can be updated early.
CASES: dict[str, tuple[tuple[int, ...], Hook | None, Hook | None, int]] = {
    "straight": (STRAIGHT, None, None, 4),
    "a block called twice": ((0, 1, 2, 1, 3), None, None, 4),
    "a block called twice in a row": ((0, 1, 1, 2, 3), None, None, 4),
    "a block left out": ((0, 1, 3), None, None, 3),
    "a regulariser of shards": (STRAIGHT, None, shard_of_first, 3),
    "a read outside the block": (STRAIGHT, None, read_of_first, 3),
    "a frozen block": (STRAIGHT, freeze, None, 3),
    "a hook on a gradient": (STRAIGHT, watch, None, 3),
}
OPTIMIZERS: dict[str, Any] = {
    "Adam": AdamOptimizer,
    "Adam offload": AdamOffloadOptimizer,
    "SGD": partial(SGDOptimizer, momentum=0.9),
    "Lion offload": LionOffloadOptimizer,
}


def train(
    case: str, kind: str, early: bool, dtype: torch.dtype, accumulate: int
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    path, change, extra, _ = CASES[case]
    torch.manual_seed(0)
    model: Any = BMTrainModelWrapper(Model(path).to(dtype))
    model.extra = extra
    if change is not None:
        change(model)
    decayed = [p for p in model.parameters() if len(p.full_shape) > 1]
    others = [p for p in model.parameters() if len(p.full_shape) <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer = OPTIMIZERS[kind](groups, lr=1e-2)
    manager = OptimManager(step_in_backward=early, accumulate=accumulate)
    manager.add_optimizer(optimizer, bmtrain.lr_scheduler.Cosine(optimizer, 1e-2, 2, 20))
    counts, pending = [], []
    for step in range(4 * accumulate):
        manager.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + bmtrain.rank())
        manager.backward(model(torch.randn(5, 12, generator=generator).to(dtype)).float())
        if (step + 1) % accumulate == 0:
            counts.append(manager.num_blocks_stepped_in_backward)
            pending.append(len({id(p._block) for p in model.parameters() if "_pending" in p.__dict__}))
        manager.step()
    state = optimizer.state_dict(gather=True)["state"]
    arrays = [value for entry in state.values() for value in entry.values() if torch.is_tensor(value)]
    return [*(full_value(p) for p in model.parameters()), *arrays], counts, pending


def compare(case: str, kind: str, dtype: torch.dtype = torch.float32, accumulate: int = 1) -> None:
    _C.disturb_updates(200)
    early, counts, pending = train(case, kind, True, dtype, accumulate)
    _C.disturb_updates(0)
    plain, none, _ = train(case, kind, False, dtype, accumulate)
    assert all(torch.equal(a, b) for a, b in zip(early, plain, strict=True))
    expected = CASES[case][3]
    assert counts == [expected] * 4, counts
    assert none == [0] * 4
    # The first step makes the state and updates at once; then offloaded updates go on behind the backward.
    assert pending[1:] == [expected if "offload" in kind else 0] * 3, pending


@pytest.mark.parametrize("case", CASES)
def test_bits_and_counts(case: str) -> None:
    run_ranks(2, compare, case, "Adam offload")


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "Adam offload"])
def test_every_optimizer(kind: str) -> None:
    run_ranks(1, compare, "straight", kind, torch.bfloat16)


def test_the_last_backward_of_an_accumulation() -> None:
    run_ranks(2, compare, "straight", "Adam offload", torch.bfloat16, 3)


def refusals(folder: str) -> None:
    with pytest.raises(ValueError, match="step_in_backward: expected no loss scale"):
        OptimManager(loss_scale=8, step_in_backward=True)
    model: Any = BMTrainModelWrapper(Model(STRAIGHT))
    optimizer = AdamOptimizer(model.parameters())
    manager = OptimManager(step_in_backward=True)
    manager.add_optimizer(optimizer)
    x = torch.ones(2, 12)
    with pytest.raises(RuntimeError, match="clip_grad_norm: with step_in_backward=True"):
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
    with pytest.raises(ValueError, match="step_in_backward: expected no loss scale"):
        manager.load_state_dict(
            OptimManager(loss_scale=8).state_dict() | {"optimizers": [0], "lr_schedulers": [0]}
        )
    scaling = OptimManager(loss_scale=8)
    scaling.add_optimizer(optimizer)
    checkpoint.save(folder, 1, model, scaling)
    with pytest.raises(ValueError, match="step_in_backward: expected no loss scale"):
        checkpoint.load(folder, model, manager)
    assert not manager.loss_scale_enabled
    manager.backward(model(x))
    with pytest.raises(RuntimeError, match=r"call step\(\) before the next one"):
        manager.backward(model(x))
    manager.step()
    manager.backward(model(x))
    assert manager.num_blocks_stepped_in_backward == NUM_BLOCKS


def test_what_it_cannot_be_had_with_is_refused(tmp_path: Path) -> None:
    run_ranks(1, refusals, str(tmp_path))
