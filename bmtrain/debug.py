"""A scratch store of this process, to look at values from elsewhere in a program while debugging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["append", "clear", "extend", "get", "set"]

# Process-wide on purpose: what is stored deep inside a model is looked at from outside it.
_values: dict[Any, Any] = {}


def set(key: Any, value: Any) -> None:
    """Store a value; a tensor is stored as a detached copy on the CPU.

    Example:
        >>> set("scores", [1])
        >>> append("scores", 2)
        >>> extend("scores", [3, 4])
        >>> get("scores")
        [1, 2, 3, 4]
        >>> clear()
        >>> get("scores", "nothing")
        'nothing'
    """
    _values[key] = _plain(value)


def get(key: Any, default: Any = None) -> Any:
    """The stored value, or ``default``."""
    return _values.get(key, default)


def append(key: Any, value: Any) -> None:
    """Add one value to the list stored under ``key``, which is made if there is none.

    Raises:
        TypeError: what is stored there is no list.
    """
    _list(key).append(_plain(value))


def extend(key: Any, values: Iterable[Any]) -> None:
    """Add several values to the list stored under ``key``, which is made if there is none.

    Raises:
        TypeError: what is stored there is no list.
    """
    _list(key).extend(_plain(value) for value in values)


def clear(key: Any = None) -> None:
    """Forget one key, or everything."""
    if key is None:
        _values.clear()
    else:
        _values.pop(key, None)


def _plain(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _list(key: Any) -> list[Any]:
    stored = _values.setdefault(key, [])
    if not isinstance(stored, list):
        raise TypeError(f"key {key!r}: expected a list stored there, got {type(stored).__name__}")
    return stored
