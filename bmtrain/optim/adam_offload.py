"""Adam with its state in host memory, computed by the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ._adam_base import AdamBase, Update
from ._host_step import host_ranges

__all__ = ["AdamOffloadOptimizer"]


class AdamOffloadOptimizer(AdamBase):
    """Adam as `AdamOptimizer`, with moments and masters in host memory, to rounding.

    Gradients are read from, and parameters written to, the run device; what takes 12 bytes per parameter stays on
    the host.

    Args:
        params: parameters, or group dicts with ``params`` and any of ``lr, betas, eps, weight_decay, maximize``.
        lr: learning rate.
        betas: decay of the first and of the second moment, in [0, 1).
        eps: added to the denominator after bias correction.
        weight_decay: strength of the weight decay: decoupled for 16-bit parameters, L2 for fp32 ones.
        hold_steps: number of first updates of each parameter that move its moments only.
        record_delta: collect what `get_avg_delta` and `get_var_delta` return.
        scale: initial loss scale that the optimizer is to own; by default none.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = AdamOffloadOptimizer([p], lr=0.5, record_delta=True)
        >>> p.grad = torch.tensor([1.0, -1.0])
        >>> optimizer.step(); p.data, optimizer.get_avg_delta()
        (tensor([-0.5000,  0.5000]), 0.0)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        hold_steps: int = 0,
        record_delta: bool = False,
        *,
        scale: float | None = None,
    ) -> None:
        self._record_delta = bool(record_delta)
        self._deltas = _Deltas()
        super().__init__(params, lr, betas, eps, weight_decay, hold_steps, scale)

    def get_avg_delta(self) -> float:
        """Return the mean of ``u + weight_decay * w`` over all elements this rank updated in the last step.

        ``u`` is the update before the learning rate, ``w`` the weight before the step. 0 if nothing was recorded.
        """
        return self._deltas.mean

    def get_var_delta(self) -> float:
        """Return the variance of what `get_avg_delta` is the mean of (divided by the number of elements)."""
        return self._deltas.variance

    def has_master(self, p: Tensor) -> bool:
        """Whether the state of ``p`` has an fp32 copy of its value: always."""
        return True

    def shares_master(self, p: Tensor) -> bool:
        """Whether that copy is the parameter itself: an fp32 parameter in host memory needs no second one."""
        return p.dtype == torch.float32 and p.device.type == "cpu" and p.is_contiguous()

    def _state_device(self, p: Tensor) -> torch.device:
        return torch.device("cpu")

    def _start_step(self) -> None:
        self._deltas = _Deltas()

    def _apply(
        self, group: dict[str, Any], updates: Sequence[Update], *, scale: float, decoupled: bool
    ) -> None:
        with host_ranges(updates) as ranges:
            sums = _ops.adam_(
                ranges,
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                scale=scale,
                decoupled=decoupled,
                maximize=group["maximize"],
                hold_steps=self._hold_steps,
                with_delta=self._record_delta,
            )
        if self._record_delta:
            self._deltas.add(sums, sum(u.param.numel() for u in updates))

    def _own_attributes(self) -> tuple[str, ...]:
        return (*super()._own_attributes(), "_record_delta", "_deltas")


class _Deltas:
    """Sums of one step, from which mean and variance come."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.squares = 0.0

    def add(self, sums: _ops.DeltaSums, count: int) -> None:
        self.count += count
        self.total += sums.total
        self.squares += sums.squares

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        return max(self.squares / self.count - self.mean**2, 0.0) if self.count else 0.0
