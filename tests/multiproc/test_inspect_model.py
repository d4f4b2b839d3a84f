"""Statistics of parameters and gradients: `inspect_model` and the tables of it."""

from __future__ import annotations

import fnmatch
import math
import warnings

import pytest
import torch
from harness import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.inspect import format_summary, inspect_model

WORLDS = (1, 2, 4)


DIM = 6


class Layer(bmt.DistributedModule):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = bmt.DistributedModule()
        self.inner.weight = bmt.DistributedParameter(torch.randn(DIM, DIM, generator=generator))
        self.bias = bmt.DistributedParameter(torch.randn(DIM, generator=generator).bfloat16())
        self.one = bmt.DistributedParameter(torch.ones(1))

    def forward(self, x):
        return (x @ self.inner.weight + self.bias).tanh() * self.one


class Model(bmt.DistributedModule):
    def __init__(self, form: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        layers = [Layer(generator) for _ in range(3)]
        if form == "list":
            self.layers = bmt.TransformerBlockList(layers)
        else:
            self.layers = nn.ModuleList(layers if form == "bare" else [bmt.Block(layer) for layer in layers])
        self.plain = nn.Linear(DIM, 1)
        with torch.no_grad():
            for param in self.plain.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        self.plain.again = self.plain.weight
        self.scale = bmt.DistributedParameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.plain(x) * self.scale


NAMES = [
    "scale",
    *[f"layers.{i}.{name}" for i in range(3) for name in ("bias", "one", "inner.weight")],
    "plain.weight",
    "plain.bias",
    "plain.again",
]


def inspected(form: str) -> list:
    model = Model(form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = inspect_model(model, "*")
    x = torch.randn(12, DIM, generator=torch.Generator().manual_seed(5))
    model(x.chunk(bmt.world_size())[bmt.rank()]).sum().backward()
    for pattern in ("layers.*.bias", "*.one", "[ls]*", "?cale", "nothing", "LAYERS*"):
        names = [row["name"] for row in inspect_model(model, pattern)]
        assert names == [name for name in NAMES if fnmatch.fnmatchcase(name, pattern)], pattern
    assert [row["name"] for row in inspect_model(model.layers, "all.1.*", prefix="all.")] == [
        "all.1.bias",
        "all.1.one",
        "all.1.inner.weight",
    ]
    check_values(model, before, with_gradient=False)
    after = inspect_model(model, "*")
    check_values(model, after, with_gradient=True)
    return before + after


def check_values(model: nn.Module, rows: list[dict], with_gradient: bool) -> None:
    state = model.state_dict()
    assert [row["name"] for row in rows] == NAMES
    for row in rows:
        value = state[row["name"]].float()
        assert row["shape"] == tuple(value.shape)
        assert row["max"] == value.max().item()
        assert row["min"] == value.min().item()
        assert row["mean"] == pytest.approx(value.mean().item(), rel=1e-6)
        if value.numel() > 1:
            assert row["std"] == pytest.approx(value.std().item(), rel=1e-6)
        else:
            assert math.isnan(row["std"])
        trained = with_gradient and row["name"] != "scale"
        assert (row["grad_mean"] != 0.0) == trained


@pytest.mark.parametrize("form", ["bare", "block", "list"])
def test_bc67_inspect_model_is_equal_for_all_forms_and_worlds(form):
    reference = run_ranks(1, inspected, "bare")[0]
    for world in WORLDS:
        for rows in run_ranks(world, inspected, form):
            assert len(rows) == len(reference)
            for row, expected in zip(rows, reference, strict=True):
                assert row["name"] == expected["name"]
                for key in ("max", "min", "mean", "std"):
                    assert row[key] == pytest.approx(expected[key], rel=1e-6, nan_ok=True)
                if not row["name"].startswith("plain"):  # whose gradient is that of rank 0's loss
                    rounding = 5e-2 if row["name"].endswith("bias") else 1e-5  # in bf16, rank by rank
                    for key in ("grad_mean", "grad_std"):
                        assert row[key] == pytest.approx(expected[key], rel=rounding, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-12_345_678_901.0, "-1.23e+10"),
        (123_456_789.0, "123456789"),
        (1_234_567_890.0, "1.23e+09"),
        (-1.5e300, "-1.50e+300"),
        (1_234_567_890_123, "1.23e+12"),
        (123_456_789, "123456789"),
        (12.3456789, "12.3457"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_not_cut_before_their_point(value: float, shown: str) -> None:
    line = {
        "name": "w",
        "shape": (1,),
        "min": 0.0,
        "std": 0.5,
        "mean": 0.25,
        "grad_std": 0.0,
        "grad_mean": 0.0,
    }
    row = format_summary([{**line, "max": value}]).split("\n")[1]
    assert row[8 + 20 :].split()[0] == shown[:9]


def test_format_summary():
    lines = format_summary(
        [
            {"name": "a", "shape": (1, 2), "max": 1.0, "min": -1234567.0, "std": 0.5, "mean": 0.25,
             "grad_std": None, "grad_mean": 3},
            {"name": "long.name", "shape": (10000000, 10000000, 10), "max": 1.0, "min": 0.0, "std": 0.5,
             "mean": 0.25, "grad_std": math.nan, "grad_mean": 0.0},
        ]
    ).split("\n")  # fmt: skip
    name, cells = 13, 10
    assert lines[0] == " name".ljust(name) + " shape".ljust(20) + "".join(
        f" {column}".ljust(cells) for column in ("max", "min", "std", "mean", "grad_std", "grad_mean")
    )
    assert lines[1] == " a".ljust(name) + " (1, 2)".ljust(20) + (
        " 1.0000    -1234567. 0.5000    0.2500    None      3        "
    )
    assert lines[2].startswith(" long.name    (10000000, 10000000")
    assert {len(line) for line in lines} == {name + 20 + 6 * cells}
    assert format_summary([]) == " name   " + lines[0][name:]
