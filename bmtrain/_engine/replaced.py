"""Parameters that the wrapper has replaced, in optimizers that were made before.

[Note: Optimizers made too early]
The wrapper puts distributed parameters in the places of the model's own. An optimizer that was made before holds the
old ones: none ever gets a gradient again, so its steps update nothing, and no error would say so. The old parameters
are marked, and each optimizer is looked at in its first step after a conversion.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _context

__all__ = ["ReplacedParameters"]

_MARK = "_bmtrain_replaced"


class ReplacedParameters:
    """What the wrapper has replaced, and which optimizers are known to hold none of it."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add(self, param: torch.nn.Parameter) -> None:
        """A distributed parameter stands in the place of ``param`` from now on."""
        param.__dict__[_MARK] = True
        self._seen.clear()
        _look_at_optimizers()

    def look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks through an optimizer that is about to step, the first time.

        Raises:
            RuntimeError: it holds parameters that were replaced, and that nothing else trains.
        """
        if optimizer in self._seen:
            return
        params = [p for group in optimizer.param_groups for p in group["params"]]
        stale = [
            p for p in params if _MARK in getattr(p, "__dict__", ()) and p.requires_grad and p.grad is None
        ]
        if stale:
            raise RuntimeError(
                f"{type(optimizer).__name__}: {len(stale)} of its {len(params)} parameters, the first of shape "
                f"{tuple(stale[0].shape)}, are no longer the model's: BMTrainModelWrapper has put distributed "
                "parameters in their places; make the optimizer after the model has been wrapped"
            )
        self._seen.add(optimizer)


@functools.cache
def _look_at_optimizers() -> None:
    """Once in a process, whatever becomes of the context."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    current = _context.current()
    if current is not None:
        current.engine.replaced.look_at(optimizer)
