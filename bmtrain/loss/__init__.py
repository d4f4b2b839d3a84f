"""Losses."""

from __future__ import annotations

from .cross_entropy import FusedCrossEntropy
from .linear_cross_entropy import fused_linear_cross_entropy

__all__ = ["FusedCrossEntropy", "fused_linear_cross_entropy"]
