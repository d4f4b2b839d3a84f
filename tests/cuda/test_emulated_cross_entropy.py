"""The cross-entropy kernels of csrc/cuda on the emulated device, under FusedCrossEntropy, against torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from emulated_gpu import EmulatedGpu, dtype_number, sparse_memory
from harness.losses import assert_cross_entropy
from torch import Tensor

from bmtrain import _ops
from bmtrain.loss import FusedCrossEntropy
from bmtrain.loss import _function as rows_of_logits

pytestmark = pytest.mark.filterwarnings("ignore:FusedCrossEntropy.inplace=True:DeprecationWarning")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}


class Kernels:
    """The two operators, as ops_cuda.cpp has them."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self.gpu = gpu

    def sums(
        self, logits: Tensor, target: Tensor, weight: Tensor | None, *, smooth: bool, divided: bool
    ) -> _ops.CrossEntropySums:
        num_rows, width = logits.shape
        out = [torch.full((num_rows,), torch.nan) for _ in range(4 if smooth else 3)]
        traffic = self.gpu.launch(
            "cross_entropy_sums",
            *(logits, dtype_number(logits), num_rows, width, target, weight, smooth),
            *(*out, *([] if smooth else [None]), divided),
            reads=[logits, target, *([] if weight is None else [weight])],
            writes=out,
        )
        inside = ((target >= 0) & (target < width)).sum().item()
        assert traffic.read[0] == logits.nbytes + inside * logits.element_size(), "logits are read once"
        return _ops.CrossEntropySums(*out[:3], out[3] if smooth else None)

    def gradient(
        self, out: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, **rows: Tensor
    ) -> None:
        num_rows, width = logits.shape
        numbers = [rows[name] for name in ("maximum", "log_sum", "scale", "hit", "spread", "ignored")]
        inplace = out.data_ptr() == logits.data_ptr()
        traffic = self.gpu.launch(
            "cross_entropy_gradient",
            *(out, logits, dtype_number(logits), num_rows, width, target, weight, *numbers),
            reads=[*([] if inplace else [logits]), target, *([] if weight is None else [weight]), *numbers],
            writes=[out],
        )
        kept = logits.nbytes // max(1, num_rows) * int((~rows["ignored"]).sum())
        assert traffic.read[-1 if inplace else 0] == kept, (
            "logits are read once, and not at all where ignored"
        )
        assert traffic.written[-1] == out.nbytes, "every gradient is written once"


