"""A process-wide store of values for debugging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["append", "clear", "extend", "get", "set"]

# Process-wide on purpose: values are stored deep inside a model and read outside of it.
_values: dict[Any, Any] = {}


def set(key: Any, value: Any) -> None:
    """Stores a value; a tensor is stored as a detached copy on the CPU.

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
    """Returns the stored value, or ``default``."""
    return _values.get(key, default)


def append(key: Any, value: Any) -> None:
    """Appends a value to the list stored under ``key``, which is created if there is none.

    Raises:
        TypeError: the stored value is not a list.
    """
    _list(key).append(_plain(value))


def extend(key: Any, values: Iterable[Any]) -> None:
    """Appends several values to the list stored under ``key``, which is created if there is none.

    Raises:
        TypeError: the stored value is not a list.
    """
    _list(key).extend(_plain(value) for value in values)


def clear(key: Any = None) -> None:
    """Removes one key, or all."""
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
