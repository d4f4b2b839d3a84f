"""What managers on several ranks save, and who can load it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.managed_model import (
    Model,
    make_manager,
    of_all_ranks,
    own_loss,
)
from torch import Tensor

import bmtrain as bmt
from bmtrain._base.host_memory import available_bytes
from bmtrain.lr_scheduler import Noam
from bmtrain.optim import OptimManager, _arrays
from bmtrain.parameter import gather_flat

WORLDS = [1, 2, 4]


def build_optimizer(name: str, model: Model, lr: float) -> Any:
    groups = [
        {"params": list(model.first.parameters()), "weight_decay": 0.1},
        {"params": [*model.blocks.parameters(), model.unused]},
    ]
    if name == "Adam":
        return torch.optim.Adam(groups, lr=lr)
    if name == "SGD":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    return getattr(bmt.optim, name)(groups, lr=lr)


def build(name: str, lr: float, **options: Any) -> tuple[Model, OptimManager]:
    model = Model(True)
    optimizer = build_optimizer(name, model, lr)
    return model, make_manager(optimizer, Noam(optimizer, lr, 2, None), **options)


def train(model: Model, manager: OptimManager, steps: range) -> list[float]:
    losses = []
    for step in steps:
        manager.zero_grad()
        loss = own_loss(model, step)
        manager.backward(loss)
        manager.step()
        losses.append(sum(of_all_ranks(loss.item())) / bmt.world_size())
    return losses


def weights(model: Model) -> list[Tensor]:
    return [gather_flat(p, p.detach()) for p in model.parameters()]


def load_weights(model: Model, values: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        bmt.parameter.load_full_value(p, value.reshape(p._tp_original_shape))


def save_in_the_middle(name: str, folder: Path, gather: bool) -> tuple[list[float], list[Tensor]]:
    model, manager = build(name, 0.05, loss_scale=64.0, loss_scale_steps=4)
    train(model, manager, range(3))
    values = weights(model)
    torch.save(
        {"manager": manager.state_dict(gather_opt=gather), "weights": values}, folder / f"{bmt.rank()}.pt"
    )
    losses = train(model, manager, range(3, 7))
    assert manager.loss_scale == 128.0
    return losses, weights(model)


def resume(name: str, folder: Path, rank: int | None = None) -> tuple[list[float], list[Tensor]]:
    saved = torch.load(folder / f"{bmt.rank() if rank is None else rank}.pt", weights_only=True)
    untouched = copy.deepcopy(saved)
    model, manager = build(name, 0.9)
    manager.loss_scale_steps = 4
    load_weights(model, saved["weights"])
    manager.load_state_dict(saved["manager"])
    losses = train(model, manager, range(3, 7))
    assert manager.loss_scale == 128.0
    torch.testing.assert_close(saved, untouched, rtol=0, atol=0)
    return losses, weights(model)


OPTIMIZERS = ["Adam", "SGD", "AdamOptimizer", "AdamOffloadOptimizer"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("gather", [False, True])
def test_resume_is_exact(world: int, name: str, gather: bool, tmp_path: Path) -> None:  # BC-53
    uninterrupted = run_ranks(world, save_in_the_middle, name, tmp_path, gather)
    resumed = run_ranks(world, resume, name, tmp_path)
    for (losses, values), (other_losses, other_values) in zip(uninterrupted, resumed, strict=True):
        assert losses == other_losses
        torch.testing.assert_close(values, other_values, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gathered_state_moves_to_other_worlds(name: str, tmp_path: Path) -> None:  # BC-54
    losses, values = run_ranks(4, save_in_the_middle, name, tmp_path, True)[0]
    for world in (1, 2):
        for other_losses, other_values in run_ranks(world, resume, name, tmp_path, rank=3):
            assert other_losses == pytest.approx(losses, rel=1e-6)
            torch.testing.assert_close(other_values, values, rtol=1e-5, atol=2e-6)


def load_at_another_layout(name: str, folder: Path) -> None:
    """Loads what the other of two ranks saved, on one rank or on two."""
    saved = torch.load(folder / f"{1 - bmt.rank()}.pt", weights_only=True)
    _, manager = build(name, 0.1)
    with pytest.raises(ValueError, match="layout"):
        manager.load_state_dict(saved["manager"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_one_rank_fits_no_other_layout(name: str, tmp_path: Path) -> None:  # D-22
    run_ranks(2, save_in_the_middle, name, tmp_path, False)
    for world in (1, 2):
        run_ranks(world, load_at_another_layout, name, tmp_path)


def load_by_itself(level: int) -> bool:
    """Loads what ``state_dict()`` of the optimizer itself gave on rank 0; returns whether that fits."""
    policy = bmt.BlockPolicy(level=level)
    layer = bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(64, 64)), policy=policy)
    optimizer = torch.optim.Adam(layer.parameters())
    manager = make_manager(optimizer)
    manager.backward(layer(torch.ones(1, 64)).sum())
    manager.step()
    own = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(own)
    try:
        optimizer.load_state_dict(bmt.store.broadcast_object(own))
    except ValueError as error:
        assert "fits only this rank" in str(error) and "gather_opt=True" in str(error)
        return False
    return True


@pytest.mark.parametrize(("level", "fits"), [(3, [True, False]), (0, [True, True])])
def test_an_optimizer_of_torch_does_not_load_the_shards_of_another_rank(level: int, fits: list[bool]) -> None:
    assert run_ranks(2, load_by_itself, level) == fits


def legacy_loop(name: str, manager_loop: bool) -> list[Tensor]:  # BC-55
    bmt.config["loss_scale_factor"], bmt.config["loss_scale_steps"] = 2, 3
    model = Model(True)
    scale = 2.0**20
    if manager_loop:
        optimizer = getattr(bmt.optim, name)(model.parameters(), lr=0.01)
        manager = make_manager(optimizer, Noam(optimizer, 0.1, 2, None), loss_scale=scale, loss_scale_steps=3)
    else:
        optimizer = getattr(bmt.optim, name)(model.parameters(), lr=0.01, scale=scale)
        scheduler = Noam(optimizer, 0.1, 2, None)
    for step in range(7):
        loss = own_loss(model, step)
        if step == 3:
            loss = loss * math.inf if bmt.rank() == bmt.world_size() - 1 else loss
        if manager_loop:
            manager.zero_grad()
            manager.backward(loss)
            manager.clip_grad_norm(optimizer.param_groups, 0.1)
            manager.step()
        else:
            optimizer.zero_grad()
            optimizer.loss_scale(loss).backward()
            bmt.optim.clip_grad_norm(optimizer.param_groups, 0.1, scale=optimizer.scale)
            bmt.optim_step(optimizer, scheduler)
    assert (manager.loss_scale if manager_loop else optimizer.scale) == 2.0**21
    return weights(model)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["AdamOptimizer", "AdamOffloadOptimizer"])
def test_legacy_loop(world: int, name: str) -> None:
    old = run_ranks(world, legacy_loop, name, False)
    new = run_ranks(world, legacy_loop, name, True)
    torch.testing.assert_close(old, new, rtol=0, atol=0)


def large_state(name: str) -> list[list[str]]:
    model, manager = build(name, 0.1)
    train(model, manager, range(1))
    entries = manager.state_dict(gather_opt=True)["optimizers"][0]["state"].values()
    arrays = [value for entry in entries for value in entry.values() if getattr(value, "dim", int)() == 1]
    needed = 2 * sum(array.nbytes for array in arrays)  # of two ranks
    heard = []
    for free in (2 * needed, 2 * needed - 1, 1):
        _arrays.available_bytes = lambda: free  # noqa: B023
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            manager.state_dict(gather_opt=True)
        heard.append([str(warning.message) for warning in caught])
    _arrays.available_bytes = available_bytes
    return heard


@pytest.mark.parametrize("name", ["AdamOptimizer", "Adam"])
def test_a_state_that_hosts_cannot_hold_is_told_once(name: str) -> None:
    first, second = run_ranks(2, large_state, name, fresh=True)
    assert [len(heard) for heard in first] == [0, 1, 0] and "checkpoint.save()" in first[1][0]
    assert second == [[], [], []]


ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW
#: An optimizer of a model that is not sharded, with its options, and the one that continues with its state.
CONTINUED: list[tuple[Any, dict[str, Any], Any, dict[str, Any]]] = [
    (ADAM, {"weight_decay": 0.1}, bmt.optim.AdamOptimizer, {}),
    (ADAMW, {}, bmt.optim.AdamOptimizer, {"decoupled": True}),
    (ADAMW, {}, bmt.optim.AdamOffloadOptimizer, {"decoupled": True}),
    (ADAMW, {"amsgrad": True}, ADAMW, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}, bmt.optim.SGDOptimizer, {}),
    (torch.optim.RMSprop, {"centered": True}, torch.optim.RMSprop, {"centered": True}),
    (torch.optim.NAdam, {}, torch.optim.NAdam, {}),
]


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def plain_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), Scaled(), torch.nn.Linear(5, 1))


def continued(number: int) -> None:
    for make in (plain_model, lambda: torch.nn.LayerNorm(3)):
        for loads_itself in (False, True):
            continued_with(number, make, loads_itself)


def continued_with(number: int, make: Callable[[], torch.nn.Module], loads_itself: bool) -> None:
    kind, options, sharded_kind, sharded_options = CONTINUED[number]
    plain = make()
    x = torch.randn(4, 3)

    def step(model: torch.nn.Module, optimizer: Any, divisor: int = 1) -> None:
        optimizer.zero_grad()
        (model(x).square().sum() / divisor).backward()
        optimizer.step()

    optimizer = kind(plain.parameters(), lr=0.01, **options)
    for _ in range(3):
        step(plain, optimizer)
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    sharded = sharded_kind(model.parameters(), lr=0.5, **sharded_options)
    manager = make_manager(sharded)
    state = copy.deepcopy(optimizer.state_dict())
    if loads_itself:
        sharded.load_state_dict(state)
    else:
        manager.load_state_dict({**manager.state_dict(), "optimizers": [state]})
    for _ in range(3):
        step(plain, optimizer)
        step(model, sharded, bmt.world_size())
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("number", range(len(CONTINUED)))
def test_state_of_an_optimizer_of_whole_parameters(world: int, number: int) -> None:
    run_ranks(world, continued, number)


def continued_over_whole_parameters(kind: Any) -> None:
    x, models = torch.randn(4, 3), [plain := plain_model(), bmt.BMTrainModelWrapper(copy.deepcopy(plain))]
    optimizers = [torch.optim.Adam(plain.parameters(), lr=0.01), kind(models[1].parameters(), lr=0.01)]

    def three_steps() -> None:
        for _ in range(3):
            for model, optimizer, divisor in zip(models, optimizers, (1, bmt.world_size()), strict=True):
                optimizer.zero_grad()
                (model(x).square().sum() / divisor).backward()
                optimizer.step()

    three_steps()
    state = make_manager(optimizers[1]).state_dict(gather_opt=True)
    optimizers[1] = bmt.optim.whole_matrix(torch.optim.Adam, models[1].parameters(), lr=0.5)
    make_manager(optimizers[1]).load_state_dict(state)
    three_steps()
    torch.testing.assert_close(models[1].state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer, torch.optim.Adam))
def test_gathered_state_of_shards_in_an_optimizer_over_whole_parameters(kind: Any, world: int) -> None:
    run_ranks(world, continued_over_whole_parameters, kind)


def continued_in_turn(kind: Any, of_torch: Any, loads_itself: bool) -> None:
    x, models = torch.randn(4, 3), [plain := plain_model(), bmt.BMTrainModelWrapper(copy.deepcopy(plain))]
    reference, state = of_torch(plain.parameters(), lr=0.01, momentum=0.9), None
    for make in (kind, of_torch, kind):
        optimizer = make(models[1].parameters(), lr=0.01, momentum=0.9)
        manager = make_manager(optimizer)
        if loads_itself and state is not None:
            optimizer.load_state_dict(state["optimizers"][0])
        elif state is not None:
            manager.load_state_dict(state)
        for _ in range(2):
            for model, each, divisor in (plain, reference, 1), (models[1], optimizer, bmt.world_size()):
                each.zero_grad()
                (model(x).square().sum() / divisor).backward()
                each.step()
        state = manager.state_dict(gather_opt=not loads_itself)
    torch.testing.assert_close(models[1].state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loads_itself", (False, True))
@pytest.mark.parametrize("world", WORLDS)
def test_an_optimizer_of_torch_hands_on_no_old_values(world: int, loads_itself: bool) -> None:
    run_ranks(world, continued_in_turn, bmt.optim.SGDOffloadOptimizer, torch.optim.SGD, loads_itself)


def from_shards_to_whole(folder: str) -> None:
    model = bmt.BMTrainModelWrapper(plain_model())
    manager = make_manager(bmt.optim.AdamOptimizer(model.parameters()))
    manager.backward(model(torch.ones(1, 3)).sum())
    manager.step()
    bmt.distributed.checkpoint.save(folder, 1, model, manager)
    whole = make_manager(bmt.optim.whole_matrix(torch.optim.Adam, model.parameters()))
    with pytest.raises(
        ValueError, match=r"optimizer 0: saved by AdamOptimizer.*got an optimizer of whole_matrix"
    ):
        bmt.distributed.checkpoint.load(folder, model, whole)


def test_a_checkpoint_of_shards_is_refused_by_an_optimizer_over_whole_parameters(tmp_path: Path) -> None:
    run_ranks(2, from_shards_to_whole, str(tmp_path))


def of_another_formula() -> None:
    for kind, options, says in (
        (ADAMW, {}, "got decoupled weight decay; make it with decoupled=True"),
        (ADAM, {"amsgrad": True}, "without amsgrad"),
    ):
        plain = plain_model()
        optimizer = kind(plain.parameters(), **options)
        plain(torch.ones(1, 3)).backward()
        optimizer.step()
        model = bmt.BMTrainModelWrapper(plain)
        with pytest.raises(ValueError, match=says):
            bmt.optim.AdamOptimizer(model.parameters()).load_state_dict(optimizer.state_dict())


def test_state_of_another_formula_is_refused() -> None:
    run_ranks(2, of_another_formula)
