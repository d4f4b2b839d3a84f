"""Horizontal bars as an SVG picture, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from .._tools.pictures import BLUE, GREY

_LABEL, _BAR, _VALUE = 330, 330, 110  # widths in pixels
_ROW, _TITLE = 20, 34  # heights


class Bar(NamedTuple):
    """One bar; ``is_ours`` colours it."""

    label: str
    value: float
    is_ours: bool


class Chart(NamedTuple):
    """Bars with one scale, from 0 to the largest."""

    title: str
    bars: Sequence[Bar]


def picture(charts: Sequence[Chart], unit: str) -> str:
    """The SVG text of charts below each other.

    Example:
        >>> picture([Chart("speed", [Bar("a", 2.0, True)])], "GB/s").count("<rect")
        2
    """
    parts: list[str] = []
    y = 10
    for chart in charts:
        y += _TITLE
        parts.append(_text(10, y - 10, chart.title, "bold"))
        largest = max((bar.value for bar in chart.bars), default=1.0) or 1.0
        for bar in chart.bars:
            width = _BAR * bar.value / largest
            colour = BLUE if bar.is_ours else GREY
            parts.append(_text(10, y + 14, bar.label))
            parts.append(
                f'<rect x="{_LABEL}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 4}" fill="{colour}"/>'
            )
            parts.append(_text(_LABEL + width + 6, y + 14, f"{bar.value:.1f} {unit}"))
            y += _ROW
    width, height = _LABEL + _BAR + _VALUE, y + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-family="sans-serif" font-size="12" font-weight="{weight}" '
        f'fill="#333333">{escape(text)}</text>'
    )
