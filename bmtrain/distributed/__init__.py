"""Collectives that autograd can differentiate."""

from __future__ import annotations

from .ops import all_gather, all_reduce, broadcast, recv_activations, reduce_scatter, send_activations

__all__ = ["all_gather", "all_reduce", "broadcast", "recv_activations", "reduce_scatter", "send_activations"]
