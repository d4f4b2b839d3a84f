"""Cosine decay after a linear warm-up."""

from __future__ import annotations

import math

from .warmup import LinearWarmup

__all__ = ["Cosine"]


class Cosine(LinearWarmup):
    """Linear warm-up to ``start_lr`` at ``warmup_iter``, then half a cosine wave down to 0 at ``end_iter``.

    The wave continues after ``end_iter`` (the rate rises again), so training is meant to stop there. Without
    restarts, it is the schedule of SGDR (Loshchilov and Hutter 2017, equation 5).

    Args and errors: as :class:`WarmupLRScheduler`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = Cosine(optimizer, start_lr=1.0, warmup_iter=4, end_iter=8)
        >>> [round(scheduler.step(n) or scheduler.current_lr, 3) for n in (0, 2, 4, 6, 8)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    _needs_end_iter = True

    def get_lr_decay(self, num_iter: int) -> float:
        angle = math.pi * (num_iter - self.warmup_iter) / max(1, self.end_iter - self.warmup_iter)
        return max(0.0, self.start_lr * 0.5 * (1.0 + math.cos(angle)))
