"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim.sgd import sgd as torch_sgd

from .._base.arguments import require_number
from ._arrays import MASTER
from ._elementwise import ElementwiseOptimizer
from ._offloaded import Offloaded
from ._on_device import OnDevice
from ._options import check_not_negative
from ._updates import Ranges, Update

__all__ = ["SGDOffloadOptimizer", "SGDOptimizer"]

_MOMENTUM = "momentum_buffer"


class _SGD(ElementwiseOptimizer):
    """The formula of `torch.optim.SGD`."""

    _arrays = (_MOMENTUM,)
    _formula = "sgd"

    def _check_options(self, options: dict[str, Any]) -> None:
        check_not_negative(options, "lr", "momentum", "weight_decay")
        require_number("dampening", options["dampening"])
        if not math.isfinite(options["dampening"]):
            raise ValueError(f"dampening: expected a finite number, got {options['dampening']}")
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError(
                "nesterov: expected a momentum above 0 and no dampening, got momentum "
                f"{options['momentum']} and dampening {options['dampening']}"
            )

    def _arrays_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (_MOMENTUM,) if group["momentum"] else ()

    def _options_of(self, group: dict[str, Any], *, is_low: bool, scale: float) -> dict[str, Any]:
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return {"lr": float(group["lr"]), **{name: group[name] for name in names}, "scale": scale}

    def _lists_of(self, ranges: Ranges) -> Sequence[Any]:
        momenta = ranges.arrays[0] if ranges.arrays else []
        return ranges.weights, ranges.rounded, ranges.grads, momenta, ranges.fresh

    def _compute_by_torch(self, updates: Sequence[Update], options: dict[str, Any]) -> None:
        numbers = dict(options)
        scale = numbers.pop("scale")
        momenta = [None if u.is_fresh else u.state.get(_MOMENTUM) for u in updates]
        torch_sgd(
            [u.state.get(MASTER, u.param) for u in updates],
            [u.grad.float() if scale == 1 else u.grad.float() / scale for u in updates],
            momenta,
            **numbers,
        )
        for u, momentum in zip(updates, momenta, strict=True):
            if u.is_fresh and momentum is not None:
                u.state[_MOMENTUM].copy_(momentum)


class SGDOptimizer(_SGD, OnDevice):
    """Stochastic gradient descent with momentum, for fp32, fp16 and bf16 parameters, sharded or not.

    fp32 parameters are updated with the bits of `torch.optim.SGD`; 16-bit parameters have an fp32 master and always are
    the master rounded to nearest even. One pass over memory; the momentum, if there is one, is fp32.

    Args:
        params: parameters, or group dicts with ``params`` and any of the options below.
        lr: learning rate.
        momentum: what the momentum is multiplied by in each step; with 0 there is none, and no memory for it.
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
        super().__init__(params, _defaults(lr, momentum, dampening, weight_decay, nesterov, maximize))


class SGDOffloadOptimizer(_SGD, Offloaded):
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
        self._overlaps = bool(overlap)
        super().__init__(params, _defaults(lr, momentum, dampening, weight_decay, nesterov, maximize))


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
