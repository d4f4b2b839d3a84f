"""The operators of the C++ core (``torch.ops.bmtrain.*``): typed wrappers, and what they do to fake tensors.

Reductions take a list of tensors of any shapes, fp32, fp16 and bf16 mixed, and give the same bits at every number
of threads and every instruction set level. CPU tensors; in a build with CUDA `has_kernels` says which operators take
tensors of a GPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import _C  # noqa: F401 - loading it registers the operators

__all__ = [
    "AdamRanges",
    "CrossEntropySums",
    "DeltaSums",
    "MomentumRanges",
    "abs_max",
    "abs_power_sum",
    "adam_",
    "adam_move_",
    "cast_",
    "cross_entropy_gradient_",
    "cross_entropy_sums",
    "has_inf_nan",
    "has_kernels",
    "lion_",
    "ordered_sum_",
    "scale_",
    "sgd_",
    "squared_sum",
]

_ops = torch.ops.bmtrain


@cache
def has_kernels(op: str, device: str) -> bool:
    """Whether the core was built with kernels of an operator for a type of device.

    Example:
        >>> has_kernels("squared_sum", "cpu"), has_kernels("squared_sum", "meta")
        (True, False)
    """
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
    return key is not None and bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"bmtrain::{op}", key))


def cast_(out: Tensor, source: Tensor) -> Tensor:
    """Copy ``source`` into ``out``, rounded to nearest even. Contiguous, with equally many elements.

    Example:
        >>> cast_(torch.empty(2, dtype=torch.bfloat16), torch.tensor([1.0, 1.00390625]))
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    _ops.cast_(out, source)
    return out


def ordered_sum_(
    out: Tensor, sources: Sequence[Tensor], *, accumulate: bool = False, factor: float = 1.0
) -> Tensor:
    """Add ``sources`` in their order and write ``factor`` times the sum, plus the old ``out`` if ``accumulate``.

    All contiguous and of one dtype (fp64 included); 16-bit values are added in fp32 and rounded once.

    Example:
        >>> ordered_sum_(torch.ones(2), [torch.ones(2), torch.ones(2)], accumulate=True, factor=0.5)
        tensor([2., 2.])
    """
    _ops.ordered_sum_(out, list(sources), accumulate, factor)
    return out


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors of any float dtypes in place by one number, in fp32 or wider, rounded once.

    Args:
        tensors: of one device; on a GPU fp32, fp16 or bf16 and contiguous.
        factor: one element, fp32 or fp64; read on the device, so that the host does not wait for it.

    Example:
        >>> x = torch.ones(2)
        >>> scale_([x], torch.tensor(0.5)); x
        tensor([0.5000, 0.5000])
    """
    if tensors:
        _ops.scale_(list(tensors), factor)
        torch.autograd.graph.increment_version(list(tensors))


def squared_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, a 0-dim fp64 tensor; finite if and only if every element is."""
    return _tensor(_ops.squared_sum(list(tensors)) if tensors else torch.zeros((), dtype=torch.float64))


