"""Style of the plots of commands: colours, and figures without a window."""

from __future__ import annotations

from typing import Any

BLUE, ORANGE, RED, GREEN, VIOLET, GREY = "#4c78a8", "#f2a93b", "#e45756", "#54a24b", "#b279a2", "#bab0ac"
COLORS = (BLUE, ORANGE, RED, GREEN, VIOLET)


def new_figure(width: float, height: float, remedy: str = "") -> Any:
    """An empty matplotlib figure of so many inches.

    Args:
        width: in inches.
        height: likewise.
        remedy: an alternative for users without matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"drawing needs matplotlib: pip install matplotlib{remedy}") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Any) -> None:
    """Removes the frame and draws a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def label_sizes(axes: Any, nbytes: list[int]) -> None:
    """A logarithmic axis of sizes, with a tick for each that is far enough from its neighbours."""
    sizes = sorted(set(nbytes))
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    apart = (sizes[-1] / sizes[0]) ** (1 / 6) if len(sizes) > 6 else 1.0
    shown: list[int] = []
    for size in sizes:
        if not shown or size / shown[-1] >= apart:
            shown.append(size)
    axes.set_xticks(shown, [_size(size) for size in shown], fontsize=8)
    if len(sizes) == 1:
        axes.set_xlim(sizes[0] / 2, sizes[0] * 2)


def _size(nbytes: int) -> str:
    """A size as text: 64 KiB, 32 MiB."""
    power = min((nbytes.bit_length() - 1) // 10, 3)
    return f"{nbytes / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def bars(axes: Any, names: list[str], values: list[float], ours: list[bool], title: str) -> None:
    """Horizontal bars with their values, ours in colour."""
    drawn = axes.barh(names, values, color=[BLUE if own else GREY for own in ours])
    axes.bar_label(drawn, fmt="%.0f", padding=4, fontsize=9)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel(title)
    plain(axes)
    axes.grid(visible=False, axis="y")
