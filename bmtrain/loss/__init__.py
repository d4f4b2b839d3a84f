"""Losses."""

from __future__ import annotations

from .cross_entropy import FusedCrossEntropy
from .linear_cross_entropy import fused_linear_cross_entropy
from .router import load_balancing_loss, router_z_loss

__all__ = ["FusedCrossEntropy", "fused_linear_cross_entropy", "load_balancing_loss", "router_z_loss"]