@pytest.fixture
def kernels(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """FusedCrossEntropy takes the kernels, as it does for tensors of a GPU."""
    of_gpu = Kernels(gpu)
    monkeypatch.setattr(rows_of_logits, "_uses_kernels", lambda logits: True)
    monkeypatch.setattr(_ops, "cross_entropy_sums", of_gpu.sums)
    monkeypatch.setattr(_ops, "cross_entropy_gradient_", of_gpu.gradient)
    return of_gpu


def logits_of(rows: int, vocab: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(rows * vocab)
    memory = (torch.randn(rows * vocab + offset, generator=generator) * 3).to(dtype)
    return memory[offset:].view(rows, vocab)


def check(x: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, inplace: bool | None) -> None:
    dtype = x.dtype
    mine = x.clone().requires_grad_()
    # An operation in between, so that the logits may be overwritten; the same address modulo 16.
    memory = torch.empty(x.numel() + x.storage_offset(), dtype=dtype)[x.storage_offset() :]
    logits = memory.view(x.shape).copy_(mine)
    loss = FusedCrossEntropy(weight, label_smoothing=smoothing, inplace=inplace)(logits, target)
    (loss * 128).backward()
    tolerances = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype] / 10}
    assert_cross_entropy(loss, mine, target, weight=weight, smoothing=smoothing, factor=128, **tolerances)
    assert mine.grad is not None
    assert not mine.grad[target == -100].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (4, 32), (5, 1000), (3, 6157), (3, 50_257), (2, 131_072)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_against_torch(
    kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int], smoothing: float, weighted: bool
) -> None:
    rows, vocab = shape
    generator = torch.Generator().manual_seed(vocab)
    target = torch.randint(vocab, (rows,), generator=generator)
    target[0], target[-1] = 0, vocab - 1
    if rows > 2:
        target[rows // 2] = -100
    weight = torch.rand(vocab, generator=generator) if weighted else None
    x = logits_of(rows, vocab, dtype)
    check(x, target, weight, smoothing, inplace=vocab % 2 == 0 or None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("inplace", [None, True])
def test_logits_may_lie_anywhere(
    kernels: Kernels, dtype: torch.dtype, offset: int, inplace: bool | None
) -> None:
    check(logits_of(3, 1003, dtype, offset), torch.tensor([0, 1002, 500]), None, 0.0, inplace)


def test_ignored_rows_may_hold_anything(kernels: Kernels) -> None:
    x = logits_of(3, 1003, torch.bfloat16).requires_grad_()
    with torch.no_grad():
        x[1] = torch.nan
    FusedCrossEntropy()(x, torch.tensor([4, -100, 7])).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert not x.grad[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_logits_and_targets_make_the_loss_nan(kernels: Kernels, dtype: torch.dtype, bad: float) -> None:
    x = logits_of(3, 1000, dtype)
    target = torch.tensor([5, 6, 7])
    for place in (0, 6, 800, 999):
        y = x.clone()
        y[1, place] = bad
        assert FusedCrossEntropy(reduction="none")(y, target).isnan().tolist() == [False, True, False]
    outside = torch.tensor([1000, 6, 7])
    sums = kernels.sums(x, outside, None, smooth=False, divided=False)
    assert sums.target_logit.isnan().tolist() == [True, False, False]
    x[1] = -torch.inf
    assert FusedCrossEntropy(reduction="none")(x, target).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_keep_their_digits(kernels: Kernels, dtype: torch.dtype) -> None:
    """Far from 0, neighbours differ by little: the difference to the maximum comes before the exponential."""
    x = (logits_of(3, 1003, torch.float32) + 30_000).to(dtype)
    check(x, torch.tensor([3, 700, 1002]), None, 0.0, None)
    x = torch.where(torch.arange(1003) % 3 == 0, -torch.inf, logits_of(3, 1003, torch.float32)).to(dtype)
    check(x, torch.tensor([1, 700, 1001]), None, 0.0, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smooth", [False, True])
def test_a_vocabulary_in_parts(kernels: Kernels, dtype: torch.dtype, smooth: bool) -> None:
    """Sums of each part, joined as over a group, are those of the whole; -inf columns and far targets included."""
    x = logits_of(4, 2001, dtype)
    x[1, :700] = -torch.inf if not smooth else x[1, :700]
    target = torch.tensor([0, 1999, 700, 1400])
    whole = kernels.sums(x, target, None, smooth=smooth, divided=False)
    bounds = [0, 700, 1401, 2001]
    parts = [
        kernels.sums(x[:, a:b].contiguous(), target - a, None, smooth=smooth, divided=True)
        for a, b in pairwise(bounds)
    ]
    maximum = torch.stack([p.maximum for p in parts]).amax(0)
    shifts = [p.maximum - maximum for p in parts]
    exp_sum = torch.stack(
        [torch.where(p.exp_sum == 0, 0, p.exp_sum * s.exp()) for p, s in zip(parts, shifts, strict=True)]
    ).sum(0)
    torch.testing.assert_close(
        exp_sum.log() + maximum, whole.exp_sum.log() + whole.maximum, rtol=1e-6, atol=1e-6
    )
    assert torch.equal(torch.stack([p.target_logit for p in parts]).sum(0), whole.target_logit)
    if smooth:
        widths = [b - a for a, b in pairwise(bounds)]
        total = sum(p.smooth + s * w for p, s, w in zip(parts, shifts, widths, strict=True))
        torch.testing.assert_close(total, whole.smooth, rtol=1e-5, atol=1e-3)


def test_more_logits_than_32_bits_count(gpu: EmulatedGpu) -> None:
    """The last of 40,000 rows of 131,072, in memory of which only that row exists."""
    num_rows, width = 40_000, 131_072
    x = sparse_memory(num_rows * width, torch.bfloat16).view(num_rows, width)
    x[-1] = logits_of(1, width, torch.bfloat16)[0]
    row = x[-1].double()
    target = torch.full((num_rows,), width - 1)
    maximum, exp_sum, target_logit = (torch.zeros(num_rows) for _ in range(3))
    gpu.only_blocks(num_rows - 1)
    try:
        shape = (x, dtype_number(x), num_rows, width, target, None)
        gpu.launch(
            "cross_entropy_sums", *shape, False, maximum, exp_sum, target_logit, None, False,
            reads=[x, target], writes=[maximum, exp_sum, target_logit],
        )  # fmt: skip
        assert maximum[-1] == row.max()
        torch.testing.assert_close(exp_sum[-1].double(), (row - row.max()).exp().sum(), rtol=1e-5, atol=0)
        assert target_logit[-1] == x[-1, -1]
        ones, zeros = torch.ones(num_rows), torch.zeros(num_rows)
        numbers = [maximum, exp_sum.log(), ones, ones, zeros, torch.zeros(num_rows, dtype=torch.bool)]
        gpu.launch("cross_entropy_gradient", x, *shape, *numbers, reads=[target, *numbers], writes=[x])
    finally:
        gpu.only_blocks()
    expected = row.softmax(0)
    expected[-1] -= 1
    torch.testing.assert_close(x[-1].double(), expected, rtol=8e-3, atol=1e-6)


def test_warps_fill_the_sectors_they_ask_for(gpu: EmulatedGpu) -> None:
    for dtype in DTYPES:
        x, target = logits_of(2, 8192, dtype), torch.tensor([5, 6])
        out = [torch.zeros(2) for _ in range(3)]
        share = gpu.sector_share(
            "cross_entropy_sums", x, dtype_number(x), 2, 8192, target, None, False, *out, None, False,
            reads=[x, target], writes=out,
        )  # fmt: skip
        assert share > 0.98  # all but the numbers of the row
