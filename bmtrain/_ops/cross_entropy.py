"""Cross-entropy over rows of logits: sums and gradient. CUDA only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ops = torch.ops.bmtrain


class CrossEntropySums(NamedTuple):
    """Sums of one pass over rows of logits, one number per row; of kernels fp32.

    Attributes:
        maximum: largest logit; 0 for a row of -inf if ``divided``.
        exp_sum: sum of ``exp(x - maximum)``; NaN if a logit is NaN or inf.
        target_logit: logit of the target column; without such a column 0 if ``divided``, else NaN.
        smooth: sum of ``weight * (x - maximum)``; None unless requested.
    """

    maximum: Tensor
    exp_sum: Tensor
    target_logit: Tensor
    smooth: Tensor | None


def cross_entropy_sums(
    logits: Tensor, target: Tensor, weight: Tensor | None, *, smooth: bool, divided: bool
) -> CrossEntropySums:
    """Computes the sums of a cross-entropy in one pass over logits. CUDA only.

    Args:
        logits: ``(N, C)``, contiguous, fp32, fp16 or bf16.
        target: ``(N,)`` int64, each row's column.
        weight: ``(C,)`` fp32 weights of the columns in ``smooth``; None: 1.
        smooth: whether to sum for label smoothing.
        divided: the columns are a part of the vocabulary, so that a target may be elsewhere.
    """
    sums = CrossEntropySums(*_ops.cross_entropy_sums(logits, target, weight, smooth=smooth, divided=divided))
    return sums if smooth else sums._replace(smooth=None)


def cross_entropy_gradient_(
    out: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    maximum: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    hit: Tensor,
    spread: Tensor,
    ignored: Tensor,
) -> None:
    """Writes ``scale * p[c] - hit * [c == target] - spread * weight[c]``, zeros where ``ignored``. CUDA only.

    Args:
        out: like logits, and may be the logits.
        logits: ``(N, C)``, contiguous.
        target: ``(N,)`` int64.
        weight: ``(C,)`` fp32, or None: 1.
        maximum, log_sum: ``(N,)`` fp32: ``p[c] = exp(x[c] - maximum - log_sum)``.
        scale, hit, spread: ``(N,)`` fp32.
        ignored: ``(N,)`` bool.
    """
    _ops.cross_entropy_gradient_(out, logits, target, weight, maximum, log_sum, scale, hit, spread, ignored)
    torch.autograd.graph.increment_version(out)
