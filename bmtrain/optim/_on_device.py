"""Updates computed on the device of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _ops
from .._base.unseen import data_of
from ._arrays import MASTER
from ._elementwise import ElementwiseOptimizer
from ._host_step import compute_alike, compute_on_host, split
from ._updates import Part, Update

__all__ = ["OnDevice"]


class OnDevice(ElementwiseOptimizer):
    """An optimizer with state on the run device; computed by the core's kernels where available, else by torch.

    The formula's class defines the method `_compute_by_torch`.
    """

    #: Whether the kernel also updates fp32 parameters of a GPU; otherwise torch does, whose bits they then have.
    _kernel_takes_fp32 = False

    def _compute_by_torch(self, updates: Sequence[Update], options: dict[str, Any]) -> None:
        """Computes the updates by operations of torch; fp32 weights and masters only."""
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
        """Whether the core has a kernel for the parameter, on a GPU."""
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
