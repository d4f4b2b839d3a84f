"""torch's optimizer base class without the import of the compiler and the wrapper around ``step``.

[Note: The compiler that torch.optim imports]
Some methods of `torch.optim.Optimizer` are marked as not to be traced by ``torch.compile``, and the first call of one
of them imports all of ``torch._dynamo``: 800 modules, 70 MiB in every rank, and seconds. Nobody traces before that is
imported, so until then the methods behind the marks are called.

[Note: Steps without hooks]
torch wraps every ``step`` in a mark for profilers and the calls of hooks, 6 us of the 22 that a small step takes in
Python. The wrapper is called for steps that have hooks or are recorded; others are called as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from .._C import is_recorded

__all__ = ["TorchOptimizer"]


def _unmarked(method: Callable[..., Any]) -> Callable[..., Any]:
    if "torch._dynamo" in sys.modules:
        return method
    unmarked: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return unmarked


class TorchOptimizer(torch.optim.Optimizer):
    """`torch.optim.Optimizer` with the differences in the notes above."""

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``step``; called by `torch.optim.Optimizer`."""
        wrapped = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: TorchOptimizer, *args: Any, **kwargs: Any) -> Any:
            return (wrapped if self._is_watched() else func)(self, *args, **kwargs)

        return step

    def _is_watched(self) -> bool:
        """Whether a step has hooks, or a profiler is recording."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or is_recorded()
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _unmarked(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _unmarked(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = _unmarked(torch.optim.Optimizer.state_dict)(self)
        return state
