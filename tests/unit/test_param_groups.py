"""Parameter groups of one step: each by its own options, all of them in one call of the core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_levels import same_bits
from torch import nn

from bmtrain import _ops
from bmtrain.optim import (
    AdamOffloadOptimizer,
    AdamOptimizer,
    LionOffloadOptimizer,
    LionOptimizer,
    SGDOffloadOptimizer,
    SGDOptimizer,
)

SIZES = (33, 1, 40_000, 7, 256)
# Of each group, and how many of the parameters it has.
ADAM = (
    ({"lr": 0.1, "weight_decay": 0.1}, 2),
    ({"lr": 0.1, "weight_decay": 0.0, "maximize": True}, 1),
    ({"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3}, 2),
)
SGD = (
    ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, 2),
    ({"lr": 0.1, "momentum": 0.5, "dampening": 0.5, "maximize": True}, 1),
    ({"lr": 0.01, "momentum": 0.9, "nesterov": True}, 2),
)
LION = (
    ({"lr": 0.1, "weight_decay": 0.1}, 2),
    ({"lr": 0.1, "weight_decay": 0.0, "maximize": True}, 1),
    ({"lr": 0.01, "betas": (0.5, 0.9)}, 2),
)
OPTIMIZERS: tuple[tuple[Any, dict[str, Any], Any], ...] = (
    (AdamOptimizer, {"hold_steps": 1}, ADAM),
    (AdamOffloadOptimizer, {"overlap": False}, ADAM),
    (AdamOffloadOptimizer, {"state_dtype": torch.bfloat16, "decoupled": True}, ADAM),
    (SGDOptimizer, {}, SGD),
    (SGDOffloadOptimizer, {}, SGD),
    (LionOptimizer, {}, LION),
    (LionOffloadOptimizer, {}, LION),
)


def neighbours(dtype: torch.dtype) -> list[nn.Parameter]:
    """Parameters, with gradients, that follow each other in memory: what one group may update as one range."""
    generator = torch.Generator().manual_seed(1)
    values, gradients = (torch.randn(sum(SIZES), generator=generator).to(dtype) for _ in range(2))
    parameters = [nn.Parameter(value) for value in values.split(SIZES)]
    for p, gradient in zip(parameters, gradients.split(SIZES), strict=True):
        p.grad = gradient
    return parameters


def in_groups(parameters: Sequence[nn.Parameter], groups: Any) -> list[dict[str, Any]]:
    rest = iter(parameters)
    return [{**options, "params": [next(rest) for _ in range(count)]} for options, count in groups]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("optimizer_class", "options", "groups"), OPTIMIZERS)
def test_each_group_is_updated_by_its_own_options(
    optimizer_class: Any, options: dict[str, Any], groups: Any, dtype: torch.dtype
) -> None:
    """The bits are those of an optimizer for each group."""
    together, apart = neighbours(dtype), neighbours(dtype)
    optimizers = [
        optimizer_class(in_groups(together, groups), **options),
        *(optimizer_class([group], **options) for group in in_groups(apart, groups)),
    ]
    for step in range(3):
        for optimizer in optimizers[:2]:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        for optimizer in optimizers:
            optimizer.step(scale=3.0)
    for p, q in zip(together, apart, strict=True):
        assert same_bits(p.data, q.data)


@pytest.mark.parametrize(("optimizer_class", "options", "groups"), OPTIMIZERS)
def test_groups_share_a_call(
    optimizer_class: Any, options: dict[str, Any], groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for 16-bit parameters and one for fp32 ones."""
    calls: Counter[str] = Counter()

    step_of_groups = _ops.step_of_groups

    def counted(formula: str, *args: Any, **numbers: Any) -> Any:
        calls[formula] += 1
        return step_of_groups(formula, *args, **numbers)

    monkeypatch.setattr(_ops, "step_of_groups", counted)
    both = [*in_groups(neighbours(torch.bfloat16), groups), *in_groups(neighbours(torch.float32), groups)]
    optimizer = optimizer_class(both, **options)
    optimizer.step()
    assert list(calls.values()) == [2]


def test_a_group_that_cannot_be_updated_leaves_all_as_they_were() -> None:
    parameters = neighbours(torch.bfloat16)
    optimizer = AdamOptimizer(in_groups(parameters, ADAM))
    optimizer.step()
    before = [p.detach().clone() for p in parameters]
    optimizer.state[parameters[-1]]["exp_avg"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="expected 256 elements"):
        optimizer.step()
    assert [optimizer.state[p]["step"] for p in parameters] == [1] * len(parameters)
    assert all(same_bits(p.data, old) for p, old in zip(parameters, before, strict=True))
