"""The library's optimizers over shards: any number of ranks trains alike, and state moves between them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from harness import rank_outcomes, run_ranks
from torch import nn

import bmtrain
from bmtrain.optim import (
    AdamOffloadOptimizer,
    AdamOptimizer,
    LionOptimizer,
    SGDOffloadOptimizer,
    SGDOptimizer,
)
from bmtrain.parameter import shard_of

SHAPES = ((5, 7), (3,), (1,), (33, 20), (2, 2))
CLASSES: dict[str, Any] = {
    "device": AdamOptimizer,
    "offload": AdamOffloadOptimizer,
    "sgd": partial(SGDOffloadOptimizer, momentum=0.9),
    "plain sgd": SGDOptimizer,
    "lion": LionOptimizer,
    "device, bf16 moments": partial(AdamOptimizer, state_dtype="bfloat16"),
    "device, 8-bit moments": partial(AdamOptimizer, state_dtype="int8"),
    "offload, 8-bit moments": partial(AdamOffloadOptimizer, state_dtype="int8"),
}


class Inner(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = bmtrain.DistributedParameter(torch.linspace(-1, 1, 70).reshape(7, 10).to(dtype))
        self.bias = bmtrain.DistributedParameter(torch.linspace(1, 2, 7).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


def build(dtype: torch.dtype) -> tuple[list[torch.Tensor], bmtrain.Block]:
    """Parameters outside and inside a block, and a plain one; equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    outside = [
        bmtrain.DistributedParameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]
    block = bmtrain.Block(Inner(dtype))
    plain = nn.Parameter(torch.ones(6, dtype=dtype))
    return [*outside, *block.parameters(), plain], block


def train_step(params: list[torch.Tensor], optimizer: Any, number: int) -> None:
    """Gradients of a full-size draw, cut to shards: what any number of ranks would compute."""
    generator = torch.Generator().manual_seed(100 + number)
    for p in params:
        shape = getattr(p, "_original_shape", p.shape)
        full = torch.randn(shape, generator=generator).to(p.dtype)
        p.grad = shard_of(p, full).reshape(p.shape).clone()
    optimizer.step(scale=4)


def values(params: list[torch.Tensor]) -> list[list[float]]:
    return [bmtrain.parameter.full_value(p).float().reshape(-1).tolist() for p in params]


