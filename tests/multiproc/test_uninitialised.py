"""Layers that nobody has initialised: their parameters are NaN, and named before they are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt


class Model(bmt.DistributedModule):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = bmt.nn.VPEmbedding(8, 4, dtype=dtype)
        self.layers = bmt.TransformerBlockList(
            [bmt.Block(bmt.nn.Linear(4, 4, dtype=dtype)) for _ in range(2)]
        )
        self.head = bmt.nn.Projection(8, 4, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(ids)))


IDS = torch.arange(6).view(2, 3)


def forgets() -> None:
    model = Model(torch.float16)
    assert all(value.isnan().all() for value in model.state_dict().values())
    for _ in range(2):
        model(IDS)


def forgets_in_a_plain_module() -> None:
    model = torch.nn.Sequential(bmt.Block(bmt.nn.Linear(4, 4)), torch.nn.ReLU(), bmt.nn.Linear(4, 4))
    bmt.init_parameters(model[2])
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
    for _ in range(2):
        manager.backward(model(torch.ones(1, 4)).sum())
        manager.step()


def forgets_until_the_step() -> None:
    layer = bmt.nn.Linear(3, 3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    for _ in range(2):
        torch.nn.functional.linear(torch.ones(1, 3), layer.weight).sum().backward()
        manager.step()


def initialises() -> None:
    bmt.init_parameters(model := Model())
    assert model(IDS).isfinite().all()


def loads() -> None:
    bmt.init_parameters(first := Model())
    second = Model()
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(IDS), second(IDS))
    Model()  # nobody uses it
    with torch.device("meta"):
        third = Model()
    bmt.init_parameters(third)
    third(IDS)


def writes() -> None:
    model = Model()
    for param in model.parameters():
        param.data.fill_(0.5)
    model(IDS)
    with bmt.whole(model := Model(), write=True):
        for param in model.parameters():
            torch.nn.init.ones_(param)
    model(IDS)


def warnings_of(program: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (forgets, "6 parameters of bmtrain.nn layers were never initialised and are NaN: embed.weight, "
         "layers.0.weight, layers.0.bias, layers.1.weight, ...; call bmtrain.init_parameters(model)"),
        (forgets_in_a_plain_module, "2 parameters of bmtrain.nn layers were never initialised and are NaN: weight, "),
        (forgets_until_the_step, "NaN: parameter 0, parameter 1;"),
    ],
)  # fmt: skip
def test_they_are_named_once(program: Callable[[], None], expected: str) -> None:
    first, second = run_ranks(2, warnings_of, program)
    assert len(first) == 1 and expected in first[0], first
    assert second == []


@pytest.mark.parametrize("program", [initialises, loads, writes])
def test_silence_about_those_that_have_values(program: Callable[[], Any]) -> None:
    assert run_ranks(2, warnings_of, program) == [[], []]
