"""Inverse-square-root decay after a linear warm-up."""

from __future__ import annotations

import math

from .warmup import WarmupLRScheduler

__all__ = ["Noam"]


class Noam(WarmupLRScheduler):
    r"""Linear warm-up to :math:`L/\sqrt{w}`, then decay as :math:`L/\sqrt{n}`.

    With ``L = start_lr``, ``w = warmup_iter`` and iteration ``n``: ``L / sqrt(w) * n / w`` while ``n < w``,
    then ``L / sqrt(max(n, 1))``. ``end_iter`` is not used. It is the schedule of
    "Attention Is All You Need" (Vaswani et al. 2017, section 5.3) with ``start_lr`` in place of the
    model-size factor.

    Args and errors: as :class:`WarmupLRScheduler`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = Noam(optimizer, start_lr=1.0, warmup_iter=4, end_iter=None)
        >>> [scheduler.step(n) or scheduler.current_lr for n in (0, 2, 4, 16)]
        [0.0, 0.25, 0.5, 0.25]
    """

    def get_lr_warmup(self, num_iter: int) -> float:
        return self.start_lr / math.sqrt(self.warmup_iter) * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        return self.start_lr / math.sqrt(max(num_iter, 1))
