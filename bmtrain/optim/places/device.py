"""State on the device of the parameters, and updates computed there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._base.unseen import data_of
from .._arrays import MASTER
from .._updates import Update
from ..formulas import Part
from .place import Place, States
from .ranges import compute_alike, compute_on_host, split

__all__ = ["OnDevice", "apply_by_torch"]


class OnDevice(Place):
    """The device of the parameters; updates are computed by the core's kernels where available, else by torch."""

    def apply(self, parts: list[Part], states: States, *, is_early: bool) -> None:
        on_host, elsewhere = split(parts, lambda _, u: u.param.is_cpu)
        by_kernel, by_torch = split(elsewhere, _has_kernel)
        compute_on_host(on_host, as_torch=True)
        compute_alike(by_kernel, as_torch=True)
        apply_by_torch(by_torch)


def apply_by_torch(parts: Sequence[Part]) -> None:
    """Computes updates by operations of torch."""
    for part in parts:
        part.formula.compute_by_torch(part.updates, part.numbers)
        for u in part.updates:
            if MASTER in u.state:
                data_of(u.param).copy_(u.state[MASTER])


def _has_kernel(part: Part, update: Update) -> bool:
    """Whether the core has a kernel for the parameter, on a GPU."""
    param, grad, state = update.param, update.grad, update.state
    weight = state.get(MASTER, param)
    return (
        (part.formula.kernel_takes_fp32 or param.dtype != torch.float32)
        and part.formula.has_kernel(param.device)
        and grad.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and param.is_contiguous()
        and grad.is_contiguous()
        and weight.device == grad.device == param.device
        and all(state[name].dtype == torch.float32 for name in part.names)
    )
