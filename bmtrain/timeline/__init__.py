"""Timelines of a running job: the work and the waits of each rank, block by block."""

from .recorder import Timeline, record, record_from_environment
from .summary import Summary, summarize
from .trace import Span, read_traces, write_trace

__all__ = [
    "Span",
    "Summary",
    "Timeline",
    "read_traces",
    "record",
    "record_from_environment",
    "summarize",
    "write_trace",
]
