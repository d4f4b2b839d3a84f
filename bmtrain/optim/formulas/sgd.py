"""Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim.sgd import sgd as torch_sgd

from ..._base.arguments import require_number
from .._arrays import MASTER
from .._options import check_not_negative
from .._updates import Ranges, Update
from .formula import Formula

_MOMENTUM = "momentum_buffer"


class SGD(Formula):
    """A step along the gradient, or along its momentum."""

    name = "sgd"
    arrays = (_MOMENTUM,)

    def check(self, options: dict[str, Any]) -> None:
        check_not_negative(options, "lr", "momentum", "weight_decay")
        require_number("dampening", options["dampening"])
        if not math.isfinite(options["dampening"]):
            raise ValueError(f"dampening: expected a finite number, got {options['dampening']}")
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError(
                "nesterov: expected a momentum above 0 and no dampening, got momentum "
                f"{options['momentum']} and dampening {options['dampening']}"
            )

    def arrays_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (_MOMENTUM,) if group["momentum"] else ()

    def numbers_of(self, group: dict[str, Any], *, is_low: bool, scale: float) -> dict[str, Any]:
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return {"lr": float(group["lr"]), **{name: group[name] for name in names}, "scale": scale}

    def operands_of(self, ranges: Ranges) -> Sequence[Any]:
        momenta = ranges.arrays[0] if ranges.arrays else []
        return ranges.weights, ranges.rounded, ranges.grads, momenta, ranges.fresh

    def compute_by_torch(self, updates: Sequence[Update], numbers: dict[str, Any]) -> None:
        options = dict(numbers)
        scale = options.pop("scale")
        momenta = [None if u.is_fresh else u.state.get(_MOMENTUM) for u in updates]
        torch_sgd(
            [u.state.get(MASTER, u.param) for u in updates],
            [u.grad.float() if scale == 1 else u.grad.float() / scale for u in updates],
            momenta,
            **options,
        )
        for u, momentum in zip(updates, momenta, strict=True):
            if u.is_fresh and momentum is not None:
                u.state[_MOMENTUM].copy_(momentum)
