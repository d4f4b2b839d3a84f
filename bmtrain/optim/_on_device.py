"""Updates computed where the parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _ops
from ._arrays import MASTER
from ._elementwise import ElementwiseOptimizer, Update
from ._host_step import Ranges, compute_on_host, ranges_of

__all__ = ["OnDevice"]


class OnDevice(ElementwiseOptimizer):
    """An optimizer whose state lies on the run device; by the core's kernels where it has them, else by torch.

    The formula's class gives the name of its operator (`_op`), and the methods `_compute` and `_compute_by_torch`.
    """

    _op: str
    #: Whether fp32 parameters of a GPU are the kernel's too, and not torch's, whose bits may define them.
    _kernel_takes_fp32 = False

    def _compute(self, ranges: Ranges, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _compute_by_torch(self, updates: Sequence[Update], options: dict[str, Any]) -> None:
        """The same by operations of torch, whatever kernels it has for the device; masters only."""
        raise NotImplementedError

    def _apply(self, updates: Sequence[Update], names: tuple[str, ...], options: dict[str, Any]) -> None:
        on_host = [u for u in updates if u.param.is_cpu]
        others = [u for u in updates if not u.param.is_cpu]
        on_device = [u for u in others if self._has_kernel(u, names)]
        elsewhere = [u for u in others if not self._has_kernel(u, names)]
        if on_host:
            compute_on_host(on_host, names, lambda ranges: self._compute(ranges, options))
        if on_device:
            self._compute(ranges_of(on_device, names), options)
        if elsewhere:
            self._apply_by_torch(elsewhere, options)

    def _apply_by_torch(self, updates: Sequence[Update], options: dict[str, Any]) -> None:
        self._compute_by_torch(updates, options)
        for u in updates:
            if MASTER in u.state:
                u.param.copy_(u.state[MASTER])

    def _has_kernel(self, update: Update, names: tuple[str, ...]) -> bool:
        """Whether the core updates it where it lies, on a GPU."""
        param, grad, state = update.param, update.grad, update.state
        weight = state.get(MASTER, param)
        return (
            (self._kernel_takes_fp32 or param.dtype != torch.float32)
            and _ops.has_kernels(self._op, param.device.type)
            and grad.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and param.is_contiguous()
            and grad.is_contiguous()
            and weight.device == grad.device == param.device
            and all(state[name].dtype == torch.float32 for name in names)
        )
