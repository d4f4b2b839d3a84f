"""Lion, the optimizer that steps by signs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._sharded import OffloadOptimizer, ShardedOptimizer
from .formulas import Lion
from .places import OnDevice, OnHost

__all__ = ["LionOffloadOptimizer", "LionOptimizer"]


class LionOptimizer(ShardedOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023) for fp32, fp16 and bf16 parameters.

    Every weight moves by ``lr`` in the direction of a sign, ``sign(beta1 * m + (1 - beta1) * g)``, after it has decayed
    by ``lr * weight_decay``; then the momentum becomes ``beta2 * m + (1 - beta2) * g``. One fp32 number of state per
    element, half of Adam's. 16-bit parameters have an fp32 master and always are its rounding to nearest even. The
    authors advise a learning rate 3 to 10 times smaller, and a weight decay as much larger, than AdamW's. A gradient
    of NaN does not show in the weight, as its sign is 0, but in the momentum.

    Args:
        params: parameters, or group dicts with ``params`` and any of the options below.
        lr: learning rate.
        betas: the share of the momentum in the direction, and its decay, in [0, 1).
        weight_decay: strength of the (decoupled) weight decay.
        maximize: follow the gradient upwards.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = LionOptimizer([p], lr=0.25)
        >>> p.grad = torch.tensor([3.0, -0.1, 0.0])
        >>> optimizer.step(); p.data
        tensor([0.7500, 1.2500, 1.0000])
    """

    _formula_class, _place_class = Lion, OnDevice

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)


class LionOffloadOptimizer(OffloadOptimizer):
    """`LionOptimizer` with momentum and masters in host memory, computed by the CPU.

    On CPU ranks updates continue after `step`, with bit-identical results, as with `AdamOffloadOptimizer`.

    Args:
        params: parameters, or group dicts with ``params`` and any of the options of `LionOptimizer`.
        lr: learning rate.
        betas: see `LionOptimizer`.
        weight_decay: see there.
        maximize: see there.
        overlap: let updates continue after `step`.

    Raises:
        ValueError: as `LionOptimizer`.
        RuntimeError: from the next call that waits for it, naming the block: an update in the background failed.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = LionOffloadOptimizer([p], lr=0.5)
        >>> p.grad = torch.tensor([3.0, -0.1])
        >>> optimizer.step(); p.data
        tensor([0.5000, 1.5000])
    """

    _formula_class, _place_class = Lion, OnHost

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        overlap: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, place={"overlaps": bool(overlap)})
