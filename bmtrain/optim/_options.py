"""Checks of the numbers that optimizers are given."""

from __future__ import annotations

from typing import Any

__all__ = ["check_betas", "check_not_negative"]


def check_not_negative(options: dict[str, Any], *names: str) -> None:
    """Raise ValueError unless all of ``names`` are 0 or more."""
    for name in names:
        if not options[name] >= 0:
            raise ValueError(f"{name}: expected 0 or more, got {options[name]}")


def check_betas(options: dict[str, Any]) -> None:
    """Raise ValueError unless ``betas`` are two numbers in [0, 1)."""
    betas = options["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: expected two numbers from 0 up to but not including 1, got {betas}")
