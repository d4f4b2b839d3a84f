"""Optimizer step with the optimizer's own loss scale (the API of 0.1.x)."""

from __future__ import annotations

from typing import Any

import torch

from ._base.deprecate import warn_once
from .global_var import config, rank

__all__ = ["optim_step"]


def optim_step(optim: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
    """Steps an optimizer and then its schedule, under the optimizer's own loss scale if it has one. Collective.

    An optimizer made with ``scale=`` skips the step when a gradient of any rank overflowed: the scale is
    divided by ``config["loss_scale_factor"]`` (but not below 1), the gradients are zeroed and the schedule
    stays. After ``config["loss_scale_steps"]`` good steps in a row the scale is multiplied by the factor.
    New programs use :class:`bmtrain.optim.OptimManager`, which does the same for several optimizers.

    Args:
        optim: any optimizer.
        lr_scheduler: anything with ``step()``, or None.
    """
    for name, value in (("optim", optim), ("lr_scheduler", lr_scheduler)):
        if not callable(getattr(value, "step", None)) and (value is not None or name == "optim"):
            raise TypeError(f"{name}: expected something with step(), got {value!r:.80}")
    warn_once("optim_step", "optim_step() is deprecated: step through bmtrain.optim.OptimManager")
    # With a scale of 1, down to which overflows may have brought it, it still skips and may grow again.
    if getattr(optim, "_owned_scale", None) is None:
        optim.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        return
    owner: Any = optim
    factor, patience = float(config["loss_scale_factor"]), int(config["loss_scale_steps"])
    try:
        owner.step()
    except OverflowError:
        scale = max(owner.scale / factor, 1.0)
        if rank() == 0:
            print(
                f"Gradient overflow: step skipped, loss scale {owner.scale:.10g} -> {scale:.10g}", flush=True
            )
        owner.justify_scale(scale)
        owner.zero_grad(set_to_none=False)
    else:
        if lr_scheduler is not None:
            lr_scheduler.step()
    if owner.steps_since_last_scale >= patience:
        owner.justify_scale(owner.scale * factor)
