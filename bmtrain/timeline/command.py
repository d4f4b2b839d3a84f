"""``bmtrain timeline DIR``: summary of the time of recorded steps.

Record with BMTRAIN_TIMELINE=DIR in the environment of a run (BMTRAIN_TIMELINE_STEPS=N steps, 10 if not set), or with
bmtrain.timeline.record(directory=DIR). This prints a summary, and writes DIR/trace.json with all ranks, for
https://ui.perfetto.dev or chrome://tracing, and DIR/timeline.png with one step.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .picture import draw
from .summary import summarize
from .trace import merge, read_traces

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``timeline``."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the recording: BMTRAIN_TIMELINE of the run"
    )
    parser.add_argument(
        "--step", type=int, default=-1, metavar="N", help="the step drawn (default: the last)"
    )
    parser.add_argument("--no-png", action="store_true", help="draw nothing")


def run(arguments: argparse.Namespace) -> int:
    """Prints the summary, writes the merged trace and the picture. Returns 2 if there is nothing to read."""
    directory: Path = arguments.directory
    try:
        spans = read_traces(directory)
        summary = summarize(spans)
        trace = directory / "trace.json"
        trace.write_text(json.dumps(merge(spans)))
        written = [str(trace)]
        if not arguments.no_png:
            picture = directory / "timeline.png"
            draw(spans, picture, arguments.step)
            written.append(str(picture))
    except (ValueError, OSError, ImportError) as error:
        print(f"bmtrain timeline: {error}", file=sys.stderr)
        return 2
    print(summary)
    print(f"written: {', '.join(written)}")
    return 0
