"""Losses."""

from __future__ import annotations

from .cross_entropy import FusedCrossEntropy

__all__ = ["FusedCrossEntropy"]
