"""Collectives that autograd can differentiate."""

from __future__ import annotations

from . import checkpoint
from .ops import all_gather, all_reduce, broadcast, recv_activations, reduce_scatter, send_activations
from .rooted import gather, recv, reduce, scatter, send

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "checkpoint",
    "gather",
    "recv",
    "recv_activations",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "send_activations",
]
