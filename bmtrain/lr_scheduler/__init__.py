"""Learning-rate schedules: a linear or inverse-square-root warm-up, then a decay."""

from __future__ import annotations

from typing import Any

from .cosine import Cosine
from .exponential import Exponential
from .linear import Linear
from .no_decay import NoDecay
from .noam import Noam
from .warmup import WarmupLRScheduler

__all__ = ["Cosine", "Exponential", "Linear", "NoDecay", "Noam", "WarmupLRScheduler"]


def __getattr__(name: str) -> Any:
    if name == "WarmupLRSchduler":  # spelling of 0.1.1
        from . import warmup

        return warmup.__getattr__(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
