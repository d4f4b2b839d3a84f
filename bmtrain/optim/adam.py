"""Adam with its state on the run device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ._adam_base import AdamBase
from ._on_device import OnDevice
from ._updates import Part, Ranges

__all__ = ["AdamOptimizer"]


class AdamOptimizer(AdamBase, OnDevice):
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
        scale: initial loss scale of the optimizer; by default none.
        decoupled: kind of weight decay: True as in AdamW, False added to the gradient (L2), None as scripts of all
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

    def _compute(self, ranges: Ranges, parts: Sequence[Part], **flags: bool) -> Any:
        # Of fp32 parameters only those of the CPU come here.
        return super()._compute(ranges, parts, torch_sqrt=not ranges.rounded, **flags)
