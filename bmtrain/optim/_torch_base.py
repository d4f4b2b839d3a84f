"""torch's optimizer without the compiler that it imports, and without a wrapper that nobody needs.

[Note: The compiler that torch.optim imports]
Some methods of `torch.optim.Optimizer` are marked as not to be traced by ``torch.compile``, and the first call of one
of them imports all of ``torch._dynamo``: 800 modules, 70 MiB in every rank, and seconds. Nobody traces before that is
imported, so until then the methods behind the marks are called.

[Note: A step that nobody watches]
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

from .. import _C

__all__ = ["TorchOptimizer"]


def _unmarked(method: Callable[..., Any]) -> Callable[..., Any]:
    if "torch._dynamo" in sys.modules:
        return method
    unmarked: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return unmarked


class TorchOptimizer(torch.optim.Optimizer):
    """`torch.optim.Optimizer`; the notes above say what is different."""

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """What `torch.optim.Optimizer` calls to wrap ``step``."""
        wrapped = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: TorchOptimizer, *args: Any, **kwargs: Any) -> Any:
            return (wrapped if self._is_watched() else func)(self, *args, **kwargs)

        return step

    def _is_watched(self) -> bool:
        """Whether a step has hooks, or somebody records what torch does."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or _C.is_recorded()
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _unmarked(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _unmarked(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = _unmarked(torch.optim.Optimizer.state_dict)(self)
        return state
