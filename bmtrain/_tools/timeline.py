"""``bmtrain timeline DIR``: summary of the time of recorded steps.

Record with BMTRAIN_TIMELINE=DIR in the environment of a run (BMTRAIN_TIMELINE_STEPS=N steps, 10 if not set), or with
bmtrain.timeline.record(directory=DIR). This prints a summary, and writes DIR/trace.json with all ranks, for
https://ui.perfetto.dev or chrome://tracing, and DIR/timeline.png with one step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..timeline.summary import summarize
from ..timeline.trace import Span, merge, read_traces
from .pictures import BLUE, GREEN, ORANGE, RED, VIOLET, new_figure

_COLORS = {
    "forward": BLUE,
    "backward": "#1f4e79",
    "evaluate": "#9ecae9",
    "wait": RED,
    "optimizer": GREEN,
    "gather": ORANGE,
    "reduce": VIOLET,
    "read": "#17a2a2",
    "write": "#8c564b",
}
_LANES = {
    "gathers": ("gather",),
    "computes, waits": ("compute", "wait", "optimizer"),
    "reductions": ("reduce",),
}
_DRIVES = {"reads": ("read",), "writes": ("write",)}
_OUTSIDE = "#e6e6e6"
_MOST_RANKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``timeline``."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the recording: BMTRAIN_TIMELINE of the run"
    )
    parser.add_argument("--step", type=int, default=-1, help="the step drawn (default: the last)")
    parser.add_argument("--no-png", action="store_true", help="draw nothing")


def run(arguments: argparse.Namespace) -> int:
    """Prints the summary, writes the merged trace and the picture. Returns 2 if there is nothing to read."""
    directory: Path = arguments.directory
    try:
        spans = read_traces(directory)
        summary = summarize(spans)
        trace = directory / "trace.json"
        trace.write_text(json.dumps(merge(spans)))
        written, missing = [str(trace)], ""
        if not arguments.no_png:
            picture = directory / "timeline.png"
            try:
                _draw(spans, picture, arguments.step)
                written.append(str(picture))
            except ImportError as error:
                missing = str(error)
    except (ValueError, OSError) as error:
        print(f"bmtrain timeline: {error}", file=sys.stderr)
        return 2
    print(summary)
    print(f"written: {', '.join(written)}")
    if missing:
        print(f"bmtrain timeline: no picture: {missing}", file=sys.stderr)
    return 0


def _draw(spans: Mapping[int, Sequence[Span]], path: Path, step: int = -1) -> None:
    """Draws lanes for each rank: gathers, computation, reductions, and what drives do.

    Args:
        spans: rank -> its recorded spans; the first eight ranks are drawn.
        path: the PNG to write.
        step: which recorded step; negative ones count from the last.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no such step.
    """
    ranks = sorted(spans)[:_MOST_RANKS]
    kinds_found = {span.kind for rank in ranks for span in spans[rank]}
    lanes = {**_LANES, **(_DRIVES if kinds_found & {"read", "write"} else {})}
    figure = new_figure(12, 1.2 + 0.275 * (len(lanes) + 1) * len(ranks), ", or pass --no-png")
    axes = figure.subplots()
    labels, places = [], []
    for number, rank in enumerate(ranks):
        steps = [span for span in spans[rank] if span.kind == "step"]
        if not -len(steps) <= step < len(steps):
            raise ValueError(f"step: expected one of the {len(steps)} recorded steps, got {step}")
        begin, end = steps[step].begin, steps[step].end
        for lane, (label, kinds) in enumerate(lanes.items()):
            row = (len(lanes) + 1) * number + lane
            labels.append(label if lane else f"rank {rank}: {label}")
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

    hidden = {"evaluate", *({"read", "write"} - kinds_found)}
    patches = [Patch(color=color, label=name) for name, color in _COLORS.items() if name not in hidden]
    patches.append(Patch(color=_OUTSIDE, label="outside blocks (head, loss, Python)"))
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
