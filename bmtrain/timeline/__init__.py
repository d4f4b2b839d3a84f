"""See while it runs: what each rank did, block by block, and for what it waited."""

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
