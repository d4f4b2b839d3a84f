"""Plain parameters put into a model after it was wrapped: named once, at the next step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from harness import run_ranks
from torch import nn

import bmtrain as bmt

DIM = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU()) for _ in range(2)])
        self.extra = nn.ModuleDict()
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def a_parameter(model: Model) -> list[str]:
    model.scale = nn.Parameter(torch.ones(DIM))
    return ["scale"]


def in_a_block(model: Model) -> list[str]:
    model.layers[1][0].lora = nn.Parameter(torch.ones(DIM))
    return ["layers.1.0.lora"]


def a_module(model: Model) -> list[str]:
    model.head = nn.Linear(DIM, DIM)
    return ["head.weight", "head.bias"]


def made_before(model: Model) -> list[str]:
    model.extra["adapter"] = ADAPTER
    return ["extra.adapter.weight", "extra.adapter.bias"]


def frozen(model: Model) -> list[str]:
    model.scale = nn.Parameter(torch.ones(DIM), requires_grad=False)
    return []


def converted(model: Model) -> list[str]:
    model.extra["adapter"] = nn.Linear(DIM, DIM)
    bmt.BMTrainModelWrapper(model)
    return []


ADAPTER = nn.Linear(DIM, DIM)
ADDITIONS = [a_parameter, in_a_block, a_module, made_before, frozen, converted]


def steps(add: Callable[[Model], list[str]], ours: bool) -> None:
    model = bmt.BMTrainModelWrapper(Model())
    kind = bmt.optim.AdamOptimizer if ours else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)

    def step() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(2, DIM)).sum().backward()
            optimizer.step()
        return [str(entry.message) for entry in caught if "after it was wrapped" in str(entry.message)]

    assert step() == []
    names = add(model)
    messages = step()
    if not names or bmt.rank() != 0 or bmt.world_size() == 1:
        assert messages == []
    else:
        (message,) = messages
        assert message.startswith(
            f"{len(names)} plain parameters were put into the model after it was wrapped: {', '.join(names)}. "
        )
        assert "BMTrainModelWrapper(model) again" in message
    assert step() == []


@pytest.mark.parametrize("ours", [True, False], ids=["AdamOptimizer", "torch"])
@pytest.mark.parametrize("add", ADDITIONS)
def test_plain_parameters_are_named_at_the_next_step(add: Callable[[Model], list[str]], ours: bool) -> None:
    run_ranks(2, steps, add, ours)


def test_one_rank_is_not_warned() -> None:
    run_ranks(1, steps, a_parameter, True)


class Scaled(nn.Linear):
    """A layer that gets a parameter later."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_parameter("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.scale is None else super().forward(x) * self.scale


class ScaledModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(DIM, DIM)])
        self.head = Scaled(DIM, DIM)

    def grow(self) -> None:
        for layer in (self.layers[0], self.head):
            layer.scale = nn.Parameter(torch.linspace(1, 2, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x).tanh())


def wrapped_again() -> None:
    plain = ScaledModel()
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    x = torch.linspace(-1, 1, 2 * DIM).view(2, DIM)
    model(x)
    plain.grow()
    model.grow()
    known = [p for p in model.parameters() if isinstance(p, bmt.DistributedParameter)]
    assert bmt.BMTrainModelWrapper(model) is model and len(known) == 4
    assert all(any(p is each for each in model.parameters()) for p in known)
    model(x).square().sum().backward()
    (bmt.world_size() * plain(x).square().sum()).backward()
    for (name, p), (same, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == same
        torch.testing.assert_close(p.gather_grad(), wanted.grad)


@pytest.mark.parametrize("world", [1, 2])
def test_wrapping_again_converts_parameters_too(world: int) -> None:
    run_ranks(world, wrapped_again)


def looked_at() -> None:
    """Steps without additions look at no model."""
    model = bmt.BMTrainModelWrapper(Model())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    looks: list[int] = []
    original = nn.Module.named_parameters

    def counted(*args: object, **kwargs: object) -> object:
        looks.append(1)
        return original(*args, **kwargs)

    model(torch.ones(2, DIM)).sum().backward()
    optimizer.step()
    nn.Module.named_parameters = counted  # type: ignore[method-assign,assignment]
    try:
        for _ in range(3):
            model(torch.ones(2, DIM)).sum().backward()
            optimizer.step()
    finally:
        nn.Module.named_parameters = original  # type: ignore[method-assign]
    assert not looks


def test_steps_without_additions_look_at_no_model() -> None:
    run_ranks(2, looked_at)