def abs_max(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude, a 0-dim fp32 tensor: NaN if there is one, 0 without elements."""
    return _tensor(_ops.abs_max(list(tensors)) if tensors else torch.zeros(()))


def abs_power_sum(tensors: Sequence[Tensor], p: float) -> Tensor:
    """Return the sum of ``|x| ** p`` for a finite p > 0, a 0-dim fp64 tensor. For p = 2 squared_sum is far faster."""
    return _tensor(_ops.abs_power_sum(list(tensors), p) if tensors else torch.zeros((), dtype=torch.float64))


def has_inf_nan(tensors: Sequence[Tensor]) -> bool:
    """Tell whether any element is infinite or NaN. Tensors of other devices are checked there, by torch."""
    on_cpu = [t for t in tensors if t.device.type == "cpu"]
    elsewhere = [t for t in tensors if t.device.type != "cpu"]
    if on_cpu and _ops.has_inf_nan(on_cpu).item():
        return True
    return bool(elsewhere) and not torch.stack([t.isfinite().all() for t in elsewhere]).all().item()


def _tensor(result: Tensor) -> Tensor:  # torch.ops are untyped
    return result


class AdamRanges(NamedTuple):
    """What one call of :func:`adam_` updates: parallel lists of contiguous tensors of one device.

    Neighbours in memory (in every list, with equal ``steps``) are updated as one range.

    Attributes:
        weights: fp32 parameters, or fp32 masters of 16-bit ones; updated.
        rounded: 16-bit parameters that receive the rounded weights; empty if there are none.
        grads: fp32, fp16 or bf16.
        exp_avgs: first moments, fp32 or bf16; updated.
        exp_avg_sqs: second moments, of the same dtype; updated.
        steps: the number of each tensor's update, 1 for the first.
    """

    weights: list[Tensor]
    rounded: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[int]


class MomentumRanges(NamedTuple):
    """What one call of :func:`sgd_` or :func:`lion_` updates: parallel lists of contiguous tensors of one device.

    Neighbours in memory (in every list) are updated as one range.

    Attributes:
        weights: fp32 parameters, or fp32 masters of 16-bit ones; updated.
        rounded: 16-bit parameters that receive the rounded weights; empty if there are none.
        grads: fp32, fp16 or bf16.
        momenta: fp32; updated. Empty for SGD without momentum.
        fresh: whether the momentum of SGD begins with this step, which then writes the gradient to it; Lion's is zeros.
    """

    weights: list[Tensor]
    rounded: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]
    fresh: list[bool]


class DeltaSums(NamedTuple):
    """Sums over all updated elements of ``u + weight_decay * w`` and of its square (zeros if not asked for)."""

    total: float
    squares: float


def adam_(
    ranges: AdamRanges,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    decoupled: bool = False,
    maximize: bool = False,
    hold_steps: int = 0,
    torch_sqrt: bool = False,
    with_delta: bool = False,
) -> DeltaSums:
    """Update ranges by one Adam step, in one pass, in the operation order of ``torch.optim.Adam``.

    Args:
        ranges: what to update.
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: added to the denominator after bias correction.
        weight_decay: strength of the weight decay.
        scale: gradients are divided by it.
        decoupled: weight decay as in AdamW; otherwise it is added to the gradient (L2).
        maximize: follow the gradient upwards.
        hold_steps: number of first updates of a tensor with learning rate 0.
        torch_sqrt: take the bits of torch's square root, which MKL does not always round correctly; fp32 only.
        with_delta: compute the sums that are returned.

    Raises:
        TypeError: a tensor's dtype, device or layout does not fit; nothing has been written.
        ValueError: the lists or sizes do not fit; nothing has been written.
    """
    if not ranges.weights:
        return DeltaSums(0.0, 0.0)
    sums = _ops.adam_(
        *ranges,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        scale=scale,
        decoupled=decoupled,
        maximize=maximize,
        hold_steps=hold_steps,
        torch_sqrt=torch_sqrt,
        with_delta=with_delta,
    )
    return DeltaSums(*sums)


def sgd_(
    ranges: MomentumRanges,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """Update ranges by one step of SGD, in one pass, in the operation order of ``torch.optim.SGD``.

    Args:
        ranges: what to update.
        lr: learning rate.
        momentum: what the momentum is multiplied by.
        dampening: ``1 - dampening`` times the gradient is added to it.
        weight_decay: times the weight is added to the gradient.
        scale: gradients are divided by it.
        nesterov: step along the gradient and ``momentum`` times the momentum.
        maximize: follow the gradient upwards.

    Raises:
        TypeError: a tensor's dtype, device or layout does not fit; nothing has been written.
        ValueError: the lists or sizes do not fit; nothing has been written.
    """
    if ranges.weights:
        _ops.sgd_(
            *ranges,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            scale=scale,
            nesterov=nesterov,
            maximize=maximize,
        )


def lion_(
    ranges: MomentumRanges,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    scale: float = 1.0,
    maximize: bool = False,
) -> None:
    """Update ranges by one step of Lion, in one pass.

    Args:
        ranges: what to update.
        lr: learning rate, by which every weight moves.
        betas: the share of the momentum in the direction, and its decay.
        weight_decay: strength of the decoupled weight decay.
        scale: gradients are divided by it.
        maximize: follow the gradient upwards.

    Raises:
        TypeError: a tensor's dtype, device or layout does not fit; nothing has been written.
        ValueError: the lists or sizes do not fit; nothing has been written.
    """
    if ranges.weights:
        _ops.lion_(
            *ranges[:4],
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            scale=scale,
            maximize=maximize,
        )


def adam_move_(ranges: AdamRanges) -> None:
    """Move the bytes of an :func:`adam_` with 16-bit gradients and rounded weights, computing nothing.

    The ceiling of a step, for benchmarks: rounded weights then hold the gradients, all else is as it was.
    """
    _ops.adam_move_(*ranges[:5])


class CrossEntropySums(NamedTuple):
    """What one pass over rows of logits gives; fp32, one number a row.

    Attributes:
        maximum: largest logit; 0 for a row of -inf if ``divided``.
        exp_sum: sum of ``exp(x - maximum)``; NaN if a logit is NaN or inf.
        target_logit: logit of the target column; without such a column 0 if ``divided``, else NaN.
        smooth: sum of ``weight * (x - maximum)``; empty unless asked for.
    """

    maximum: Tensor
    exp_sum: Tensor
    target_logit: Tensor
    smooth: Tensor


def cross_entropy_sums(
    logits: Tensor, target: Tensor, weight: Tensor | None, *, smooth: bool, divided: bool
) -> CrossEntropySums:
    """Make the one pass over logits that a cross-entropy's loss needs. CUDA only.

    Args:
        logits: ``(N, C)``, contiguous, fp32, fp16 or bf16.
        target: ``(N,)`` int64, each row's column.
        weight: ``(C,)`` fp32 weights of the columns in ``smooth``; None: 1.
        smooth: whether to sum for label smoothing.
        divided: the columns are a part of the vocabulary, so that a target may be elsewhere.
    """
    return CrossEntropySums(*_ops.cross_entropy_sums(logits, target, weight, smooth=smooth, divided=divided))


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
    """Write ``scale * p[c] - hit * [c == target] - spread * weight[c]``, zeros where ``ignored``. CUDA only.

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


def _writes_only(*tensors: object, **options: object) -> None:
    """Fake of an operator that returns nothing."""


def _number(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Fake of a reduction to one number."""

    def fake(tensors: list[Tensor], p: float = 2.0) -> Tensor:
        return tensors[0].new_empty((), dtype=dtype)

    return fake


def _fake_adam(*ranges: object, **options: object) -> tuple[float, float]:
    return 0.0, 0.0


def _fake_cross_entropy_sums(
    logits: Tensor, target: Tensor, weight: Tensor | None, *, smooth: bool, divided: bool
) -> tuple[Tensor, ...]:
    rows = logits.shape[0]
    return tuple(
        logits.new_empty(size, dtype=torch.float32) for size in (rows, rows, rows, rows if smooth else 0)
    )


# What the operators give for tensors without data (torch.compile, FakeTensorMode).
_FAKES: dict[str, Callable[..., object]] = {
    "cast_": _writes_only,
    "ordered_sum_": _writes_only,
    "scale_": _writes_only,
    "squared_sum": _number(torch.float64),
    "abs_max": _number(torch.float32),
    "abs_power_sum": _number(torch.float64),
    "has_inf_nan": _number(torch.bool),
    "adam_": _fake_adam,
    "sgd_": _writes_only,
    "lion_": _writes_only,
    "adam_move_": _writes_only,
    "cross_entropy_sums": _fake_cross_entropy_sums,
    "cross_entropy_gradient_": _writes_only,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"bmtrain::{_name}", _fake)
