"""torch's optimizer base class without the import of the compiler.

[Note: The compiler that torch.optim imports]
Some methods of `torch.optim.Optimizer` are marked as not to be traced by ``torch.compile``, and the first call of one
of them imports all of ``torch._dynamo``: 800 modules, 70 MiB in every rank, and seconds. Nobody traces before that is
imported, so until then the methods behind the marks are called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def _unmarked(method: Callable[..., Any]) -> Callable[..., Any]:
    if "torch._dynamo" in sys.modules:
        return method
    unmarked: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return unmarked


class UntracedOptimizer(torch.optim.Optimizer):
    """`torch.optim.Optimizer`, see the note above."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _unmarked(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _unmarked(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = _unmarked(torch.optim.Optimizer.state_dict)(self)
        return state
