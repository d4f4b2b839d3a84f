"""Methods that fill a parameter with random numbers: ranks that are seeded alike keep parts of one draw."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .full_values import load_full_value

RANDOM = (
    *("normal_", "uniform_", "bernoulli_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_", "random_"),
)


def drawing_whole(name: str) -> Callable[..., torch.Tensor]:
    """Returns the tensor's method ``name`` for distributed parameters."""
    plain: Callable[..., torch.Tensor] = getattr(torch.Tensor, name)

    @functools.wraps(plain)
    def draw(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.is_meta or self._is_full() or (self.requires_grad and torch.is_grad_enabled()):
            return plain(self, *args, **kwargs)
        load_full_value(self, plain(self.new_empty(self._tp_original_shape), *args, **kwargs))
        drawn: torch.Tensor = self
        return drawn

    return draw
