"""Summaries as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._base.arguments import require_keys

__all__ = ["format_summary"]

_COLUMNS = ("shape", "max", "min", "std", "mean", "grad_std", "grad_mean")
_SHAPE_WIDTH = 20
_NUMBER_WIDTH = 10


def format_summary(summary: Iterable[Mapping[str, Any]]) -> str:
    """A table of the results of :func:`inspect_model` or ``get_summary()``; such lists may be concatenated.

    Args:
        summary: one mapping per line, with the keys ``name, shape, max, min, std, mean, grad_std, grad_mean``.

    Raises:
        TypeError: ``summary`` is not a list of mappings.
        ValueError: a mapping lacks a key.

    Example:
        >>> line = {"name": "w", "shape": (2, 3), "max": 1.0, "min": 0.0, "std": 0.5, "mean": 0.25}
        >>> print(format_summary([{**line, "grad_std": None, "grad_mean": 0.0}]))
         name    shape               max       min       std       mean      grad_std  grad_mean
         w       (2, 3)              1.0000    0.0000    0.5000    0.2500    None      0.0000
    """
    if isinstance(summary, Mapping) or not isinstance(summary, Iterable):
        raise TypeError(
            f"summary: expected a list of mappings, got {summary!r:.80} ({type(summary).__name__})"
        )
    items = list(summary)
    for item in items:
        require_keys("summary", item, ("name", *_COLUMNS))
    name_width = max([len("name"), *(len(item["name"]) for item in items)]) + 4
    widths = (name_width, _SHAPE_WIDTH, *[_NUMBER_WIDTH] * (len(_COLUMNS) - 1))
    columns = ("name", *_COLUMNS)
    rows = [columns, *([item[column] for column in columns] for item in items)]
    return "\n".join("".join(map(_cell, row, widths)) for row in rows)


def _cell(value: Any, width: int) -> str:
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    if isinstance(value, (int, float)) and len(text) >= width and "." not in text[:width]:
        text = f"{value:.2e}"  # digits before the point are not cut off
    return f" {text}"[:width].ljust(width)
