"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._sharded import OffloadOptimizer, ShardedOptimizer
from .formulas import SGD
from .places import OnDevice, OnHost

__all__ = ["SGDOffloadOptimizer", "SGDOptimizer"]


class SGDOptimizer(ShardedOptimizer):
    """Stochastic gradient descent with momentum, for fp32, fp16 and bf16 parameters, sharded or not.

    fp32 parameters are updated with the bits of `torch.optim.SGD`; 16-bit parameters have an fp32 master and always are
    the master rounded to nearest even. One pass over memory; the momentum, if there is one, is fp32.

    Args:
        params: parameters, or group dicts with ``params`` and any of the options below.
        lr: learning rate.
        momentum: factor of the momentum in each step; with 0 no momentum is kept.
        dampening: the momentum gets ``1 - dampening`` times the gradient (its first step: the whole).
        weight_decay: times the weight is added to the gradient (L2).
        nesterov: step along the gradient and the momentum (Sutskever et al., 2013) instead of the momentum.
        maximize: follow the gradient upwards.

    Raises:
        ValueError: an argument is out of its range, or ``nesterov`` without momentum or with dampening.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = SGDOptimizer([p], lr=0.25, momentum=0.5)
        >>> for _ in range(2):
        ...     p.grad = torch.ones_like(p)
        ...     optimizer.step()
        >>> p.data
        tensor([0.3750, 0.3750, 0.3750], dtype=torch.bfloat16)
    """

    _formula_class, _place_class = SGD, OnDevice

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = _defaults(lr, momentum, dampening, weight_decay, nesterov, maximize)
        super().__init__(params, defaults)


class SGDOffloadOptimizer(OffloadOptimizer):
    """`SGDOptimizer` with momentum and masters in host memory, computed by the CPU.

    On CPU ranks updates continue after `step`, with bit-identical results, as with `AdamOffloadOptimizer`.

    Args:
        params: parameters, or group dicts with ``params`` and any of the options of `SGDOptimizer`.
        lr: learning rate.
        momentum: see `SGDOptimizer`, and so for what follows.
        dampening: see there.
        weight_decay: see there.
        nesterov: see there.
        maximize: see there.
        overlap: let updates continue after `step`.

    Raises:
        ValueError: as `SGDOptimizer`.
        RuntimeError: from the next call that waits for it, naming the block: an update in the background failed.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = SGDOffloadOptimizer([p], lr=0.5)
        >>> p.grad = torch.tensor([1.0, -1.0])
        >>> optimizer.step(); p.data
        tensor([0.5000, 1.5000])
    """

    _formula_class, _place_class = SGD, OnHost

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        overlap: bool = True,
    ) -> None:
        defaults = _defaults(lr, momentum, dampening, weight_decay, nesterov, maximize)
        super().__init__(params, defaults, place={"overlaps": bool(overlap)})


def _defaults(
    lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool, maximize: bool
) -> dict[str, Any]:
    return {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
