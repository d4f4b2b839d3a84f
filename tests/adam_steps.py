"""One step of Adam over tensors, by the core's kernel of their device."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from bmtrain import _ops

__all__ = ["AdamRanges", "DeltaSums", "adam_step"]


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
