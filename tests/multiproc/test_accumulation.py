"""Gradients that add up before they are sent, by the manager and by hand."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from harness.tanh_model import DIM, LAYERS, MICROS, Model, batches

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain.distributed import checkpoint
from bmtrain.global_var import context


def managed(accumulate: int, zeroed: str = "manager") -> tuple[list[torch.Tensor], int]:
    model = Model()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager(loss_scale=4, accumulate=accumulate)
    manager.add_optimizer(optimizer)
    group = context().world
    for step in range(3):
        group.reduce_comm.reset_traffic()
        pieces = batches(step) if accumulate > 1 else [torch.cat(batches(step))]
        for x in pieces:  # one loop, whether or not gradients accumulate
            {"manager": manager, "optimizer": optimizer, "model": model}[zeroed].zero_grad()
            manager.backward(model(x) / len(x))
            manager.step()
    return list(model.state_dict().values()), dict(group.reduce_comm.traffic())["all_to_all"][0]


@pytest.mark.parametrize("zeroed", ["manager", "optimizer", "model"])
def test_manager_steps_on_the_mean_of_the_accumulated_gradients(zeroed: str) -> None:
    # The batches of a step together, and one after the other.
    for (weights, messages), (whole, _) in zip(
        run_ranks(2, managed, MICROS, zeroed), run_ranks(2, managed, 1), strict=True
    ):
        assert messages == LAYERS
        for one, other in zip(weights, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="accumulate: expected at least 1, got 0"):
        bmt.optim.OptimManager(accumulate=0)


def left_unsent() -> None:
    model = Model()
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    x = torch.randn(2, DIM)
    model(x).backward()
    wanted = [p.grad.clone() for p in model.parameters()]

    def check() -> None:
        for param, gradient in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(param.grad, gradient)

    optimizer.zero_grad()
    with bmt.no_sync():
        model(x).backward()
    optimizer.zero_grad()  # drops them
    model(x).backward()
    check()
    # What the sending backward does not come to is sent all the same.
    optimizer.zero_grad(set_to_none=True)
    with bmt.no_sync():
        model(x).backward()
    assert all(p.grad is None for p in model.parameters())
    (0 * model.layers(x).sum()).backward()
    check()
    optimizer.zero_grad(set_to_none=True)
    with bmt.no_sync():
        model(x).backward()
    (0 * model.head(x).sum()).backward()
    check()
    assert current_engine(context()).pool.stats()["buffers_in_use"] == 0


def test_gradients_left_unsent_are_dropped_or_sent_and_never_lost():
    run_ranks(2, left_unsent)


def seen_by_hooks() -> list[list[str]]:
    model = Model()
    large = bmt.DistributedParameter(torch.ones(300_000))  # travels alone
    model.register_parameter("large", large)
    seen: list[list[str]] = []

    def hook_of(name: str):
        def note(param: torch.Tensor) -> None:
            assert param.grad is not None
            seen[-1].append(name)

        return note

    for name, param in model.named_parameters():
        if name in ("head.weight", "layers.0.weight", "large"):
            param.register_post_accumulate_grad_hook(hook_of(name))

    def run() -> None:
        seen.append([])
        (model(torch.ones(2, DIM)) + large.gather().sum()).backward()

    for _ in range(2):  # without, and with a gradient of an earlier step
        with bmt.no_sync():
            run()
        run()
    with bmt.no_sync():
        seen.append([])
        (large**2).sum().backward()  # reaches the shard at once
    return [sorted(names) for names in seen]


def test_hooks_see_gradients_when_they_are_complete():
    everything = ["head.weight", "large", "layers.0.weight"]
    assert run_ranks(2, seen_by_hooks) == [[[], everything, [], everything, ["large"]]] * 2


def trained_in_turn(frozen: str, first: bool, between: bool, second: bool, level: int) -> None:
    model = Model(policy=bmt.BlockPolicy(level=level))
    twin = copy.deepcopy(model)
    x = torch.randn(2, DIM)
    for net, waiting in ((twin, nullcontext), (model, bmt.no_sync)):  # any backward sends what waits
        param = dict(net.named_parameters())[frozen]
        param.requires_grad_(first)
        with waiting():
            net(x).backward()
        loss = net(2 * x)
        param.requires_grad_(between)
        with waiting():
            loss.backward()
        param.requires_grad_(second)
        net(3 * x).backward()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("frozen", ["layers.1.weight", "head.weight"])
def test_freezing_while_gradients_wait_is_as_freezing_between_backwards(frozen: str, level: int):
    for flags in itertools.product((False, True), repeat=3):
        run_ranks(2, trained_in_turn, frozen, *flags, level)


def dropped_and_frozen(dropped: str, level: int) -> None:
    model = Model(policy=bmt.BlockPolicy(level=level))
    twin = copy.deepcopy(model)
    x = torch.randn(2, DIM)
    for net, waiting in ((twin, nullcontext), (model, bmt.no_sync)):
        param = dict(net.named_parameters())[dropped]
        with waiting():
            net(x).backward()
        param.grad = None
        param.requires_grad_(False)
        net(2 * x).backward()
        assert param.grad is None
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("dropped", ["layers.1.weight", "head.weight"])
def test_a_dropped_gradient_of_a_frozen_parameter_stays_none(dropped: str, level: int):
    run_ranks(2, dropped_and_frozen, dropped, level)


def of_two_models(zero_grad_of: str) -> None:
    waiting, other = Model(), Model()
    optimizers = {
        "manager": bmt.optim.AdamOptimizer(other.parameters()),
        "optimizer": bmt.optim.AdamOptimizer(other.parameters()),
        "torch": torch.optim.SGD(other.parameters()),
        "part": bmt.optim.AdamOptimizer([p for n, p in waiting.named_parameters() if n.endswith("bias")]),
    }
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizers["manager"])
    x = torch.randn(2, DIM)
    with bmt.no_sync():
        waiting(x).backward()
        other(x).backward()
    if zero_grad_of == "parameters":
        for param in other.parameters():
            param.grad = None
    else:
        {**optimizers, "manager": manager, "model": other}[zero_grad_of].zero_grad()
    waiting(x).backward()
    wanted = copy.deepcopy([p.grad for p in waiting.parameters()])
    waiting.zero_grad()
    waiting(x).backward()
    for gradient, (name, param) in zip(wanted, waiting.named_parameters(), strict=True):
        factor = 1 if zero_grad_of == "part" and name.endswith("bias") else 2
        torch.testing.assert_close(gradient, factor * param.grad)
    left = sum((p.grad.abs().sum() for p in other.parameters() if p.grad is not None), torch.zeros(()))
    assert (bmt.distributed.all_reduce(left) > 0) == (zero_grad_of == "part")
    assert current_engine(context()).pool.stats()["buffers_in_use"] == 0


@pytest.mark.parametrize("zero_grad_of", ["manager", "optimizer", "torch", "model", "parameters", "part"])
def test_zero_grad_drops_what_waits_for_its_own_parameters_alone(zero_grad_of: str):
    run_ranks(2, of_two_models, zero_grad_of)


def begun_anew(by: str, folder: str) -> None:
    model = Model()
    optimizer = bmt.optim.SGDOptimizer(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager(accumulate=2)
    manager.add_optimizer(optimizer)
    state = manager.state_dict()
    checkpoint.save(folder, 0, model, manager)
    x = torch.randn(2, DIM)
    manager.zero_grad()
    loss = model(100 * x)
    if by == "load":
        manager.backward(loss)
        manager.load_state_dict(state)
    elif by == "checkpoint":
        manager.backward(loss)
        checkpoint.load(folder, model, manager)
    else:
        loss.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("too large")))
        with pytest.raises(MemoryError):
            manager.backward(loss)
    before = model.state_dict()
    for part in (x, 2 * x):
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        manager.zero_grad()
        manager.backward(model(part))
        manager.step()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.load_state_dict(before)
    optimizer.zero_grad()
    ((model(x) + model(2 * x)) / (2 * bmt.world_size())).backward()
    for gradient, param in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, param.grad)


@pytest.mark.parametrize("by", ["load", "checkpoint", "failure"])
def test_accumulation_begins_anew_after(by: str, tmp_path: Path):
    run_ranks(2, begun_anew, by, str(tmp_path))
