"""A constant rate after a linear warm-up."""

from __future__ import annotations

from .warmup import LinearWarmup

__all__ = ["NoDecay"]


class NoDecay(LinearWarmup):
    """Linear warm-up to ``start_lr`` at ``warmup_iter``, then ``start_lr``; ``end_iter`` is not used.

    Args and errors: as :class:`WarmupLRScheduler`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = NoDecay(optimizer, start_lr=1.0, warmup_iter=4, end_iter=-1)
        >>> [scheduler.step(n) or scheduler.current_lr for n in (0, 2, 4, 100)]
        [0.0, 0.5, 1.0, 1.0]
    """

    def get_lr_decay(self, num_iter: int) -> float:
        return self.start_lr
