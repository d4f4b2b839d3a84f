"""The last layer and its loss in one, against torch on fp32 copies, and how large its tensors get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmtrain.loss import FusedCrossEntropy, fused_linear_cross_entropy

ROWS, DIM, CLASSES = 13, 8, 29
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"ignore_index": 3},
    {"class_weight": torch.linspace(0.5, 2.0, CLASSES), "label_smoothing": 0.2},
]
#: Of the logits, in their own dtype, which both sides round to; gradients pass through one more product.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, DIM, generator=generator).to(dtype)
    weight = torch.randn(CLASSES, DIM, generator=generator).to(dtype)
    targets = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    targets[::4] = -100
    return hidden, weight, targets


def gradients(loss: torch.Tensor, *tensors: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    direction = torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape) * scale
    return list(torch.autograd.grad((loss * direction).sum(), tensors))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_equal_to_the_loss_of_the_logits(options: dict[str, Any], chunk: int, dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(dtype)
    targets = torch.where(targets == -100, options.get("ignore_index", -100), targets)
    ours_in = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    ours = fused_linear_cross_entropy(*ours_in, targets, chunk=chunk, **options)
    # One after the other, in the same dtype, the loss of FusedCrossEntropy; in fp32 torch's own.
    plain_options = {("weight" if k == "class_weight" else k): v for k, v in options.items()}
    kept_in = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    kept = FusedCrossEntropy(**plain_options)(functional.linear(*kept_in), targets)
    assert ours.dtype == kept.dtype == torch.float32
    torch.testing.assert_close(ours, kept, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    scale = float(ROWS)
    for got, wanted in zip(gradients(ours, *ours_in), gradients(kept, *kept_in), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(
            got, wanted, rtol=4 * ROUNDING[dtype], atol=4 * ROUNDING[dtype] * float(wanted.abs().max())
        )
    if dtype == torch.float32:
        theirs = functional.cross_entropy(functional.linear(hidden, weight), targets, **plain_options)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_that_of_the_two_one_after_the_other(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(dtype)
    ours_in, kept_in = ([hidden.clone().requires_grad_(), weight.float().requires_grad_()] for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = fused_linear_cross_entropy(*ours_in, targets)
        kept = FusedCrossEntropy()(functional.linear(*kept_in), targets)
    assert torch.equal(ours, kept)
    for got, wanted in zip(gradients(ours, *ours_in), gradients(kept, *kept_in), strict=True):
        assert torch.equal(got, wanted)


def test_scaled_half_precision_keeps_its_gradient() -> None:
    hidden, weight, targets = inputs(torch.float16)
    hidden.requires_grad_()
    scaled = gradients(fused_linear_cross_entropy(hidden, weight, targets), hidden, scale=2.0**14)[0]
    plain = gradients(fused_linear_cross_entropy(hidden, weight, targets), hidden)[0]
    assert scaled.isfinite().all()
    torch.testing.assert_close(scaled / 2.0**14, plain, rtol=1e-2, atol=1e-5)


def test_many_chunks_do_not_lose_their_gradients() -> None:
    hidden = torch.rand(1024, DIM).add(0.5).bfloat16()
    weight = torch.zeros(CLASSES, DIM, dtype=torch.bfloat16)
    targets = torch.zeros(1024, dtype=torch.int32)
    got, wanted = (part.clone().requires_grad_() for part in (weight, weight.double()))
    fused_linear_cross_entropy(hidden, got, targets, chunk=1, reduction="sum").backward()
    functional.cross_entropy(hidden.double() @ wanted.T, targets.long(), reduction="sum").backward()
    torch.testing.assert_close(got.grad.double(), wanted.grad, rtol=2.0**-7, atol=0)


class LargestResult(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def test_nothing_is_as_large_as_the_logits() -> None:
    num_rows, chunk = 64, 4
    hidden = torch.randn(4, num_rows // 4, DIM, requires_grad=True)
    weight = torch.randn(CLASSES, DIM, requires_grad=True)
    targets = torch.randint(0, CLASSES, (4, num_rows // 4))
    with LargestResult() as largest:
        fused_linear_cross_entropy(hidden, weight, targets, chunk=chunk).backward()
    assert largest.numel <= max(num_rows * DIM, CLASSES * DIM, chunk * CLASSES) < num_rows * CLASSES
    assert hidden.grad is not None and weight.grad is not None


def test_frozen_sides_get_no_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32)
    hidden.requires_grad_()
    fused_linear_cross_entropy(hidden, weight, targets).backward()
    assert hidden.grad is not None and weight.grad is None
    weight.requires_grad_()
    fused_linear_cross_entropy(hidden.detach(), weight, targets, chunk=3).backward()
    assert weight.grad is not None
    empty = fused_linear_cross_entropy(hidden[:0], weight, targets[:0], reduction="sum")
    assert empty.item() == 0.0


def test_arguments() -> None:
    hidden, weight, targets = inputs(torch.float32)
    with pytest.raises(ValueError, match="chunk"):
        fused_linear_cross_entropy(hidden, weight, targets, chunk=0)
    with pytest.raises(ValueError, match="weight: expected shape"):
        fused_linear_cross_entropy(hidden, weight.t(), targets)
    with pytest.raises(ValueError, match="targets: expected shape"):
        fused_linear_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(TypeError, match="int32 or int64"):
        fused_linear_cross_entropy(hidden, weight, targets.float())
    with pytest.raises(IndexError, match="out of range"):
        fused_linear_cross_entropy(hidden, weight, torch.full_like(targets, CLASSES))
    with pytest.raises(ValueError, match="reduction"):
        fused_linear_cross_entropy(hidden, weight, targets, reduction="max")
