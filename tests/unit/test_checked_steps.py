"""Steps of copies: the bits of plain steps, and the sums of what they read and write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmtrain._C import StepCheck, adam_step, copy_and_sum, lion_step, sgd_step, word_sums
from bmtrain._ops import scale_

SIZES = (1, 2048, 5003)
COMMON: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "scale": 1.0, "maximize": False}
ADAM = {
    **COMMON,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "decoupled": True,
    "folded": False,
    "hold_steps": 0,
}
SGD = {**COMMON, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
LION = {**COMMON, "beta1": 0.9, "beta2": 0.99}
FACTORS = [[], [0.37], [0.5, 1 / 3]]


class Lists:
    """Parallel lists of tensors, the same each time; ``dtype`` is that of gradients and rounded weights."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)

        def draw() -> list[torch.Tensor]:
            return [torch.randn(size, generator=generator) for size in SIZES]

        self.kind, self.weights = kind, draw()
        self.rounded = [] if dtype is torch.float32 else [w.to(dtype) for w in self.weights]
        self.grads = [grad.to(dtype) for grad in draw()]
        self.state = [draw(), [x.square() for x in draw()]] if kind == "adam" else [draw()]

    def step(self, check: StepCheck | None = None) -> None:
        lists, sizes = (self.weights, self.rounded, self.grads, *self.state), [1] * len(SIZES)
        if self.kind == "adam":
            options = [ADAM] * len(SIZES)
            is_fp32 = not self.rounded
            adam_step(*lists, [3] * len(SIZES), sizes, options, as_torch=is_fp32, check=check)
        elif self.kind == "sgd":
            sgd_step(*lists, [False] * len(SIZES), sizes, [SGD] * len(SIZES), check=check)
        else:
            lion_step(*lists, sizes, [LION] * len(SIZES), check=check)

    def arrays(self) -> list[torch.Tensor]:
        """The arrays of each tensor in turn, the gradient last."""
        rounded = [self.rounded] if self.rounded else []
        lists = [self.weights, *rounded, *self.state, self.grads]
        return [array for arrays in zip(*lists, strict=True) for array in arrays]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "sgd", "lion"])
def test_bits_and_sums(kind, dtype):
    plain, checked = Lists(kind, dtype), Lists(kind, dtype)
    before = word_sums(checked.arrays())
    for grad, factors in zip(plain.grads, FACTORS, strict=True):
        for factor in factors:
            scale_([grad], torch.tensor(factor, dtype=torch.float64))
    plain.step()
    check = StepCheck(FACTORS)
    checked.step(check)
    for one, other in zip(plain.arrays(), checked.arrays(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert check.before == before
    num_arrays = len(before) // len(SIZES)
    after = word_sums(checked.arrays())
    after[num_arrays - 1 :: num_arrays] = [0] * len(SIZES)  # none of the gradient
    assert check.after == after


@pytest.mark.parametrize("factors", [[], [[], []]])
def test_factors_for_other_tensors_raise(factors):
    with pytest.raises(ValueError, match="checked step: expected factors for each of 3 tensors"):
        Lists("lion", torch.float32).step(StepCheck(factors))


@pytest.mark.parametrize("size", [0, 3, 100_001])
def test_a_copy_and_its_sum(size):
    tensor = torch.randn(size).to(torch.bfloat16)
    place = torch.zeros_like(tensor)
    assert copy_and_sum([place], [tensor]) == word_sums([tensor])
    assert torch.equal(place, tensor)
    with pytest.raises(ValueError, match="copy_and_sum: expected contiguous CPU tensors of one size"):
        copy_and_sum([place], [torch.zeros(size + 1)])
