"""Exponential decay after a linear warm-up."""

from __future__ import annotations

from typing import Any

from .._base.arguments import require_between, require_keys
from .warmup import LinearWarmup

__all__ = ["Exponential"]


class Exponential(LinearWarmup):
    """Linear warm-up to ``start_lr`` at ``warmup_iter``, then a factor ``gamma`` for each iteration.

    Args:
        gamma: factor between the rates of consecutive iterations after the warm-up. ``end_iter`` is not used.

    Args and errors: as :class:`WarmupLRScheduler`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = Exponential(optimizer, start_lr=1.0, warmup_iter=2, end_iter=-1, gamma=0.5)
        >>> [scheduler.step(n) or scheduler.current_lr for n in (0, 1, 2, 3, 4)]
        [0.0, 0.5, 1.0, 0.5, 0.25]
    """

    def __init__(
        self,
        optimizer: Any,
        start_lr: float,
        warmup_iter: int,
        end_iter: int | None = None,
        num_iter: int = 0,
        gamma: float = 0.95,
    ) -> None:
        require_between("gamma", gamma, 0)
        self.gamma = gamma  # before the base, which computes the first rate
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def get_lr_decay(self, num_iter: int) -> float:
        return max(0.0, self.start_lr * float(self.gamma) ** (num_iter - self.warmup_iter))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "gamma": self.gamma}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        require_keys("state_dict", state_dict, ())
        self.gamma = state_dict.get("gamma", self.gamma)  # files of 1.0.1 and before do not have it
        super().load_state_dict(state_dict)
