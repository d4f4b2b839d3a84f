"""Looking at a model on one rank alone: what needs no values of a parameter communicates nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt

#: Expressions of a model that a rank may evaluate alone, and some that it may not.
LOOKS = [
    "m.weight.shape",
    "m.weight.size(0)",
    "m.weight.dtype",
    "m.weight.device",
    "m.weight.numel()",
    "m.weight.dim()",
    "m.weight.ndim == 2 and m.bias is not None",
    "m.bias is None",
    "1 if m.bias is None else 2",
    "hasattr(m, 'bias')",
    "[hasattr(m, 'weight'), hasattr(m, 'scale'), m.weight.is_cuda]",
    "getattr(m, 'bias') is not None",
    "getattr(m, 'bias', None) is None",
    "getattr(m, 'weight').dtype.itemsize",
    "(lambda: m.weight.element_size())()",
    "sum(layer.weight.numel() for layer in [m, m])",
    "f'{m.weight.shape} {m.weight.dtype}'",
    "str(m)",
]
READS = [
    "m.weight.sum().shape",
    "hasattr(m, 'bias') and m.weight.mean().item() > 2",
    "max(map(__import__('operator').attrgetter('weight.data'), [m]), key=torch.sum).sum() is None",
    "[w := m.weight, w.shape][1]",
    "m.weight.tolist() is None",
]


def plain() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def evaluated(expression: str, model: torch.nn.Module) -> Any:
    """The value of an expression in a function, after as many calls as make Python specialise its bytecode."""
    function = eval(f"lambda m: {expression}", {"torch": torch})
    return [function(model) for _ in range(20)][-1]


def look_alone() -> list[Any]:
    model = bmt.BMTrainModelWrapper(plain())
    found = []
    if bmt.rank() == 0:
        found = [evaluated(look, model) for look in LOOKS]
        whole = model.weight.full_shape, model.weight.full_numel
        assert whole == ((3, 4), 12)
    bmt.synchronize()
    return [str(value).replace("cuda:0", "cpu") for value in found]


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_looks_at_a_model(ranks: int) -> None:
    expected = [str(evaluated(look, plain())) for look in LOOKS]
    assert run_ranks(ranks, look_alone)[0] == expected


def read_together() -> list[str]:
    model = bmt.BMTrainModelWrapper(plain())
    return [str(evaluated(read, model)) for read in READS]


def test_reads_that_use_values_have_them() -> None:
    expected = [str(evaluated(read, plain())) for read in READS]
    assert run_ranks(2, read_together) == [expected] * 2