def train_and_save(kind: str, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    params, _ = build(dtype)
    optimizer = CLASSES[kind](params, lr=0.1, weight_decay=0.01)
    for number in range(3):
        train_step(params, optimizer, number)
    state = optimizer.state_dict(gather=True)
    middle = values(params)
    train_step(params, optimizer, 3)
    return state, middle, values(params)


def load_and_train(kind: str, dtype: torch.dtype, state: Any, middle: Any) -> Any:
    params, _ = build(dtype)
    for p, value in zip(params, middle, strict=True):
        full = torch.tensor(value).reshape(getattr(p, "_tp_original_shape", p.shape))
        bmtrain.parameter.load_full_value(p, full)
    optimizer = CLASSES[kind](params, lr=9.0)
    optimizer.load_state_dict(state)
    again = optimizer.state_dict(gather=True)
    assert again["state"].keys() == state["state"].keys()
    for number, entry in state["state"].items():
        for name, value in entry.items():
            assert name == "step" or torch.equal(again["state"][number][name], value)
    train_step(params, optimizer, 3)
    return values(params)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gathered_state_loads_at_any_number_of_ranks(dtype: torch.dtype, kind: str) -> None:
    """BC-54, and every number of ranks gives the same weights."""
    saved = {world: run_ranks(world, train_and_save, kind, dtype) for world in (4, 1)}
    state, middle, end = saved[4][0]
    for other_state, other_middle, other_end in (*saved[4], *saved[1]):
        assert (other_middle, other_end) == (middle, end)
        assert str(other_state) == str(state)
    assert len(state["state"]) == len(SHAPES) + 3
    for world in (1, 2, 3):
        for result in run_ranks(world, load_and_train, kind, dtype, state, middle):
            assert result == end


def save_own(dtype: torch.dtype) -> Any:
    params, _ = build(dtype)
    optimizer = AdamOptimizer(params)
    train_step(params, optimizer, 0)
    return optimizer.state_dict()


def load_own(states: list[Any], shift: int) -> str:
    params, _ = build(torch.float32)
    optimizer = AdamOptimizer(params)
    try:
        optimizer.load_state_dict(states[(bmtrain.rank() + shift) % len(states)])
    except ValueError as error:
        return str(error)
    return ""


def test_state_of_one_rank_loads_only_where_it_was() -> None:
    """D-22."""
    states = run_ranks(2, save_own, torch.float32)
    assert [s["is_whole"] for s in states] == [False, False]
    assert run_ranks(2, load_own, states, 0) == ["", ""]
    for message in run_ranks(2, load_own, states, 1):
        assert "saved at {'world_size': 2" in message
        assert "save with state_dict(gather=True)" in message
    assert "'world_size': 2" in run_ranks(1, load_own, states, 0)[0]


def overflow(bad_rank: int) -> tuple[bool, list[int], float]:
    params, _ = build(torch.float16)
    optimizer = AdamOptimizer(params, scale=8)
    before = values(params)
    for p in params:
        p.grad = torch.ones_like(p)
    if bmtrain.rank() == bad_rank:
        params[-1].grad[0] = math.inf
    try:
        optimizer.step()
    except OverflowError:
        assert values(params) == before
        assert not optimizer.state
        return True, [], optimizer.loss_scale(torch.tensor(1.0)).item()
    return False, sorted({s["step"] for s in optimizer.state.values()}), optimizer.scale


def test_overflow_is_agreed_on() -> None:
    """Only one rank holds the bad element; all of them raise, and the loss is scaled to the mean."""
    assert run_ranks(2, overflow, 1) == [(True, [], 4.0)] * 2
    assert run_ranks(2, overflow, 7) == [(False, [1], 8.0)] * 2


def load_after_steps(dtype: torch.dtype) -> tuple[Any, Any]:
    params, _ = build(dtype)
    optimizer = AdamOptimizer(params, lr=1e-3)
    train_step(params, optimizer, 0)
    for p in params:
        shape = getattr(p, "_tp_original_shape", p.shape)
        bmtrain.parameter.load_full_value(p, torch.full(shape, 5.0))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train_step(params, optimizer, 1)
    return values(params), optimizer.state_dict(gather=True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_loaded_weights_win_over_the_master(dtype: torch.dtype) -> None:
    """D-19, for shards outside and inside blocks and for plain parameters."""
    for weights, state in run_ranks(2, load_after_steps, dtype):
        assert all(set(value) == {5.0} for value in weights)
        for entry in state["state"].values():
            assert "_param_fp32" not in entry or (entry["_param_fp32"] == 5).all()


def steps_of_one_rank() -> None:
    params, _ = build(torch.float32)
    optimizer = AdamOptimizer(params)
    if bmtrain.rank() == 0:
        train_step(params, optimizer, 0)  # no collective inside
    bmtrain.synchronize()


def test_a_step_is_local() -> None:
    assert [o.status.name for o in rank_outcomes(2, steps_of_one_rank)] == ["RETURNED"] * 2


def converted(kind: str, keep: bool) -> Any:
    """Trains a Block in fp32 and then in bf16, where shards have other bounds, with its optimizer's state or not."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 7))
    block = bmtrain.Block(bmtrain.BMTrainModelWrapper(layers))
    optimizer = CLASSES[kind](block.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        dtype = next(block.parameters()).dtype
        block(torch.ones(2, 20, dtype=dtype)).float().square().mean().backward()
        optimizer.step(scale=bmtrain.world_size())

    train()
    state = optimizer.state_dict(gather=True)
    block.bfloat16()
    if keep:
        optimizer.load_state_dict(state)
        train()
        return values(list(block.parameters()))
    try:
        train()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "plain sgd"])  # which has no state
def test_state_follows_a_conversion_or_is_refused(kind: str) -> None:
    alone, *others = run_ranks(1, converted, kind, True) + run_ranks(3, converted, kind, True)
    for weights in others:
        for one, other in zip(weights, alone, strict=True):
            assert one == pytest.approx(other, abs=0.02)
    # On the ranks whose part is another one.
    assert any("state_dict(gather=True)" in told for told in run_ranks(3, converted, kind, False))
