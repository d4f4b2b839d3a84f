"""Adam with its state in host memory, computed by the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ._adam_base import AdamBase, Update
from ._host_step import host_ranges
from ._overlap import Overlap, Part

__all__ = ["AdamOffloadOptimizer"]


class AdamOffloadOptimizer(AdamBase):
    """Adam as `AdamOptimizer`, with moments and masters in host memory, to rounding.

    Gradients are read from, and parameters written to, the run device; what takes 12 bytes per parameter stays on
    the host.

    On CPU ranks `step` returns before the parameters are updated: workers go through them in the order of
    ``params``, and whoever needs one waits for it. A block waits for its own parameters when it is next called, and
    so does every other access to a distributed parameter, its gradient or the optimizer's state, so that the bits
    are those of ``overlap=False`` and an unfinished update is never seen. (Plain parameters, and those of which a
    detached copy, a gradient or a state is held by somebody else, are updated within `step`.)

    Args:
        params: parameters, or group dicts with ``params`` and any of ``lr, betas, eps, weight_decay, maximize``.
        lr: learning rate.
        betas: decay of the first and of the second moment, in [0, 1).
        eps: added to the denominator after bias correction.
        weight_decay: strength of the weight decay.
        hold_steps: number of first updates of each parameter that move its moments only.
        record_delta: collect what `get_avg_delta` and `get_var_delta` return; updates do not overlap then.
        scale: initial loss scale that the optimizer is to own; by default none.
        decoupled: how weights decay: True as in AdamW, False added to the gradient (L2), None as scripts of all
            versions have it: decoupled for 16-bit parameters, L2 for fp32 ones.
        overlap: let updates go on after `step`.
        state_dtype: of the moments; ``torch.bfloat16`` takes 4 bytes per parameter less and is rounded to either
            neighbour at random, so that moments are right on the average. Masters stay fp32.

    Raises:
        TypeError: ``state_dtype`` is neither fp32 nor bf16.
        ValueError: an argument is out of its range.
        RuntimeError: from the next call that waits for it, naming the block: an update in the background failed.

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
        decoupled: bool | None = None,
        overlap: bool = True,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"state_dtype: expected torch.float32 or torch.bfloat16, got {state_dtype!r}")
        self._state_dtype = state_dtype
        self._record_delta = bool(record_delta)
        self._deltas = _Deltas()
        self._overlaps = bool(overlap)
        self._start_overlap()
        super().__init__(params, lr, betas, eps, weight_decay, hold_steps, scale, decoupled)

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

    # ---- overlap

    def _start_overlap(self) -> None:
        self._overlap = Overlap()
        self._parts: list[Part] = []  # of the step that runs now

    @property
    def state(self) -> Any:
        """State by parameter. Whoever reads it waits for the updates under way."""
        self._overlap.pending.finish()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_overlap" not in self.__dict__:  # a copy
            self._start_overlap()
        super().__setstate__(state)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill all gradients with zeros, or set them to None. Those in use are zeroed once they have been used."""
        pending = [update for update in self._overlap.pending if not update.is_finished]
        if not pending:
            super().zero_grad(set_to_none)
            return
        later: set[int] = set()
        if not set_to_none:
            for update in pending:
                if update.zero_gradients_afterwards():
                    later.update(map(id, update.parameters))
        with torch._C.DisableTorchFunctionSubclass():  # so that nothing waits here
            for p in (p for group in self.param_groups for p in group["params"] if id(p) not in later):
                if set_to_none:
                    p.grad = None
                    continue
                if (waiting := p.__dict__.get("_pending")) is not None:
                    waiting.finish()
                _zero(p.grad)

    # ---- the step

    def _start_step(self) -> None:
        self._overlap.pending.finish()
        self._deltas = _Deltas()
        self._parts = []

    def _apply(
        self, group: dict[str, Any], updates: Sequence[Update], *, scale: float, decoupled: bool
    ) -> None:
        options = {
            "lr": float(group["lr"]),
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "scale": scale,
            "decoupled": decoupled,
            "maximize": group["maximize"],
            "hold_steps": self._hold_steps,
        }
        part = Part(list(updates), options)
        if self._overlaps and not self._record_delta:
            self._parts.append(part)
        else:
            self._compute(part)

    def _end_step(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            for part in self._overlap.post(parts, self.__dict__["state"]):
                self._compute(part)

    def _compute(self, part: Part) -> None:
        options = {name: value for name, value in part.options.items() if not name.startswith("beta")}
        betas = (part.options["beta1"], part.options["beta2"])
        with host_ranges(part.updates) as ranges:
            sums = _ops.adam_(ranges, betas=betas, **options, with_delta=self._record_delta)
        if self._record_delta:
            self._deltas.add(sums, sum(u.param.numel() for u in part.updates))

    def _note_new_state(self, parameters: Sequence[Tensor]) -> None:
        self._overlap.arenas.note(parameters, self.state)

    def _own_attributes(self) -> tuple[str, ...]:
        return (*super()._own_attributes(), "_record_delta", "_deltas", "_overlaps", "_state_dtype")


def _zero(grad: Tensor | None) -> None:
    if grad is not None:
        if grad.grad_fn is not None:
            grad.detach_()
        else:
            grad.requires_grad_(False)
        grad.zero_()


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
