"""Calls that exchange values between ranks."""

from __future__ import annotations

import torch

import bmtrain as bmt

from .kinds import Calls

__all__ = ["collectives"]

X = torch.ones(4)


def collectives() -> Calls:
    """Of `bmtrain.distributed` and `bmtrain.nccl`."""
    comm, d, n = bmt.config["comm"], bmt.distributed, bmt.nccl
    any_comm = ("comm", comm)
    return {
        "all_reduce": (d.all_reduce, {"x": ("tensor", X), "op": ("op", "sum"), "comm": any_comm}),
        "all_gather": (d.all_gather, {"x": ("tensor", X), "comm": any_comm}),
        "broadcast": (d.broadcast, {"src": ("tensor", X), "root": ("rank", 0), "comm": any_comm}),
        "reduce_scatter": (d.reduce_scatter, {"x": ("tensor", X), "op": ("op", "sum"), "comm": any_comm}),
        "gather": (d.gather, {"x": ("tensor", X), "root": ("rank", 0), "comm": any_comm}),
        "scatter": (d.scatter, {"src": ("tensor", X[None]), "root": ("rank", 0), "comm": any_comm}),
        "reduce": (
            d.reduce,
            {"x": ("tensor", X), "root": ("rank", 0), "op": ("op", "sum"), "comm": any_comm},
        ),
        "nccl.reduce": (
            n.reduce,
            {
                "src": ("buffer", X),
                "dst": ("buffer", X.clone()),
                "op": ("op", "sum"),
                "root": ("rank", 0),
                "comm": any_comm,
            },
        ),
        "nccl.allReduce": (
            n.allReduce,
            {"src": ("buffer", X), "dst": ("buffer", X.clone()), "op": ("op", "sum"), "comm": any_comm},
        ),
        "nccl.commCount": (n.commCount, {"comm": any_comm}),
        "nccl.commRank": (n.commRank, {"comm": any_comm}),
        "nccl.commInitRank": (
            lambda world_size, rank: n.commInitRank(n.getUniqueId(), world_size, rank),
            {"world_size": ("positive count", 1), "rank": ("rank", 0)},
        ),
        "nccl.broadcast": (
            n.broadcast,
            {"src": ("buffer", X), "dst": ("buffer", X.clone()), "root": ("rank", 0), "comm": any_comm},
        ),
        "nccl.allGather": (
            n.allGather,
            {"src": ("buffer", X), "dst": ("buffer", X.clone()), "comm": any_comm},
        ),
        "nccl.reduceScatter": (
            n.reduceScatter,
            {"src": ("buffer", X), "dst": ("buffer", X.clone()), "op": ("op", "sum"), "comm": any_comm},
        ),
    }
