"""Updates computed where the parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _ops
from .._unseen import data_of
from ._arrays import MASTER
from ._elementwise import ElementwiseOptimizer, Part, Update
from ._host_step import compute_alike, compute_on_host, split

__all__ = ["OnDevice"]


class OnDevice(ElementwiseOptimizer):
    """An optimizer whose state lies on the run device; by the core's kernels where it has them, else by torch.

    The formula's class gives the method `_compute_by_torch`.
    """

    #: Whether fp32 parameters of a GPU are the kernel's too, and not torch's, whose bits may define them.
    _kernel_takes_fp32 = False

    def _compute_by_torch(self, updates: Sequence[Update], options: dict[str, Any]) -> None:
        """The same by operations of torch, whatever kernels it has for the device; masters only."""
        raise NotImplementedError

    def _apply(self, parts: list[Part]) -> None:
        on_host, elsewhere = split(parts, lambda _, u: u.param.is_cpu)
        by_kernel, by_torch = split(elsewhere, self._has_kernel)
        compute_on_host(on_host, self._compute)
        compute_alike(by_kernel, self._compute)
        for part in by_torch:
            self._apply_by_torch(part.updates, part.options)

    def _apply_by_torch(self, updates: Sequence[Update], options: dict[str, Any]) -> None:
        self._compute_by_torch(updates, options)
        for u in updates:
            if MASTER in u.state:
                data_of(u.param).copy_(u.state[MASTER])

    def _has_kernel(self, part: Part, update: Update) -> bool:
        """Whether the core updates it where it lies, on a GPU."""
        param, grad, state = update.param, update.grad, update.state
        weight = state.get(MASTER, param)
        return (
            (self._kernel_takes_fp32 or param.dtype != torch.float32)
            and _ops.has_kernels(f"{self._formula}_", param.device.type)
            and grad.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and param.is_contiguous()
            and grad.is_contiguous()
            and weight.device == grad.device == param.device
            and all(state[name].dtype == torch.float32 for name in part.names)
        )
