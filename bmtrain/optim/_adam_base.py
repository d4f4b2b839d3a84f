"""Adam's formula: hyper-parameters, and updates of ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.adam import adam as torch_adam

from .._base.arguments import require_number
from .._base.deprecate import warn_once
from ._arrays import MASTER, MOMENTS
from ._elementwise import ElementwiseOptimizer, check_scale
from ._options import check_betas, check_not_negative
from ._updates import Ranges, Update

__all__ = ["AdamBase"]

_BATCH = 1 << 26  # elements that torch's multi-tensor Adam updates together, if there are several parameters


class AdamBase(ElementwiseOptimizer):
    """Adam (Kingma and Ba, 2015) and AdamW; see the subclasses."""

    _arrays = _needed_arrays = MOMENTS
    _formula = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        hold_steps: int,
        scale: float | None,
        decoupled: bool | None,
    ) -> None:
        require_number("hold_steps", hold_steps)
        if not hold_steps >= 0:
            raise ValueError(f"hold_steps: expected 0 or more, got {hold_steps}")
        if scale is not None:
            check_scale(scale)
            warn_once(
                "optimizer.scale",
                f"{type(self).__name__}(scale=) is deprecated: write OptimManager(loss_scale=...)",
                stacklevel=3,
            )
        if decoupled is not None and not isinstance(decoupled, bool):
            raise TypeError(f"decoupled: expected None, True or False, got {decoupled!r}")
        self._decoupled = decoupled
        self._hold_steps = int(hold_steps)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": False}
        super().__init__(params, defaults, scale)

    def _check_options(self, options: dict[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay")
        check_betas(options)

    def _options_of(self, group: dict[str, Any], *, is_low: bool, scale: float) -> dict[str, Any]:
        return {
            "lr": float(group["lr"]),
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "scale": scale,
            "decoupled": is_low if self._decoupled is None else self._decoupled,
            "maximize": group["maximize"],
            "hold_steps": self._hold_steps,
        }

    def _lists_of(self, ranges: Ranges) -> Sequence[Any]:
        return ranges.weights, ranges.rounded, ranges.grads, *ranges.arrays, ranges.steps

    def _compute_by_torch(self, updates: Sequence[Update], options: dict[str, Any]) -> None:
        scale = options["scale"]
        for now in _batches(updates, self._hold_steps):
            torch_adam(
                [u.state.get(MASTER, u.param) for u in now],
                [u.grad.float() if scale == 1 else u.grad.float() / scale for u in now],
                [u.state["exp_avg"] for u in now],
                [u.state["exp_avg_sq"] for u in now],
                [],
                [torch.tensor(float(u.state["step"] - 1), device="cpu") for u in now],
                # The same choice as torch.optim.Adam's for plain parameters.
                foreach=now[0].param.is_cuda or None,
                amsgrad=False,
                beta1=options["beta1"],
                beta2=options["beta2"],
                lr=0.0 if now[0].state["step"] <= self._hold_steps else options["lr"],
                weight_decay=options["weight_decay"],
                eps=options["eps"],
                maximize=options["maximize"],
                decoupled_weight_decay=options["decoupled"],
            )

    def _own_attributes(self) -> tuple[str, ...]:
        return (*super()._own_attributes(), "_decoupled", "_hold_steps")


def _batches(updates: Sequence[Update], hold_steps: int) -> Iterator[list[Update]]:
    """Returns held updates and the others, each in parts, since torch's multi-tensor Adam allocates temporaries."""
    for held in (True, False):
        part: list[Update] = []
        numel = 0
        for update in updates:
            if (update.state["step"] <= hold_steps) != held:
                continue
            if part and numel + update.param.numel() > _BATCH:
                yield part
                part, numel = [], 0
            part.append(update)
            numel += update.param.numel()
        if part:
            yield part
