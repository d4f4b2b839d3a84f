"""Adam with its state in host memory, computed by the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._base.arguments import require_number
from ._narrow import read_state_dtype
from ._sharded import OffloadOptimizer
from .formulas import Adam
from .formulas.adam import Deltas
from .places import OnHost

__all__ = ["AdamOffloadOptimizer"]

_Deltas = Deltas  # by its name in pickles of versions before


class AdamOffloadOptimizer(OffloadOptimizer):
    """Adam as `AdamOptimizer`, with moments and masters in host memory, to rounding.

    Gradients are read from, and parameters written to, the run device; the state of 12 bytes per parameter stays on
    the host, except for the ``fraction`` of blocks that fit on the device. Gradients of a GPU are copied to the host
    inside backward, into page-locked memory of up to a quarter of the host's free memory.

    `step` returns before the parameters are updated: workers update them in the order of ``params``, and an access to
    a parameter waits for its update. A block waits for its own parameters when it is next called, and so does every
    other access to a distributed parameter, its gradient or the optimizer's state, so that the results are
    bit-identical to ``overlap=False`` and an unfinished update is never seen. (Plain parameters, and parameters with
    outside references to a detached copy, a gradient or a state, are updated within `step`.)

    Args:
        params: parameters, or group dicts with ``params`` and any of ``lr, betas, eps, weight_decay, maximize``.
        lr: learning rate.
        betas: decay of the first and of the second moment, in [0, 1).
        eps: added to the denominator after bias correction.
        weight_decay: strength of the weight decay.
        hold_steps: number of first updates of each parameter that move its moments only.
        record_delta: collect the results of `get_avg_delta` and `get_var_delta`; updates do not overlap then.
        scale: initial loss scale of the optimizer; by default none.
        decoupled: kind of weight decay: True as in AdamW, False added to the gradient (L2), None as scripts of all
            versions have it: decoupled for 16-bit parameters, L2 for fp32 ones.
        overlap: let updates continue after `step`.
        fraction: share of the blocks, the first ones, whose state stays on the run device, where they are updated at
            once, to the same bits; 1 takes parameters outside blocks too. None chooses at the first step: on a GPU as
            many as its free memory holds, on CPU ranks none.
        state_dtype: of the moments: with ``torch.bfloat16`` or ``"bfloat16"`` they take 4 bytes per parameter instead
            of 8, with ``torch.int8`` or ``"int8"`` 2.06 (4 in parameters outside Blocks): 8-bit floats that share an
            exponent in blocks of 32 (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022; Xi et al.,
            "COAT", 2024). Both are rounded to either neighbour at random, so that moments are right on the average.
            Masters stay fp32.

    Raises:
        TypeError: ``state_dtype`` is neither fp32, nor bf16, nor int8.
        ValueError: an argument is out of its range, or deltas are to be recorded with moments in 8 bits.
        RuntimeError: from the next call that waits for it, naming the block: an update in the background failed.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = AdamOffloadOptimizer([p], lr=0.5, record_delta=True)
        >>> p.grad = torch.tensor([1.0, -1.0])
        >>> optimizer.step(); p.data, optimizer.get_avg_delta()
        (tensor([-0.5000,  0.5000]), 0.0)
    """

    _formula_class, _place_class = Adam, OnHost

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
        decoupled: bool | None = None,
        overlap: bool = True,
        fraction: float | None = None,
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        moments = read_state_dtype(state_dtype)
        if record_delta and moments is torch.int8:
            raise ValueError("record_delta: expected False with moments in 8 bits, got True")
        if fraction is not None:
            require_number("fraction", fraction)
            if not 0 <= fraction <= 1:
                raise ValueError(f"fraction: expected a number from 0 to 1, or None, got {fraction}")
        formula = {"decoupled": decoupled, "hold_steps": hold_steps, "record_delta": bool(record_delta)}
        overlaps = bool(overlap) and not record_delta
        place = {"overlaps": overlaps, "fraction": fraction, "state_dtype": moments}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": False}
        super().__init__(params, defaults, formula=formula, place=place, scale=scale)

    def get_avg_delta(self) -> float:
        """Returns the mean of ``u + weight_decay * w`` over all elements this rank updated in the last step.

        ``u`` is the update before the learning rate, ``w`` the weight before the step. 0 if nothing was recorded.
        """
        self._place.finish()
        return float(self._formula.deltas.mean)

    def get_var_delta(self) -> float:
        """Returns the variance of the values that `get_avg_delta` averages (divided by the number of elements)."""
        self._place.finish()
        return float(self._formula.deltas.variance)
