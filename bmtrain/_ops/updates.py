"""One step of an optimizer over many tensors, in one pass over memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._C import step_of_groups

_ops = torch.ops.bmtrain


class AdamRanges(NamedTuple):
    """Operands of :func:`adam_`: parallel lists of contiguous tensors of one device.

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


class DeltaSums(NamedTuple):
    """Sums over all updated elements of ``u + weight_decay * w`` and of its square (zeros unless requested)."""

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
    folded: bool = False,
    hold_steps: int = 0,
    as_torch: bool = False,
    with_delta: bool = False,
) -> DeltaSums:
    """Updates ranges by one Adam step, in one pass, in the operation order of ``torch.optim.Adam``.

    Args:
        ranges: what to update.
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: added to the denominator after bias correction.
        weight_decay: strength of the weight decay.
        scale: gradients are divided by it.
        decoupled: weight decay as in AdamW; otherwise it is added to the gradient (L2).
        maximize: follow the gradient upwards.
        folded: take the correction of the second moment into the learning rate and ``eps``, as 8-bit moments do.
        hold_steps: number of first updates of a tensor with learning rate 0.
        as_torch: take the bits of torch's own Adam; fp32 only. On a CPU its square root is meant, which MKL does not
            always round correctly, on a GPU the order of its multi-tensor Adam.
        with_delta: compute the sums that are returned.

    Raises:
        TypeError: a tensor's dtype, device or layout does not fit; nothing has been written.
        ValueError: the lists or sizes do not fit; nothing has been written.
    """
    if not ranges.weights:
        return DeltaSums(0.0, 0.0)
    group = {
        "lr": lr,
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": eps,
        "weight_decay": weight_decay,
        "scale": scale,
        "decoupled": decoupled,
        "maximize": maximize,
        "folded": folded,
        "hold_steps": hold_steps,
    }
    sizes = [len(ranges.weights)]
    return DeltaSums(
        *step_of_groups("adam", ranges, sizes, [group], as_torch=as_torch, with_delta=with_delta)
    )


def adam_move_(ranges: AdamRanges) -> None:
    """Moves the bytes of an :func:`adam_` with 16-bit gradients and rounded weights, without computing.

    The upper bound of a step's speed, for benchmarks: rounded weights then hold the gradients, the rest is unchanged.
    """
    _ops.adam_move_(*ranges[:5])
