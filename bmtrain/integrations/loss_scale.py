"""Loss scale of trainers in fp16, for shards."""

from __future__ import annotations

from typing import Any

import torch

from ..optim._grad_stats import check_overflow, multiply_gradients, parameters_of

__all__ = ["SharedScaler"]


class SharedScaler:
    """Takes the place of a ``torch.amp.GradScaler``, whose scale and whose skipped steps differ between ranks.

    A step in which a gradient of any rank is inf or NaN is skipped by all ranks, as by
    :class:`~bmtrain.optim.OptimManager`. Scales and states are as of a ``GradScaler`` in one process.

    Args:
        scaler: the trainer's scaler, not used yet.
    """

    def __init__(self, scaler: Any) -> None:
        self._state = {  # the names in states of GradScaler
            "scale": scaler.get_scale(),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": 0,
        }
        # id of an optimizer whose gradients are unscaled -> whether it is to skip
        self._overflows: dict[int, bool] = {}

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return float(self._state["scale"])

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss to backpropagate."""
        return loss * self.get_scale()

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of ``optimizer`` by the scale. Collective.

        Raises:
            RuntimeError: they have been divided since the last :meth:`update`.
            ValueError: a parameter is in fp16, so that its gradient underflows without the scale.
        """
        if id(optimizer) in self._overflows:
            raise RuntimeError("unscale_: expected one call for each optimizer before update(), got another")
        parameters = list(parameters_of(optimizer.param_groups))
        if any(p.dtype == torch.float16 for p in parameters):
            raise ValueError(
                "fp16: expected parameters in float32, which autocast converts, got parameters in float16: load "
                "the model with dtype=torch.float32"
            )
        self._overflows[id(optimizer)] = check_overflow(optimizer.param_groups)
        multiply_gradients(parameters, torch.tensor(1 / self.get_scale(), dtype=torch.float64))

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps ``optimizer``, or nothing if a gradient of any rank overflowed. Collective."""
        if id(optimizer) not in self._overflows:
            self.unscale_(optimizer)
        return None if self._overflows[id(optimizer)] else optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """Lowers the scale after a step that was skipped, and raises it after many that were not."""
        state = self._state
        state["_growth_tracker"] += 1
        if any(self._overflows.values()):
            state["scale"] *= state["backoff_factor"]
            state["_growth_tracker"] = 0
        elif state["_growth_tracker"] == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            state["_growth_tracker"] = 0
        self._overflows.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns a state that a ``GradScaler`` loads."""
        return dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, also of a ``GradScaler``."""
        self._state = {name: state_dict[name] for name in self._state}
