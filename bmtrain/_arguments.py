"""Checks of arguments that several functions have, with errors that name them."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch

__all__ = ["require_integer", "require_number", "require_tensor"]


def require_number(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a real number, or a tensor of one element."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number or (isinstance(value, torch.Tensor) and value.numel() == 1)):
        raise TypeError(f"{name}: expected a number, got {value!r:.80} ({type(value).__name__})")


def require_integer(name: str, value: Any, least: int) -> int:
    """Return ``value`` as an int.

    Raises:
        TypeError: it is none.
        ValueError: it is below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r:.80} ({type(value).__name__})") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def require_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {value!r:.80} ({type(value).__name__})")
