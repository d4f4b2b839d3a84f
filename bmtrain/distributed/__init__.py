"""Differentiable collectives."""

from __future__ import annotations

from .._ranks.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    recv_activations,
    reduce_scatter,
    send_activations,
)
from .._ranks.rooted import gather, recv, reduce, scatter, send
from . import checkpoint

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
