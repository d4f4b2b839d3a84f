"""One step of SGD or Lion over tensors, by the core's kernel of their device."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from bmtrain import _ops

__all__ = ["MomentumRanges", "lion_step", "sgd_step"]


class MomentumRanges(NamedTuple):
    """Operands: parallel lists of contiguous tensors of one device; neighbours in every list are one range.

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
