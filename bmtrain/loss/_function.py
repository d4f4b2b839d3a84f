"""Cross-entropy over rows of logits as one autograd node, and the check for inf and NaN.

[Note: Memory of the loss]
A softmax of ``(N, C)`` logits in fp32 would be the largest tensor of a training step: twice the size of
the 16-bit logits themselves. So the node keeps the logits it was given and two fp32 numbers a row, the
maximum ``m`` and ``log(sum(exp(x - m)))``; backward computes the probabilities again. Both passes work on
some rows at a time, so that fp32 intermediates stay small (and, on the CPU, inside the cache).

The two numbers are kept apart because ``x - (m + log_sum)`` would lose the digits of a small loss when
``m`` is large.

On a GPU, in a build with our kernels, each of the two passes is one kernel over contiguous logits, and the chunks are
not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from .._base.arguments import require_tensor
from .._base.differentiable_once import differentiable_once
from .._ops import CrossEntropySums

# Elements of one chunk of rows. CPU: the fp32 temporary of a chunk (1 MiB) stays in a second-level cache;
# CUDA: enough for a full wave of any card, few enough that the temporaries do not count beside the logits.
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}

_CONTIGUOUS = torch.contiguous_format


@dataclass(frozen=True)
class VocabularySlice:
    """The columns of the logits that this rank holds, and the group that holds the others."""

    start: int
    total: int  # columns of the whole vocabulary
    comm: Any  # Communicator of the group; None where one rank has all columns


@dataclass(frozen=True)
class CrossEntropyOptions:
    """Options of the loss of rows."""

    weight: Tensor | None  # (total,) in the accumulation dtype
    ignore_index: int
    label_smoothing: float
    columns: VocabularySlice
    inplace: bool = False  # whether the gradient may take the memory of the logits


def _chunks(logits: Tensor) -> Iterator[slice]:
    limit = _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS["cuda"])
    rows = max(1, limit // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


def _local_target(target: Tensor, columns: VocabularySlice, width: int) -> tuple[Tensor, Tensor | None]:
    """Returns each row's target column on this rank, and a mask of the rows with one (None: all)."""
    if width == columns.total:
        return target, None
    local = target - columns.start
    inside = (local >= 0) & (local < width)
    return torch.where(inside, local, 0), inside


def _uses_kernels(logits: Tensor) -> bool:
    return (
        logits.device.type != "cpu"
        and logits.dtype != torch.float64
        and logits.is_contiguous()
        and _ops.has_kernels("cross_entropy_sums", logits.device.type)
    )


def _row_sums(logits: Tensor, target: Tensor, options: CrossEntropyOptions) -> CrossEntropySums:
    if _uses_kernels(logits):
        return _row_sums_by_kernel(logits, target, options)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    num_rows, width = logits.shape
    local, inside = _local_target(target, options.columns, width)
    maximum, exp_sum, target_logit = (logits.new_empty(num_rows, dtype=dtype) for _ in range(3))
    smooth = logits.new_empty(num_rows, dtype=dtype) if options.label_smoothing else None
    weight = _local_weight(options, width)
    for rows in _chunks(logits):
        x = logits[rows]
        peak = x.amax(1, keepdim=True).to(dtype)
        target_logit[rows] = x.gather(1, local[rows, None]).squeeze(1).to(dtype)
        if options.columns.comm is not None:
            # Another rank may hold a finite column of a row that is -inf here.
            peak = torch.where(peak == -torch.inf, 0.0, peak)
        centred = x.to(dtype, copy=True).sub_(peak)
        if smooth is not None:
            smooth[rows] = centred.sum(1) if weight is None else centred @ weight
        exp_sum[rows] = centred.exp_().sum(1)
        maximum[rows] = peak.squeeze(1)
    if inside is not None:
        target_logit = torch.where(inside, target_logit, 0.0)
    return CrossEntropySums(maximum, exp_sum, target_logit, smooth)


def _row_sums_by_kernel(logits: Tensor, target: Tensor, options: CrossEntropyOptions) -> CrossEntropySums:
    return _ops.cross_entropy_sums(
        logits,
        target - options.columns.start,
        _local_weight(options, logits.shape[1]),
        smooth=options.label_smoothing != 0,
        divided=options.columns.comm is not None,
    )


def _local_weight(options: CrossEntropyOptions, width: int) -> Tensor | None:
    if options.weight is None:
        return None
    return options.weight[options.columns.start : options.columns.start + width]


def _weight_total(options: CrossEntropyOptions) -> float | Tensor:
    return float(options.columns.total) if options.weight is None else options.weight.sum()


def _combine(local: CrossEntropySums, options: CrossEntropyOptions, width: int) -> CrossEntropySums:
    """Combines sums over each rank's columns to sums over the vocabulary: one max, one sum over the group."""
    from .._C import ReduceOp

    comm = options.columns.comm
    # Of a row of -inf here the maximum is not 0: against it, other ranks' small logits would underflow.
    maximum = torch.where(local.exp_sum == 0, -torch.inf, local.maximum)
    comm.all_reduce(maximum, ReduceOp.MAX, "cross_entropy").wait()
    shift = local.maximum - maximum  # <= 0 where the row's maximum is another rank's, and columns are here
    parts = [torch.where(local.exp_sum == 0, 0.0, local.exp_sum * shift.exp()), local.target_logit]
    if local.smooth is not None:
        weight = _local_weight(options, width)
        parts.append(local.smooth + shift * (float(width) if weight is None else weight.sum()))
    sums = torch.stack(parts)
    comm.all_reduce(sums, ReduceOp.SUM, "cross_entropy").wait()
    return CrossEntropySums(maximum, sums[0], sums[1], sums[2] if local.smooth is not None else None)


