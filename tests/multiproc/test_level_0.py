"""Level 0, plain data parallelism: the bits of level 3, and checkpoints that move between the two."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.kits import TanhLinear
from harness.tanh_model import DIM, Model, batches

import bmtrain as bmt


def trained(policy: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Three steps, and what can be seen of them."""
    torch.manual_seed(0)
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        model = Model().to(dtype)
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    norms, losses, gradients = [], [], []
    for step in range(3):
        manager.zero_grad()
        loss = model(batches(step)[0].to(dtype))
        manager.backward(loss)
        losses.append(bmt.sum_loss(loss.float()).item())
        gradients.append([row["grad_std"] for row in bmt.inspect.inspect_model(model, "*")])
        norms.append(float(manager.clip_grad_norm(optimizer.param_groups, 1e9)))
        manager.step()
    mine = [p.detach().clone() for p in model.layers.parameters()]
    return {
        "losses": losses,
        "gradients": gradients,
        "norms": norms,
        "weights": list(model.state_dict().values()),
        "mine": mine,
    }


@pytest.mark.parametrize(
    ("world", "dtype"),
    [(2, torch.bfloat16), (3, torch.float32)],
    ids=["bf16 on 2 ranks", "fp32 on 3"],
)
def test_level_0_trains_to_the_bits_of_level_3(world, dtype):
    whole = run_ranks(world, trained, {"level": 0}, dtype)
    sharded = run_ranks(world, trained, {"level": 3}, dtype)
    for mine, theirs in zip(whole, sharded, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)  # summed in another order
        assert mine["gradients"] == theirs["gradients"]
        for one, other in zip(mine["weights"], theirs["weights"], strict=True):
            assert torch.equal(one, other)
    for mine in whole[1:]:  # and every rank holds the same bits
        assert all(torch.equal(one, other) for one, other in zip(mine["mine"], whole[0]["mine"], strict=True))


def seeded_apart() -> list[torch.Tensor]:
    torch.manual_seed(bmt.rank())
    block = bmt.Block(TanhLinear(DIM), policy=bmt.BlockPolicy(level=0))
    torch.manual_seed(bmt.rank())
    block.init_parameters()
    return [param.detach().clone() for param in block.parameters()]


def test_level_0_begins_with_the_same_weights_whatever_the_seeds():
    one, other = run_ranks(2, seeded_apart)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def moved(path: str, levels: list[int]) -> int:
    """A checkpoint of one level is loaded at another, and what follows is the same."""

    def build(level: int) -> tuple[Model, Any]:
        with bmt.default_policy(bmt.BlockPolicy(level=level)):
            model = Model()
        return model, bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)

    def step(model: Model, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.full((2, DIM), 0.5)).backward()
        optimizer.step()

    first, first_optimizer = build(levels[0])
    step(first, first_optimizer)
    bmt.distributed.checkpoint.save(path, 1, first, first_optimizer)
    size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    second, second_optimizer = build(levels[1])
    bmt.distributed.checkpoint.load(path, second, second_optimizer)
    copy = pickle.loads(pickle.dumps(next(second.layers.parameters())))
    assert torch.equal(copy, next(second.layers.parameters()))
    for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        step(model, optimizer)
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    return size


def test_checkpoints_move_between_level_0_and_level_3(tmp_path):
    # What all ranks hold is written once.
    sizes = [run_ranks(2, moved, str(tmp_path / f"{levels}"), levels)[0] for levels in ([0, 3], [3, 0])]
    assert abs(sizes[0] - sizes[1]) < 0.02 * sizes[1]


def read_outside(level: int) -> list[torch.Tensor]:
    """A block's parameter that is also read outside of it, and one that a loss touches as it is."""
    torch.manual_seed(0)
    inner = TanhLinear(DIM)
    block = bmt.Block(inner, policy=bmt.BlockPolicy(level=level))
    (block(batches(0)[0]).sum() + (inner.weight.gather() ** 2).sum() * (bmt.rank() + 1)).backward()
    return [row["grad_mean"] for row in bmt.inspect.inspect_model(block, "*")]


def test_level_0_sums_what_is_read_outside_of_the_block():
    assert run_ranks(2, read_outside, 0) == run_ranks(2, read_outside, 3)
