"""Legacy path of the collectives, with NCCL's raw calls under their old names."""

from __future__ import annotations

from .._ranks.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    recv_activations,
    reduce_scatter,
    send_activations,
)
from ..nccl import allGather as ncclAllGather
from ..nccl import allReduce as ncclAllReduce
from ..nccl import broadcast as ncclBroadcast
from ..nccl import recv as ncclRecv
from ..nccl import reduceScatter as ncclReduceScatter
from ..nccl import send as ncclSend

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "ncclAllGather",
    "ncclAllReduce",
    "ncclBroadcast",
    "ncclRecv",
    "ncclReduceScatter",
    "ncclSend",
    "recv_activations",
    "reduce_scatter",
    "send_activations",
]
