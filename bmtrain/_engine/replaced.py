"""Detection of optimizers that hold parameters replaced by the wrapper.

[Note: Optimizers made too early]
The wrapper replaces the model's parameters by distributed ones. An optimizer made before holds the old parameters,
which get no gradients any more: its steps would silently update nothing. The old parameters are marked, and each
optimizer is checked in its first step after a conversion.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._base.opaque import opaque
from .._ranks import context

_MARK = "_bmtrain_replaced"


class ReplacedParameters:
    """Parameters replaced by the wrapper, and the optimizers that were found to hold none of them."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add(self, param: torch.nn.Parameter) -> None:
        """Records that ``param`` was replaced by a distributed parameter."""
        param.__dict__[_MARK] = True
        self._seen.clear()
        _install_hook()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks an optimizer before its first step.

        Raises:
            RuntimeError: it holds replaced parameters that nothing else trains.
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
def _install_hook() -> None:
    """Registers the hook on all optimizers, once per process, independent of the context."""
    register_optimizer_step_pre_hook(_before_step)


@opaque
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    current = context.current()
    if current is not None:
        current.engine.check_optimizer(optimizer)
