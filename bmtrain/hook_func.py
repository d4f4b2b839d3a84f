"""Import path of earlier releases; blocks need no hooks any more."""

from __future__ import annotations

__all__: list[str] = []
