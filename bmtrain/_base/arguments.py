"""Checks of arguments that several functions share, with errors that name the argument."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

import torch


def require_number(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a real number, or a tensor of one element."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number or (isinstance(value, torch.Tensor) and value.numel() == 1)):
        raise TypeError(f"{name}: expected a number, got {value!r:.80} ({type(value).__name__})")


def require_between(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> None:
    """Raises TypeError unless ``value`` is a number, ValueError unless it is in ``[least, most]`` (NaN is not)."""
    require_number(name, value)
    if not least <= value <= most:
        allowed = f"{least} or more" if most == math.inf else f"a number from {least} to {most}"
        raise ValueError(f"{name}: expected {'a number' if least == -math.inf else allowed}, got {value}")


def require_integer(name: str, value: Any, least: int | None = None) -> int:
    """Returns ``value`` as an int; TypeError if it is none, ValueError if it is below ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r:.80} ({type(value).__name__})") from None
    if least is not None and number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def require_tensor(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {value!r:.80} ({type(value).__name__})")


def require_kind(name: str, value: Any, kind: type) -> None:
    """Raises TypeError unless ``value`` is of a class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, got {value!r:.80} ({type(value).__name__})")


def require_callable(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(f"{name}: expected a function, got {value!r:.80} ({type(value).__name__})")


def require_module(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {type(value).__name__}")


def require_text(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {value!r:.80} ({type(value).__name__})")


def require_path(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` names a file or folder."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}: expected a path, got {type(value).__name__}")


def require_dtype(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is None or a floating-point dtype."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name}: expected None or a floating-point dtype, got {value!r:.80}")


def require_keys(name: str, value: Any, keys: Collection[str]) -> None:
    """Raises TypeError unless ``value`` is a dict, ValueError unless it has all ``keys``."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dict, got {value!r:.80} ({type(value).__name__})")
    missing = [key for key in keys if key not in value]
    if missing:
        raise ValueError(
            f"{name}: expected what state_dict() returned, got a dict without {', '.join(missing)}"
        )
