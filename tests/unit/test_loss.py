"""The fused cross-entropy against torch's on the fp32 copy of the logits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import bmtrain.loss
from bmtrain._base import deprecate
from bmtrain.loss import FusedCrossEntropy, _function, fused_linear_cross_entropy
from bmtrain.loss._function import has_inf_nan

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32]
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2e-6, torch.float64: 1e-12}


def make(
    num_rows: int, num_classes: int, dtype: torch.dtype, *, ignored: int | None = -100
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_classes)
    logits = (torch.randn(num_rows, num_classes, generator=generator) * 3).to(dtype)
    target = torch.randint(0, num_classes, (num_rows,), generator=generator)
    if ignored is not None:
        target[::3] = ignored
    return logits, target


def both(logits: Tensor, target: Tensor, factor: float = 1.0, **options: Any) -> tuple[Tensor, ...]:
    """Loss and gradient, ours then torch's; the gradient of torch is of the fp32 (or wider) copy."""
    weight = options.get("weight")
    ours_in = logits.detach().clone().requires_grad_()
    ours = FusedCrossEntropy(**options)(ours_in, target)
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    if weight is not None:
        options = {**options, "weight": weight.to(wide.dtype)}
    theirs = functional.cross_entropy(wide, target.long(), **options)
    direction = torch.linspace(0.5, 1.5, ours.numel()).reshape(ours.shape) * factor
    (ours * direction).sum().backward()
    (theirs * direction).sum().backward()
    assert ours_in.grad is not None and wide.grad is not None
    return ours.detach(), ours_in.grad, theirs.detach(), wide.grad


def assert_same(logits: Tensor, target: Tensor, **options: Any) -> None:
    ours, grad, theirs, wide_grad = both(logits, target, **options)
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert grad.dtype == logits.dtype
    scale = float(wide_grad.abs().nan_to_num().max()) if wide_grad.numel() else 0.0
    torch.testing.assert_close(
        grad.to(wide_grad.dtype),
        wide_grad,
        rtol=ROUNDING[logits.dtype] * 1.01,
        atol=1e-6 * scale + 1e-7,
        equal_nan=True,
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_options_equal_torch(
    dtype: torch.dtype, reduction: str, smoothing: float, weighted: bool
) -> None:  # BC-76
    logits, target = make(50, 37, dtype)
    weight = torch.rand(37, generator=torch.Generator().manual_seed(1)) if weighted else None
    assert_same(logits, target, reduction=reduction, label_smoothing=smoothing, weight=weight)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_ignored_rows_have_exactly_zero_gradient(
    dtype: torch.dtype, index_dtype: torch.dtype
) -> None:  # BC-76
    logits, target = make(30, 11, dtype, ignored=7)
    logits[3] = float("nan")  # an ignored row
    target[3] = 7
    target = target.to(index_dtype)
    for options in ({}, {"weight": torch.rand(11)}, {"label_smoothing": 0.3}):
        x = logits.clone().requires_grad_()
        loss = FusedCrossEntropy(ignore_index=7, **options)(x, target)
        loss.backward()
        assert x.grad is not None and loss.isfinite()
        assert (x.grad[target == 7] == 0).all()
        assert x.grad.isfinite().all() and (x.grad[target != 7] != 0).any()


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 5, 3), (2, 5, 3, 4), (0, 5), (1, 1)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shapes(shape: tuple[int, ...], reduction: str) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    target_shape = shape[1:] if len(shape) == 1 else (shape[0], *shape[2:])
    target = (
        torch.arange(int(torch.Size(target_shape).numel())).reshape(target_shape)
        % shape[min(1, len(shape) - 1)]
    )
    assert_same(logits, target, reduction=reduction)


def test_not_contiguous_and_sliced() -> None:
    logits, target = make(16, 24, torch.bfloat16)
    assert_same(logits.t().contiguous().t(), target)
    assert_same(torch.cat([logits, logits], 1)[:, 3:20], torch.where(target < 17, target, 1))
    assert_same(logits[:1].expand(16, 24), target)


def test_many_chunks_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = make(40, 9, torch.bfloat16)
    whole = both(logits, target, label_smoothing=0.1)
    monkeypatch.setitem(_function._CHUNK_ELEMENTS, "cpu", 30)
    for a, b in zip(both(logits, target, label_smoothing=0.1), whole, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_rows(dtype: torch.dtype) -> None:
    inf = float("inf")
    logits = torch.tensor(
        [
            [6e4, -6e4, 0.0, 1.0],
            [6e4, 6e4, 6e4, 6e4],
            [-6e4, -6e4, -6e4, -6e4],
            [-inf, 0.0, 1.0, -inf],
            [6e4, 6e4, -inf, 0.0],
            [0.0, 0.0, 0.0, 0.0],
            [-inf, -inf, -inf, 3.0],
        ]
    ).to(dtype)
    target = torch.tensor([0, 3, 1, 2, 1, 0, 3])
    assert_same(logits, target, reduction="none")
    assert_same(logits, torch.tensor([1, 0, 0, 0, 3, 3, 0]), reduction="none")
    undefined = torch.full((1, 4), -inf).to(dtype)
    assert FusedCrossEntropy()(undefined, torch.tensor([0])).isnan()


def test_all_rows_ignored() -> None:
    logits, target = make(4, 5, torch.float16, ignored=-100)
    target[:] = -100
    ours, grad, theirs, _ = both(logits, target)
    assert ours.isnan() and theirs.isnan() and (grad == 0).all()
    assert both(logits, target, reduction="sum")[0] == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_scaled_loss_keeps_a_finite_gradient(dtype: torch.dtype) -> None:
    logits, target = make(64, 50, dtype)
    _, grad, _, wide = both(logits, target, factor=2.0**20)
    assert wide.abs().max() < 65504 and grad.isfinite().all()
    torch.testing.assert_close(grad.float(), wide, rtol=ROUNDING[dtype] * 1.01, atol=1e-2)


def test_backward_twice_leaves_everything_as_it_was() -> None:
    logits, target = make(8, 6, torch.bfloat16)
    x = logits.clone().requires_grad_()
    loss = FusedCrossEntropy(label_smoothing=0.1)(x, target)
    loss.backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    x.grad = None
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, first) and torch.equal(x.detach(), logits)


