"""One step of Adam, SGD or Lion over tensors, by the core's kernel of their device."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from bmtrain import _ops

__all__ = ["AdamRanges", "DeltaSums", "MomentumRanges", "adam_step", "lion_step", "sgd_step"]


class AdamRanges(NamedTuple):
    """Operands: parallel lists of contiguous tensors of one device; neighbours in every list are one range.

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
    """Operands of SGD and Lion, as `AdamRanges`.

    Attributes:
        momenta: fp32; updated. Empty for SGD without momentum.
        fresh: whether the momentum of SGD begins with this step, which then writes the gradient to it; Lion's is zeros.
    """

    weights: list[Tensor]
    rounded: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]
    fresh: list[bool]


class DeltaSums(NamedTuple):
    """Sums over all updated elements of ``u + weight_decay * w`` and of its square (zeros unless requested)."""

    total: float
    squares: float


def adam_step(
    ranges: AdamRanges,
    *,
    betas: tuple[float, float],
    as_torch: bool = False,
    with_delta: bool = False,
    **options: Any,
) -> DeltaSums:
    """One group's step, in the operation order of ``torch.optim.Adam``; options as `AdamOptions` of the core."""
    group = {"scale": 1.0, "decoupled": False, "maximize": False, "folded": False, "hold_steps": 0, **options}
    group.update(beta1=betas[0], beta2=betas[1])
    flags = {"as_torch": as_torch, "with_delta": with_delta}
    return DeltaSums(*_ops.step_of_groups("adam", ranges, [len(ranges.weights)], [group], **flags))


def sgd_step(ranges: MomentumRanges, **options: Any) -> None:
    """One group's step, in the operation order of ``torch.optim.SGD``; options as of that, and ``scale``."""
    others = dict.fromkeys(("momentum", "dampening", "weight_decay"), 0.0)
    group = {**others, "scale": 1.0, "nesterov": False, "maximize": False, **options}
    _ops.step_of_groups("sgd", ranges, [len(ranges.weights)], [group])


def lion_step(ranges: MomentumRanges, *, betas: tuple[float, float], **options: Any) -> None:
    """One group's step of Lion; options are ``lr``, ``weight_decay``, ``scale`` and ``maximize``."""
    rates = {"beta1": betas[0], "beta2": betas[1]}
    group = {**rates, "weight_decay": 0.0, "scale": 1.0, "maximize": False, **options}
    _ops.step_of_groups("lion", ranges[:4], [len(ranges.weights)], [group])
