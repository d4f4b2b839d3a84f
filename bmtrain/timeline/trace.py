"""Recorded spans, and the file format in which trace viewers read them.

The format is Chrome's (Google, "Trace Event Format", 2016), which Perfetto reads as well: complete events (``X``) for
the rank's own work, pairs of asynchronous events (``b``, ``e``) for collectives and transfers of drives, which overlap
with it and with each other.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["KINDS", "Span", "merge", "read_traces", "trace_events", "write_trace"]

#: Kind of span -> its row in a viewer. The first four are the rank's own work, the others run beside it.
KINDS = {"compute": 1, "wait": 2, "optimizer": 3, "step": 0, "gather": 4, "reduce": 5, "read": 6, "write": 7}
_BESIDE = ("gather", "reduce", "read", "write")


class Span(NamedTuple):
    """An interval of time on one rank.

    Args:
        kind: ``compute``, ``wait``, ``optimizer``, ``step``, ``gather``, ``reduce``; ``read`` or ``write`` of a drive,
            until the rank has noticed its end.
        name: the block, or another description.
        begin: seconds since the recording began.
        end: the same.
        detail: ``forward``, ``backward``, ``evaluate``; of a wait, its reason: ``gather``, ``reduce``,
            ``stage`` (of a pipeline), ``update``, ``copies`` (for lost ranks), or ``owner`` (of a whole matrix, to or
            from it).
    """

    kind: str
    name: str
    begin: float
    end: float
    detail: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def trace_events(spans: Iterable[Span], rank: int) -> Iterator[dict[str, Any]]:
    """One rank's spans as trace events; times are in microseconds."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    for kind, row in KINDS.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": kind}}
    for number, span in enumerate(spans):
        event = {"name": span.name, "cat": span.kind, "pid": rank, "tid": KINDS[span.kind]}
        event["args"] = {"detail": span.detail}
        begin, end = span.begin * 1e6, span.end * 1e6
        if span.kind in _BESIDE:
            yield {**event, "ph": "b", "id": number, "ts": begin}
            yield {**event, "ph": "e", "id": number, "ts": end}
        else:
            yield {**event, "ph": "X", "ts": begin, "dur": end - begin}


def make_folder(directory: Path) -> None:
    """Makes the folder of a recording before it begins, rather than fail at its end.

    Raises:
        OSError: it cannot be made or written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


def write_trace(directory: Path, spans: Sequence[Span], rank: int, began: float = 0.0) -> None:
    """Writes one rank's spans as a file that trace viewers open.

    Args:
        directory: made if it is missing.
        spans: the recorded spans.
        rank: the rank that recorded them.
        began: the start in seconds since the epoch; it aligns the ranks' times.
    """
    directory.mkdir(parents=True, exist_ok=True)
    events = list(trace_events(spans, rank))
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"rank": rank, "began": began}}
    (directory / f"rank{rank:05d}.json").write_text(json.dumps(content))


def merge(spans: Mapping[int, Iterable[Span]]) -> dict[str, Any]:
    """The spans of all ranks as one trace for a viewer."""
    events = [event for rank, recorded in spans.items() for event in trace_events(recorded, rank)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def read_traces(directory: Path) -> dict[int, list[Span]]:
    """The spans of every rank that has written into ``directory``, in seconds since the first of them began.

    Raises:
        ValueError: there is no trace, or one of another program.
    """
    found: dict[int, tuple[float, list[Span]]] = {}
    for path in _files(directory):
        try:
            content = json.loads(path.read_text())
            about = content["otherData"]
            found[about["rank"]] = float(about["began"]), list(_spans(content["traceEvents"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a timeline of bmtrain ({type(error).__name__})") from None
    first = min(began for began, _ in found.values())
    return {rank: _later(spans, began - first) for rank, (began, spans) in sorted(found.items())}


def _later(spans: Iterable[Span], seconds: float) -> list[Span]:
    return [span._replace(begin=span.begin + seconds, end=span.end + seconds) for span in spans]


def _files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("rank*.json"))
    if not files:
        raise ValueError(
            f"{directory}: expected files rank*.json, which BMTRAIN_TIMELINE writes; there are none"
        )
    return files


def _spans(events: Iterable[dict[str, Any]]) -> Iterator[Span]:
    begun: dict[int, float] = {}
    for event in events:
        detail = event["args"].get("detail", "")
        if event["ph"] == "X":
            begin = event["ts"] / 1e6
            yield Span(event["cat"], event["name"], begin, begin + event["dur"] / 1e6, detail)
        elif event["ph"] == "b":
            begun[event["id"]] = event["ts"] / 1e6
        elif event["ph"] == "e":
            yield Span(event["cat"], event["name"], begun.pop(event["id"]), event["ts"] / 1e6, detail)