@pytest.mark.parametrize("is_linear", [False, True])
def test_a_penalty_on_the_gradient_is_refused_and_not_wrong(is_linear: bool) -> None:
    """The gradient that comes in is a constant, that of the logits is none."""
    x, weight = torch.randn(4, 5, requires_grad=True), torch.randn(9, 5, requires_grad=True)
    target = torch.tensor([1, 8, 0, 3])
    if is_linear:
        loss = fused_linear_cross_entropy(x, weight, target)
    else:
        loss = FusedCrossEntropy()(x @ weight.t(), target)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (expected,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, expected)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + gradient.square().sum()).backward()


def test_what_is_kept_for_backward() -> None:
    """The logits themselves and some numbers a row: no second tensor of the size of the logits."""
    logits, target = make(512, 64, torch.bfloat16)
    x = logits.requires_grad_()
    loss = FusedCrossEntropy(reduction="none")(x, target)
    saved = loss.grad_fn.next_functions[0][0].saved_tensors  # behind the reshape
    large = [t for t in saved if t.numel() >= x.numel()]
    assert len(large) == 1 and large[0].data_ptr() == x.data_ptr()
    assert sum(t.nbytes for t in saved if t.numel() < x.numel()) <= 512 * 32


@pytest.mark.parametrize("bad", [9, -1, -101, 2**31])
def test_target_out_of_range(bad: int) -> None:
    logits, target = make(6, 9, torch.float32)
    target[4] = bad
    with pytest.raises(IndexError, match=f"target {bad} in row 4"):
        FusedCrossEntropy()(logits, target)


@pytest.mark.parametrize(
    "logits,target,options,error,match",
    [
        (
            (4, 5),
            (4,),
            {"weight": torch.ones(4)},
            ValueError,
            "weight must have one element for each of the 5",
        ),
        ((4, 5), (3,), {}, ValueError, "target must have the shape"),
        ((2, 5, 3), (2, 4), {}, ValueError, "target must have the shape"),
        ((), (), {}, ValueError, "0-d"),
    ],
)
def test_shapes_that_do_not_fit(
    logits: tuple[int, ...],
    target: tuple[int, ...],
    options: dict[str, Any],
    error: type[Exception],
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        FusedCrossEntropy(**options)(torch.zeros(logits), torch.zeros(target, dtype=torch.int64))


@pytest.mark.parametrize(
    "options,match",
    [
        ({"reduction": "average"}, "reduction"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"weight": torch.ones(2, 2)}, "weight"),
        ({"weight": torch.ones(2, dtype=torch.int64)}, "weight"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FusedCrossEntropy(**options)


def test_bad_dtypes() -> None:
    with pytest.raises(TypeError, match="input"):
        FusedCrossEntropy()(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="target"):
        FusedCrossEntropy()(torch.zeros(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_weight_of_any_float_dtype_positional(weight_dtype: torch.dtype) -> None:
    logits, target = make(12, 5, torch.float16)
    weight = torch.tensor([0.5, 1.0, 0.0, 2.0, 4.0], dtype=weight_dtype)
    ours = FusedCrossEntropy(weight, -100, "sum", 0.0, False)(logits, target)
    theirs = functional.cross_entropy(logits.float(), target, weight.float(), reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_inplace_is_accepted_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecate, "_seen", set())
    logits, target = make(5, 5, torch.float16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [FusedCrossEntropy(inplace=flag)(logits, target) for flag in (True, False)]
    assert [w.category for w in caught] == [DeprecationWarning] and caught[0].filename == __file__
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], FusedCrossEntropy()(logits, target))


def test_parallel_before_initialisation_says_so() -> None:
    logits, target = make(5, 5, torch.float16)
    with pytest.raises(RuntimeError, match="not initialized"):
        FusedCrossEntropy(parallel=True)(logits, target)


def test_paths() -> None:
    assert bmtrain.loss.cross_entropy.FusedCrossEntropy is FusedCrossEntropy


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 6e4, 0.0])
@pytest.mark.parametrize("shape", [(1,), (33,), (4, 5)])
def test_has_inf_nan(dtype: torch.dtype, value: float, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=dtype)
    x.view(-1)[-1] = value
    for before in (0, 1):
        out = torch.tensor(before, dtype=torch.uint8)
        has_inf_nan(x, out)
        assert out == (before if torch.isfinite(x).all() else 1)


def test_has_inf_nan_arguments() -> None:
    out = torch.zeros(1, dtype=torch.uint8)
    has_inf_nan(torch.zeros(0), out)
    assert out.item() == 0
    for x, flag, error in [
        (torch.zeros(1, dtype=torch.int32), out, TypeError),
        (torch.zeros(1), torch.zeros(1), TypeError),
        (torch.zeros(1), torch.zeros(2, dtype=torch.uint8), ValueError),
        ([1.0], out, TypeError),
    ]:
        with pytest.raises(error):
            has_inf_nan(x, flag)
