"""The storage of a Block in the core, what gives ranks of a host their memory, and walks through a graph."""

from __future__ import annotations

from typing import Any

import torch

import bmtrain as bmt
from bmtrain import _C

from .kinds import Calls

__all__ = ["storage"]

DTYPE, DEVICE = torch.float32, torch.device("cpu")


def _group(device: str = "cpu") -> _C.ShardedBuffer:
    """A layer of 3 x 2."""
    return _C.ShardedBuffer(**{name: value for name, (_, value) in _arguments(device).items()})


def _arguments(device: str = "cpu") -> dict[str, tuple[str, Any]]:
    comm = bmt.config["comm"]
    return {
        "label": ("text", "block 1"),
        "parameters": ("stored parameters", [torch.nn.Parameter(torch.ones(3, 2, device=device))]),
        "names": ("names", ["weight"]),
        "shapes": ("shapes", [[3, 2]]),
        "gather_comm": ("a comm", comm),
        "reduce_comm": ("a comm", comm),
        "pool": ("a pool", _C.BufferPool(2, False)),
        "dtype": ("a dtype", DTYPE),
        "device": ("a device", DEVICE),
        "replica_comm": ("comm", None),
        "compute_dtype": ("optional dtype", DTYPE),
        "reduce_dtype": ("optional dtype", DTYPE),
        "gather_dtype": ("optional dtype", DTYPE),
    }


def storage() -> Calls:
    """`ShardedBuffer` and what it works with."""
    group, arguments = _group(), _arguments()
    index = {"index": ("index", 0)}

    def begun() -> _C.ShardedBuffer:
        made = _group()
        made.attach()
        return made

    def in_backward() -> _C.ShardedBuffer:
        made = begun()
        made.begin_backward([True])
        return made

    def add_gradient(sum: Any) -> None:
        made = in_backward()
        made.start_reduce()
        made.finish_reduce()
        made.add_gradient(sum)

    def finish_reduce(tree: Any) -> None:
        made = in_backward()
        made.start_reduce()
        made.finish_reduce(tree)

    return {
        "ShardedBuffer": (
            lambda *values: _C.ShardedBuffer(**dict(zip(arguments, values, strict=True))),
            arguments,
        ),
        "ShardedBuffer.local_view": (group.local_view, index),
        "ShardedBuffer.make_shard": (lambda index: _group("meta").make_shard(index), index),
        "ShardedBuffer.set_hooks": (group.set_hooks, {**index, "hooks": ("a dict", {})}),
        "ShardedBuffer.owns_storage": (group.owns_storage, {"tensor": ("a tensor", torch.ones(2))}),
        "ShardedBuffer.start_gather": (
            lambda in_place: _group().start_gather(in_place),
            {"in_place": ("flag", False)},
        ),
        "ShardedBuffer.begin_backward": (
            lambda trains: begun().begin_backward(trains),
            {"trains": ("truths", [True])},
        ),
        "ShardedBuffer.join_backward": (
            lambda trains: in_backward().join_backward(trains),
            {"trains": ("truths", [True])},
        ),
        "ShardedBuffer.drop_gradients": (
            lambda which: in_backward().drop_gradients(which),
            {"which": ("truths", [True])},
        ),
        "ShardedBuffer.finish_reduce": (finish_reduce, {"tree": ("a tree", None)}),
        "ShardedBuffer.add_gradient": (
            add_gradient,
            {"sum": ("memory of any dtype", torch.ones(group.layout.partition))},
        ),
        "find_older_node": (
            _C.find_older_node,
            {"outputs": ("some tensors", [torch.ones(2)]), "first": ("count", 0)},
        ),
        "ShmCommunicator.segment_bytes": (_C.ShmCommunicator.segment_bytes, {"size": ("positive", 2)}),
    }
