"""Adam with its state on the run device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._narrow import read_state_dtype
from ._sharded import ShardedOptimizer
from .formulas import Adam
from .places import OnDevice

__all__ = ["AdamOptimizer"]


class AdamOptimizer(ShardedOptimizer):
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
        state_dtype: of the moments, as for `AdamOffloadOptimizer`. A build without CUDA kernels updates narrow moments
            on a GPU by operations of torch, with temporary fp32 copies of one parameter's moments.

    Raises:
        TypeError: ``state_dtype`` is neither fp32, nor bf16, nor int8.
        ValueError: an argument is out of its range.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = AdamOptimizer([p], lr=0.5)
        >>> p.grad = torch.ones_like(p)
        >>> optimizer.step(); p.data
        tensor([0.5000, 0.5000, 0.5000], dtype=torch.bfloat16)
    """

    _formula_class, _place_class = Adam, OnDevice

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
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        formula = {"decoupled": decoupled, "hold_steps": hold_steps}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": False}
        place = {"state_dtype": read_state_dtype(state_dtype)}
        super().__init__(params, defaults, formula=formula, place=place, scale=scale)

    def get_avg_delta(self) -> float:
        """Not recorded here.

        Raises:
            NotImplementedError: always; `AdamOffloadOptimizer` records it.
        """
        raise NotImplementedError(
            "AdamOptimizer records no deltas: use AdamOffloadOptimizer(record_delta=True)"
        )

    get_var_delta = get_avg_delta
