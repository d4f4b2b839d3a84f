"""The loss scale of trainers in fp16: what one rank's overflow does on all, and states of torch's GradScaler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.integrations.loss_scale import SharedScaler


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Linear, torch.optim.Optimizer, SharedScaler]:
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 3, bias=False, dtype=dtype))
    plain = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), SharedScaler(plain)


def overflow_of_one_rank(where: int) -> list[tuple[float, bool]]:
    """Scale and whether the weights moved, step by step; the shard of rank `where` overflows in the second."""
    model, optimizer, scaler = make()
    [shard] = model.parameters()
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if step == 1 and bmt.rank() == where:
            shard.grad.fill_(math.inf)
        before = shard.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        moved = (before - shard.detach()).abs()
        assert not moved.any() or torch.allclose(moved, torch.full_like(moved, 2.0 * bmt.world_size()))
        seen.append((scaler.get_scale(), bool(moved.any())))
    return seen


@pytest.mark.parametrize("where", [0, 1])
def test_an_overflow_of_one_rank_skips_the_step_of_all(where: int) -> None:
    expected = [(8.0, True), (4.0, False), (4.0, True), (8.0, True), (8.0, True)]
    assert run_ranks(2, overflow_of_one_rank, where) == [expected] * 2


def train_by_two_optimizers(scaler: Any) -> list[tuple[float, ...]]:
    """Scale and weights, step by step; the gradient of the first, the second, both or none overflows."""
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in params]
    seen = []
    for bad in ((0,), (1,), (0, 1), (), (), (), ()):
        for number, (p, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            p.grad = torch.full_like(p, math.inf if number in bad else 3.0)
            scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), *(p.item() for p in params)))
    return seen


def by_both_scalers() -> None:
    made = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    made[1].scale(torch.ones(1))  # it has a state from here on
    assert train_by_two_optimizers(SharedScaler(made[0])) == train_by_two_optimizers(made[1])


def test_an_overflow_of_one_of_two_optimizers_lowers_the_scale() -> None:
    run_ranks(1, by_both_scalers)


def exchange() -> None:
    _, _, scaler = make()
    theirs = torch.amp.GradScaler("cpu", init_scale=32.0)
    theirs.scale(torch.ones(1))  # it has a state from here on
    scaler.load_state_dict(theirs.state_dict())
    assert scaler.get_scale() == 32.0 and scaler.state_dict() == theirs.state_dict()
    theirs.load_state_dict(scaler.state_dict())


def test_states_are_those_of_grad_scaler() -> None:
    run_ranks(1, exchange)


def unscale_in_fp16() -> str:
    _, optimizer, scaler = make(torch.float16)
    with pytest.raises(ValueError) as caught:
        scaler.unscale_(optimizer)
    return str(caught.value)


def test_parameters_in_fp16_are_refused() -> None:
    [message] = run_ranks(1, unscale_in_fp16)
    assert message.startswith("fp16: expected parameters in float32") and "dtype=torch.float32" in message


def unscale_twice() -> str:
    _, optimizer, scaler = make()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError) as caught:
        scaler.unscale_(optimizer)
    return str(caught.value)


def test_gradients_are_unscaled_once() -> None:
    assert "before update(), got another" in run_ranks(1, unscale_twice)[0]
