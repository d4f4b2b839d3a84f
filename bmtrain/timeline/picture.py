"""One recorded step as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .._base.pictures import BLUE, GREEN, ORANGE, RED, VIOLET, new_figure
from .trace import Span

__all__ = ["draw"]

_COLORS = {
    "forward": BLUE,
    "backward": "#1f4e79",
    "evaluate": "#9ecae9",
    "wait": RED,
    "optimizer": GREEN,
    "gather": ORANGE,
    "reduce": VIOLET,
}
_OUTSIDE = "#e6e6e6"
_MOST_RANKS = 8


def draw(spans: Mapping[int, Sequence[Span]], path: Path, step: int = -1) -> None:
    """Draws three lanes for each rank: gathers, what it does itself, reductions.

    Args:
        spans: rank -> what it recorded; the first eight ranks are drawn.
        path: the PNG to write.
        step: which recorded step; negative ones count from the last.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no such step.
    """
    ranks = sorted(spans)[:_MOST_RANKS]
    figure = new_figure(12, 1.2 + 1.1 * len(ranks), ", or pass --no-png")
    axes = figure.subplots()
    labels, places = [], []
    for number, rank in enumerate(ranks):
        steps = [span for span in spans[rank] if span.kind == "step"]
        if not -len(steps) <= step < len(steps):
            raise ValueError(f"step: expected one of the {len(steps)} recorded steps, got {step}")
        begin, end = steps[step].begin, steps[step].end
        for lane, kinds in enumerate((("gather",), ("compute", "wait", "optimizer"), ("reduce",))):
            row = 4 * number + lane
            labels.append((f"rank {rank}: gathers", "computes, waits", "reductions")[lane])
            places.append(row)
            if lane == 1:  # what no span covers is the rank's own too: head, loss, data, Python
                axes.barh(row, (end - begin) * 1e3, height=0.84, color=_OUTSIDE)
            for span in spans[rank]:
                if span.kind in kinds and span.begin >= begin and span.end <= end:
                    color = _COLORS[span.detail if span.kind == "compute" else span.kind]
                    bar = [((span.begin - begin) * 1e3, max(span.seconds * 1e3, 1e-3))]
                    axes.broken_barh(
                        bar, (row - 0.42, 0.84), facecolors=color, edgecolor="white", linewidth=0.4
                    )
    axes.set_yticks(places, labels)
    axes.set_ylim(places[-1] + 0.7, -0.7)
    axes.set_xlabel("ms since the step began")
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=name) for name, color in _COLORS.items() if name != "evaluate"]
    patches.append(Patch(color=_OUTSIDE, label="outside blocks (head, loss, Python)"))
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
