"""What a manager saves and loads, files of older versions, and loops written for them."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.managed import give_gradients, parameters

import bmtrain as bmt
import bmtrain.backward
from bmtrain.lr_scheduler import NoDecay
from bmtrain.optim import OptimManager
from bmtrain.optim.optim_manager import check_overflow


def train(manager: OptimManager, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        manager.zero_grad()
        give_gradients(params, manager.loss_scale, seed=step)
        manager.step()


def build(lr: float, **options: Any) -> tuple[list[torch.nn.Parameter], OptimManager]:
    params = parameters()
    manager = OptimManager(**options)
    first = torch.optim.Adam(params[:2], lr=lr)
    manager.add_optimizer(first, NoDecay(first, lr, 6, None))
    manager.add_optimizer(torch.optim.SGD(params[2:], lr=lr, momentum=0.9))
    return params, manager


def resume_is_exact(gather: bool) -> None:  # BC-53
    reference, manager = build(0.1, loss_scale=16.0, loss_scale_steps=4)
    train(manager, reference, range(3))
    buffer = io.BytesIO()
    saved = manager.state_dict(gather_opt=gather)
    assert set(saved) == {
        "optimizers",
        "lr_schedulers",
        "loss_scale",
        "loss_scale_enabled",
        "steps_since_last_scale",
    }
    assert saved["lr_schedulers"][1] is None
    torch.save({"manager": saved, "params": reference}, buffer)
    train(manager, reference, range(3, 8))

    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    untouched = copy.deepcopy(loaded["manager"])
    params, other = build(0.7)
    with torch.no_grad():
        for p, value in zip(params, loaded["params"], strict=True):
            p.copy_(value)
    other.load_state_dict(loaded["manager"])
    other.loss_scale_steps = 4
    train(other, params, range(3, 8))
    assert other.loss_scale == manager.loss_scale == 64.0
    assert other.steps_since_last_scale == manager.steps_since_last_scale
    for a, b in zip(params, reference, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(loaded["manager"], untouched, rtol=0, atol=0)


@pytest.mark.parametrize("gather", [False, True])
def test_resume_is_exact(gather: bool) -> None:
    run_ranks(1, resume_is_exact, gather)


@pytest.mark.parametrize("saved", (None, 8.0))
def test_a_state_without_a_loss_scale_leaves_the_scale(saved: float | None) -> None:
    """As a run that goes on in fp16 after bf16: without a scale its gradients would underflow."""
    manager = OptimManager(loss_scale=1024.0)
    manager.load_state_dict(OptimManager(loss_scale=saved).state_dict())
    assert (manager.loss_scale_enabled, manager.loss_scale) == (True, saved or 1024.0)


def load_checks_the_number_of_optimizers() -> None:
    _, manager = build(0.1)
    state = manager.state_dict()
    with pytest.raises(ValueError, match="expected the state of 0 optimizers, got 2"):
        OptimManager().load_state_dict(state)
    del state["steps_since_last_scale"]
    manager.load_state_dict(state)
    assert manager.steps_since_last_scale == 0


def test_load_checks_the_number_of_optimizers() -> None:
    run_ranks(1, load_checks_the_number_of_optimizers)


def moments_of_older_files() -> None:
    params = parameters(torch.float16)
    _, state = adam_after_one_step(params, 1)
    scale = 512.0
    old = copy.deepcopy(state)
    old["loss_scale"] = scale
    entry = old["optimizers"][0]["state"][0]
    exact = {key: entry[key].clone() for key in ("exp_avg", "exp_avg_sq")}
    entry["exp_avg"] = (exact["exp_avg"] * scale).half()  # scaled units, and fp16
    entry["exp_avg_sq"] = exact["exp_avg_sq"] * scale
    manager, _ = adam_after_one_step(params, 2)
    manager.load_state_dict(old)
    loaded = manager.state_dict()["optimizers"][0]["state"][0]
    assert loaded["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(loaded["exp_avg"], exact["exp_avg"], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(loaded["exp_avg_sq"], exact["exp_avg_sq"], rtol=1e-6, atol=0)
    assert entry["exp_avg"].dtype == torch.float16  # the caller's


def adam_after_one_step(params: list[torch.nn.Parameter], seed: int) -> tuple[OptimManager, dict[str, Any]]:
    manager = OptimManager(loss_scale=1.0)
    manager.add_optimizer(bmt.optim.AdamOptimizer(params, lr=0.1))
    give_gradients(params, seed=seed)
    manager.step()
    return manager, manager.state_dict()


def test_moments_of_older_files() -> None:
    run_ranks(1, moments_of_older_files)


def the_managers_scale_is_used() -> None:
    results = []
    for options in ({}, {"scale": 4.0}):
        params = parameters(torch.float32, torch.bfloat16)
        manager = OptimManager(loss_scale=256.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager.add_optimizer(bmt.optim.AdamOptimizer(params, lr=0.1, **options))
        for step in range(3):
            give_gradients(params, manager.loss_scale * 1e-3, seed=step)
            manager.step()
        results.append([p.detach() for p in params])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_the_managers_scale_is_used() -> None:
    run_ranks(1, the_managers_scale_is_used)


class Legacy(torch.optim.SGD):
    """What optim_step needs of an optimizer that owns a scale."""

    def __init__(self, params: Any, scale: float) -> None:
        super().__init__(params, lr=0.1)
        self._owned_scale = scale
        self.steps_since_last_scale = 0

    @property
    def scale(self) -> float:
        return self._owned_scale

    def justify_scale(self, scale: float) -> None:
        self._owned_scale = scale
        self.steps_since_last_scale = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if check_overflow(self.param_groups):
            raise OverflowError("Gradient overflow")
        self.steps_since_last_scale += 1
        super().step(closure)


def optim_step_with_an_owned_scale() -> None:
    bmt.config["loss_scale_factor"], bmt.config["loss_scale_steps"] = 2, 2
    params = parameters()
    optimizer = Legacy(params, 4.0)
    scheduler = NoDecay(optimizer, 0.1, 100, None)
    scales = []
    for overflow in [False, True, True, True, False, False, False]:
        before = scheduler.num_iter
        give_gradients(params)
        if overflow:
            params[0].grad[0, 0] = math.inf
        bmt.backward.optim_step(optimizer, scheduler)
        assert scheduler.num_iter == before + (not overflow)
        if overflow:
            assert not params[0].grad.any()
        scales.append(optimizer.scale)
    assert scales == [4, 2, 1, 1, 1, 2, 2]


def optim_step_with_any_optimizer() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    scheduler = NoDecay(optimizer, 0.1, 0, None)
    old = params[0].detach().clone()
    give_gradients(params)
    bmt.backward.optim_step(optimizer, scheduler)
    bmt.backward.optim_step(optimizer)
    assert scheduler.num_iter == 1
    torch.testing.assert_close(params[0].detach(), old - 0.2 * params[0].grad)


@pytest.mark.parametrize("case", [optim_step_with_an_owned_scale, optim_step_with_any_optimizer])
def test_optim_step(case: Any) -> None:
    run_ranks(1, case)
