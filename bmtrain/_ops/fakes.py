"""Fake kernels of the operators (torch.compile, FakeTensorMode), registered when this module is imported."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _writes_only(*tensors: object, **options: object) -> None:
    """Fake of an operator that returns nothing."""


def _number(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Fake of a reduction to one number."""

    def fake(tensors: list[Tensor], p: float = 2.0) -> Tensor:
        return tensors[0].new_empty((), dtype=dtype)

    return fake


def _fake_cross_entropy_sums(
    logits: Tensor, target: Tensor, weight: Tensor | None, *, smooth: bool, divided: bool
) -> tuple[Tensor, ...]:
    rows = logits.shape[0]
    return tuple(
        logits.new_empty(size, dtype=torch.float32) for size in (rows, rows, rows, rows if smooth else 0)
    )


#: Fake kernels by the name of the operator.
FAKES: dict[str, Callable[..., object]] = {
    "ordered_sum_": _writes_only,
    "scale_": _writes_only,
    "squared_sum": _number(torch.float64),
    "abs_max": _number(torch.float32),
    "abs_power_sum": _number(torch.float64),
    "adam_move_": _writes_only,
    "cross_entropy_sums": _fake_cross_entropy_sums,
    "cross_entropy_gradient_": _writes_only,
}
for _name, _fake in FAKES.items():
    torch.library.register_fake(f"bmtrain::{_name}", _fake)
