"""Linear decay to zero after a linear warm-up."""

from __future__ import annotations

from .warmup import LinearWarmup

__all__ = ["Linear"]


class Linear(LinearWarmup):
    """Linear warm-up to ``start_lr`` at ``warmup_iter``, then linear decay to 0 at ``end_iter``.

    Args and errors: as :class:`WarmupLRScheduler`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = Linear(optimizer, start_lr=1.0, warmup_iter=4, end_iter=8)
        >>> [scheduler.step(n) or scheduler.current_lr for n in (0, 2, 4, 6, 8, 10)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    _needs_end_iter = True

    def get_lr_decay(self, num_iter: int) -> float:
        decay: float = self.start_lr * (self.end_iter - num_iter) / max(1, self.end_iter - self.warmup_iter)
        return max(0.0, decay)