class _CrossEntropyRows(torch.autograd.Function):
    """Loss of each row, without reduction; see [Note: Memory of the loss]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: CrossEntropyOptions) -> Tensor:
        ignored = target == options.ignore_index
        target = torch.where(ignored, 0, target)
        sums = _row_sums(logits, target, options)
        if options.columns.comm is not None:
            sums = _combine(sums, options, logits.shape[1])
        log_sum = sums.exp_sum.log()
        target_weight = torch.ones_like(log_sum) if options.weight is None else options.weight[target]
        loss = (log_sum - (sums.target_logit - sums.maximum)).mul_(target_weight)
        if sums.smooth is not None:
            smooth = log_sum * _weight_total(options) - sums.smooth
            smooth.mul_(options.label_smoothing / options.columns.total)
            loss.mul_(1.0 - options.label_smoothing).add_(smooth)
        loss.masked_fill_(ignored, 0.0)
        ctx.save_for_backward(logits, target, ignored, sums.maximum, log_sum, target_weight)
        ctx.options = options
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, target, ignored, maximum, log_sum, target_weight = ctx.saved_tensors
        options: CrossEntropyOptions = ctx.options
        width = logits.shape[1]
        weight = _local_weight(options, width)
        local, inside = _local_target(target, options.columns, width)

        # d loss / d x[c] = scale * p[c] - hit * [c == target] - spread * weight[c]
        smoothing = options.label_smoothing
        hit = grad_loss * target_weight * (1.0 - smoothing)
        spread = grad_loss * (smoothing / options.columns.total)
        scale = hit + spread * _weight_total(options)

        # Once the logits hold the gradient, torch's check of saved tensors refuses a second backward.
        grad = logits.detach() if options.inplace else torch.empty_like(logits, memory_format=_CONTIGUOUS)
        if _uses_kernels(logits):
            _ops.cross_entropy_gradient_(
                grad,
                logits,
                target - options.columns.start,
                weight,
                maximum=maximum,
                log_sum=log_sum,
                scale=scale.contiguous(),
                hit=hit.contiguous(),
                spread=spread.contiguous(),
                ignored=ignored,
            )
            return grad, None, None
        if inside is not None:
            hit = torch.where(inside, hit, 0.0)
        for rows in _chunks(logits):
            p = logits[rows].to(maximum.dtype, copy=True)
            p.sub_(maximum[rows, None]).sub_(log_sum[rows, None]).exp_().mul_(scale[rows, None])
            p.scatter_add_(1, local[rows, None], -hit[rows, None])
            if smoothing:
                p.sub_(spread[rows, None] if weight is None else spread[rows, None] * weight)
            # Not the product with a zero scale: exact even where the ignored row holds inf or NaN.
            p.masked_fill_(ignored[rows, None], 0.0)
            grad[rows] = p
        return grad, None, None


def cross_entropy_rows(logits: Tensor, target: Tensor, options: CrossEntropyOptions) -> Tensor:
    """Computes the cross-entropy of each row of logits.

    Args:
        logits: ``(N, C)``, fp16, bf16, fp32 or fp64; with a vocabulary slice the columns of this rank.
        target: ``(N,)`` int64, a column of the whole vocabulary or ``options.ignore_index``; the caller has
            checked it.
        options: weights, ignored index, smoothing, columns.

    Returns:
        ``(N,)`` losses, 0 on ignored rows, fp32 (fp64 for fp64 logits).
    """
    function: Any = _CrossEntropyRows
    loss: Tensor = function.apply(logits, target, options)
    return loss


def has_inf_nan(x: Tensor, out: Tensor) -> None:
    """Sets a flag if a tensor has inf or NaN; otherwise the flag stays unchanged.

    Args:
        x: fp16, bf16 or fp32, any shape.
        out: one uint8 element on the device of ``x``; set to 1.

    Raises:
        TypeError: an argument is not a tensor, or has another dtype.
        ValueError: ``out`` has more than one element or lies on another device.

    Example:
        >>> import torch
        >>> flag = torch.zeros(1, dtype=torch.uint8)
        >>> has_inf_nan(torch.tensor([1.0, 2.0]), flag); flag
        tensor([0], dtype=torch.uint8)
        >>> has_inf_nan(torch.tensor([1.0, float("inf")]), flag); flag
        tensor([1], dtype=torch.uint8)
    """
    require_tensor("x", x)
    require_tensor("out", out)
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    if out.dtype != torch.uint8:
        raise TypeError(f"out: expected uint8, got {out.dtype}")
    if out.numel() != 1:
        raise ValueError(f"out: expected one element, got shape {tuple(out.shape)}")
    if out.device != x.device:
        raise ValueError(f"out: expected it on the device of x ({x.device}), got {out.device}")
    if x.numel() == 0:
        return
    with torch.no_grad():
        # The largest magnitude is inf or NaN exactly if an element is; no mask of the size of x is made.
        peak = torch.linalg.vector_norm(x, torch.inf)
        out.copy_(torch.where(torch.isfinite(peak), out, 1))
