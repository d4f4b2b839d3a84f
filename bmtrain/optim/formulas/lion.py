"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), Algorithm 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._arrays import MASTER
from .._options import check_betas, check_not_negative
from .._updates import Ranges, Update
from .formula import Formula


class Lion(Formula):
    """A step along the sign of the momentum blended with the gradient."""

    name = "lion"
    arrays = needed_arrays = ("exp_avg",)

    def check(self, options: dict[str, Any]) -> None:
        check_not_negative(options, "lr", "weight_decay")
        check_betas(options)

    def numbers_of(self, group: dict[str, Any], *, is_low: bool, scale: float) -> dict[str, Any]:
        return {
            "lr": float(group["lr"]),
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "weight_decay": group["weight_decay"],
            "scale": scale,
            "maximize": group["maximize"],
        }

    def operands_of(self, ranges: Ranges) -> Sequence[Any]:
        return ranges.weights, ranges.rounded, ranges.grads, ranges.arrays[0]

    def kernel_takes_fp32(self, device: torch.device) -> bool:
        return True

    def compute_by_torch(self, updates: Sequence[Update], numbers: dict[str, Any]) -> None:
        lr, beta1, beta2 = numbers["lr"], numbers["beta1"], numbers["beta2"]
        divisor = -numbers["scale"] if numbers["maximize"] else numbers["scale"]
        for u in updates:
            weight, momentum, grad = (
                u.state.get(MASTER, u.param),
                u.state["exp_avg"],
                u.grad.float() / divisor,
            )
            if numbers["weight_decay"]:
                weight.mul_(1 - lr * numbers["weight_decay"])
            weight.add_((momentum * beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-lr)
            momentum.mul_(beta2).add_(grad, alpha=1 - beta2)
