"""Updates of host memory that continue after the step, and copies of a GPU's gradients for them."""

from __future__ import annotations

from .posting import Overlap, needs_staging

__all__ = ["Overlap", "needs_staging"]
