"""Lion, the optimizer that steps by signs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ._arrays import MASTER
from ._elementwise import ElementwiseOptimizer
from ._offloaded import Offloaded
from ._on_device import OnDevice
from ._options import check_betas, check_not_negative
from ._updates import Ranges, Update

__all__ = ["LionOffloadOptimizer", "LionOptimizer"]


class _Lion(ElementwiseOptimizer):
    """Algorithm 2 of the paper."""

    _arrays = _needed_arrays = ("exp_avg",)
    _formula = "lion"
    _kernel_takes_fp32 = True

    def _check_options(self, options: dict[str, Any]) -> None:
        check_not_negative(options, "lr", "weight_decay")
        check_betas(options)

    def _options_of(self, group: dict[str, Any], *, is_low: bool, scale: float) -> dict[str, Any]:
        return {
            "lr": float(group["lr"]),
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "weight_decay": group["weight_decay"],
            "scale": scale,
            "maximize": group["maximize"],
        }

    def _lists_of(self, ranges: Ranges) -> Sequence[Any]:
        return ranges.weights, ranges.rounded, ranges.grads, ranges.arrays[0]

    def _compute_by_torch(self, updates: Sequence[Update], options: dict[str, Any]) -> None:
        lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
        divisor = -options["scale"] if options["maximize"] else options["scale"]
        for u in updates:
            weight, momentum, grad = (
                u.state.get(MASTER, u.param),
                u.state["exp_avg"],
                u.grad.float() / divisor,
            )
            if options["weight_decay"]:
                weight.mul_(1 - lr * options["weight_decay"])
            weight.add_((momentum * beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-lr)
            momentum.mul_(beta2).add_(grad, alpha=1 - beta2)


class LionOptimizer(_Lion, OnDevice):
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

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )


class LionOffloadOptimizer(_Lion, Offloaded):
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
        self._overlaps = bool(overlap)
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )
