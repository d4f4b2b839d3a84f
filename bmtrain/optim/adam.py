"""Adam with its state on the run device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.adam import adam as torch_adam

from .. import _ops
from ._adam_base import AdamBase, Update
from ._adam_state import MASTER
from ._host_step import host_ranges

__all__ = ["AdamOptimizer"]


class AdamOptimizer(AdamBase):
    """Adam (Kingma and Ba, 2015) for fp32, fp16 and bf16 parameters, sharded or not.

    fp32 parameters are updated with the bits of `torch.optim.Adam`, weight decay added to the gradient, or, with
    ``decoupled=True``, of `torch.optim.AdamW` (Loshchilov and Hutter, 2019). 16-bit parameters have an fp32 master,
    decoupled weight decay unless ``decoupled=False``, and always are the master rounded to nearest even.

    Args:
        params: parameters, or group dicts with ``params`` and any of ``lr, betas, eps, weight_decay, maximize``.
        lr: learning rate.
        betas: decay of the first and of the second moment, in [0, 1).
        eps: added to the denominator after bias correction.
        weight_decay: strength of the weight decay.
        hold_steps: number of first updates of each parameter that move its moments only.
        scale: initial loss scale that the optimizer is to own; by default none.
        decoupled: how weights decay: True as in AdamW, False added to the gradient (L2), None as scripts of all
            versions have it: decoupled for 16-bit parameters, L2 for fp32 ones.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = AdamOptimizer([p], lr=0.5)
        >>> p.grad = torch.ones_like(p)
        >>> optimizer.step(); p.data
        tensor([0.5000, 0.5000, 0.5000], dtype=torch.bfloat16)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        hold_steps: int = 0,
        *,
        scale: float | None = None,
        decoupled: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, hold_steps, scale, decoupled)

    def get_avg_delta(self) -> float:
        """Not recorded here.

        Raises:
            NotImplementedError: always; `AdamOffloadOptimizer` records it.
        """
        raise NotImplementedError(
            "AdamOptimizer records no deltas: use AdamOffloadOptimizer(record_delta=True)"
        )

    def get_var_delta(self) -> float:
        """Not recorded here.

        Raises:
            NotImplementedError: always; `AdamOffloadOptimizer` records it.
        """
        raise NotImplementedError(
            "AdamOptimizer records no deltas: use AdamOffloadOptimizer(record_delta=True)"
        )

    def _apply(
        self, group: dict[str, Any], updates: Sequence[Update], *, scale: float, decoupled: bool
    ) -> None:
        options: dict[str, Any] = {
            "lr": float(group["lr"]),
            "betas": group["betas"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "scale": scale,
            "decoupled": decoupled,
            "maximize": group["maximize"],
            "hold_steps": self._hold_steps,
        }
        on_host = [u for u in updates if u.param.device.type == "cpu"]
        on_device = [u for u in updates if _has_kernel(u)]
        elsewhere = [u for u in updates if u.param.device.type != "cpu" and not _has_kernel(u)]
        if on_host:
            with host_ranges(on_host) as ranges:
                _ops.adam_(ranges, **options, torch_sqrt=on_host[0].param.dtype == torch.float32)
        if on_device:
            _ops.adam_(_ranges_of(on_device), **options)
        if elsewhere:
            self._apply_by_torch(group, elsewhere, scale=scale, decoupled=decoupled)

    def _apply_by_torch(
        self, group: dict[str, Any], updates: Sequence[Update], *, scale: float, decoupled: bool
    ) -> None:
        """The same update by torch's own Adam, whatever kernels it has for the device."""
        for held in (True, False):
            now = [u for u in updates if (u.state["step"] <= self._hold_steps) == held]
            if not now:
                continue
            torch_adam(
                [u.state.get(MASTER, u.param) for u in now],
                [u.grad.float() if scale == 1 else u.grad.float() / scale for u in now],
                [u.state["exp_avg"] for u in now],
                [u.state["exp_avg_sq"] for u in now],
                [],
                [torch.tensor(float(u.state["step"] - 1)) for u in now],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=0.0 if held else float(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                decoupled_weight_decay=decoupled,
            )
            for u in now:
                if MASTER in u.state:
                    u.param.copy_(u.state[MASTER])


def _has_kernel(update: Update) -> bool:
    """Whether the core updates it where it lies, on a GPU. fp32 parameters are torch's, whose bits define them."""
    param, grad, state = update
    return (
        param.device.type != "cpu"
        and param.dtype != torch.float32
        and _ops.has_kernels("adam_", param.device.type)
        and grad.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and param.is_contiguous()
        and grad.is_contiguous()
        and state[MASTER].device == grad.device == param.device
        and state["exp_avg"].dtype == torch.float32
    )


def _ranges_of(updates: Sequence[Update]) -> _ops.AdamRanges:
    states = [u.state for u in updates]
    return _ops.AdamRanges(
        weights=[state[MASTER] for state in states],
        rounded=[u.param for u in updates],
        grads=[u.grad for u in updates],
        exp_avgs=[state["exp_avg"] for state in states],
        exp_avg_sqs=[state["exp_avg_sq"] for state in states],
        steps=[state["step"] for state in states],
    )
