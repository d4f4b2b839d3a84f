"""What Adam promises beside its numbers: state, layouts, writes from outside, copies, an owned scale, deltas."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from harness.adam_inputs import draw_gradients, parameters
from kernel_levels import same_bits
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer

BOTH = (AdamOptimizer, AdamOffloadOptimizer)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", BOTH)
def test_state_is_what_the_contract_says(cls: Any, dtype: torch.dtype) -> None:
    (p,) = parameters(dtype, ((3, 5),))
    p.grad = torch.ones_like(p)
    optimizer = cls([p])
    assert cls._bmtrain_optimizer
    assert not optimizer.state
    optimizer.step()
    master = ["_param_fp32"] if dtype != torch.float32 or cls is AdamOffloadOptimizer else []
    assert sorted(optimizer.state[p]) == sorted(["step", "exp_avg", "exp_avg_sq", *master])
    assert type(optimizer.state[p]["step"]) is int
    for name in ("exp_avg", "exp_avg_sq", *master):
        assert optimizer.state[p][name].dtype == torch.float32
        assert optimizer.state[p][name].shape == p.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", BOTH)
def test_parameters_and_gradients_of_any_layout(cls: Any, dtype: torch.dtype) -> None:
    base = parameters(dtype, ((6, 4),))[0].detach()
    plain, turned = nn.Parameter(base.clone()), nn.Parameter(base.clone().t().contiguous().t())
    a, b = cls([plain], lr=0.1), cls([turned], lr=0.1)
    for i in range(3):
        grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).to(dtype)
        plain.grad, turned.grad = grad.t().contiguous().t(), grad
        a.step()
        b.step()
    assert torch.equal(plain.data, turned.data)
    assert not turned.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", BOTH)
def test_a_value_written_from_outside_wins(cls: Any, dtype: torch.dtype) -> None:
    """D-19: what a load writes is authoritative, element by element."""
    (p,) = parameters(dtype, ((8,),))
    optimizer = cls([p], lr=1e-4)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    master = optimizer.state[p].get("_param_fp32", p).detach().clone()
    with torch.no_grad():
        loaded = p.clone()
        loaded[2] = 5
        p.copy_(loaded)
    p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0
    optimizer.step()
    master[2] = 5
    assert torch.equal(optimizer.state[p].get("_param_fp32", p).detach(), master)
    assert torch.equal(p.data, loaded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", BOTH)
def test_step_counts_as_an_in_place_change(cls: Any, dtype: torch.dtype) -> None:
    (p,) = parameters(dtype, ((4,),))
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    cls([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", BOTH)
def test_copies_and_pickles_continue_alike(cls: Any, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = cls(params, lr=0.1, hold_steps=1, scale=8)
    generator = torch.Generator().manual_seed(1)
    draw_gradients(params, generator)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.scale, other.steps_since_last_scale) == (8, 1)
        twins = other.param_groups[0]["params"]
        first = copy.deepcopy(params)
        mirror = cls(first, lr=0.1, hold_steps=1, scale=8)
        mirror.load_state_dict(optimizer.state_dict())
        draw_gradients(twins, generator)
        for p, q in zip(first, twins, strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        mirror.step()
        other.step()
        assert all(same_bits(p.data, q.data) for p, q in zip(first, twins, strict=True))


@pytest.mark.parametrize("cls", BOTH)
def test_owned_loss_scale(cls: Any) -> None:
    (p,) = parameters(shapes=((4,),))
    optimizer = cls([p], scale=2.0**20)
    assert (optimizer.scale, optimizer.steps_since_last_scale) == (2**20, 0)
    assert cls([p]).scale == 1
    loss = torch.tensor(0.5)
    assert optimizer.loss_scale(loss).item() == 2.0**19
    p.grad = torch.full((4,), 2.0**20)
    optimizer.step()
    assert optimizer.steps_since_last_scale == 1
    assert torch.allclose(optimizer.state[p]["exp_avg"], torch.full((4,), 0.1))
    value, state = p.detach().clone(), copy.deepcopy(optimizer.state[p])
    p.grad[1] = math.inf
    with pytest.raises(OverflowError, match="Gradient overflow"):
        optimizer.step()
    assert torch.equal(p.data, value)
    assert optimizer.state[p]["step"] == state["step"]
    assert torch.equal(optimizer.state[p]["exp_avg"], state["exp_avg"])
    assert optimizer.steps_since_last_scale == 1
    optimizer.justify_scale(16)
    assert (optimizer.scale, optimizer.steps_since_last_scale) == (16, 0)
    optimizer.step(scale=4)  # the caller's scale: neither checked nor counted
    assert optimizer.steps_since_last_scale == 0
    with pytest.raises(ValueError, match="scale: expected a finite number above 0, got -1"):
        optimizer.justify_scale(-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_deltas(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = AdamOffloadOptimizer(params, lr=0.1, weight_decay=0.5, record_delta=True)
    assert (optimizer.get_avg_delta(), optimizer.get_var_delta()) == (0, 0)
    before = [p.detach().double() for p in params]
    draw_gradients(params, torch.Generator().manual_seed(1))
    optimizer.step()
    deltas = []
    for p, w in zip(params, before, strict=True):
        state = optimizer.state[p]
        u = (state["exp_avg"].double() / (1 - 0.9)) / (
            (state["exp_avg_sq"].double() / (1 - 0.999)).sqrt() + 1e-8
        )
        deltas.append((u + 0.5 * w).reshape(-1))
    every = torch.cat(deltas)
    assert optimizer.get_avg_delta() == pytest.approx(every.mean().item(), rel=1e-4, abs=1e-6)
    assert optimizer.get_var_delta() == pytest.approx(every.var(correction=0).item(), rel=1e-4)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert (optimizer.get_avg_delta(), optimizer.get_var_delta()) == (0, 0)
    for name in ("get_avg_delta", "get_var_delta"):
        with pytest.raises(NotImplementedError, match="record_delta=True"):
            getattr(AdamOptimizer(params), name)()


def test_non_finite_gradients_are_not_filtered() -> None:
    (p,) = parameters(shapes=((3,),))
    p.grad = torch.tensor([1.0, math.nan, 1.0])
    AdamOptimizer([p]).step()
    assert p.isnan().tolist() == [False, True, False]


def test_state_of_neighbours_is_contiguous_and_skewed() -> None:
    params = parameters(shapes=((1024,),) * 4)
    optimizer = AdamOffloadOptimizer(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    starts = [optimizer.state[p]["exp_avg"].data_ptr() for p in params]
    assert [b - a for a, b in itertools.pairwise(starts)] == [4096] * 3
    distance = optimizer.state[params[0]]["exp_avg_sq"].data_ptr() - starts[0]
    assert distance & (distance - 1) != 0
    assert distance % 4096 != 0


@pytest.mark.parametrize("is_global", (False, True), ids=("own", "global"))
@pytest.mark.parametrize("cls", BOTH)
def test_hooks_of_a_step_are_called_and_may_replace_its_arguments(cls: Any, is_global: bool) -> None:
    """Also those that are registered between two steps, and not after they have been removed."""
    (p,) = parameters(torch.float32, ((3,),))
    p.grad = torch.full_like(p, 4.0)
    optimizer = cls([p], betas=(0.0, 0.5))
    seen: list[str] = []

    def before(own: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        seen.append("before")
        return args, {**kwargs, "scale": 2 * kwargs["scale"]}

    def after(own: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(f"after {kwargs['scale']}")

    optimizer.step(scale=1.0)
    first = optimizer.state[p]["exp_avg"].clone()
    if is_global:
        handles = (
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        )
    else:
        handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        optimizer.step(scale=1.0)
    finally:
        for handle in handles:
            handle.remove()
    second = optimizer.state[p]["exp_avg"].clone()
    optimizer.step(scale=1.0)
    assert seen == ["before", "after 2.0"]
    assert (first[0].item(), second[0].item()) == (4.0, 2.0)
    assert torch.equal(optimizer.state[p]["exp_avg"], first)


@pytest.mark.parametrize("cls", BOTH)
def test_a_profiler_sees_the_steps_by_name(cls: Any) -> None:
    (p,) = parameters(torch.float32, ((3,),))
    p.grad = torch.ones_like(p)
    optimizer = cls([p])
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.step()
    optimizer.step()
    steps = [e for e in profile.key_averages() if e.key == f"Optimizer.step#{cls.__name__}.step"]
    assert [e.count for e in steps] == [2]
