"""Checks and conversions of the arguments of collectives."""

from __future__ import annotations

import torch
from torch import Tensor

from .._base.arguments import require_integer
from .._C import Communicator
from .context import context

#: Collectives that combine or replace the elements of all ranks' tensors, which must be of the same place.
OVER_ELEMENTS = ("all_reduce", "broadcast", "reduce", "reduce_scatter")


def resolve_comm(name: str, x: Tensor, comm: Communicator | None, argument: str = "x") -> Communicator:
    """Checks the tensor of the collective ``name`` and returns its communicator, the world's for None.

    Raises:
        TypeError: ``x`` is no dense tensor with memory, or ``comm`` no communicator.
        RuntimeError: before :func:`bmtrain.init_distributed`.
    """
    current = context(f"{name}()")
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: {argument}: expected a tensor, got {type(x).__name__}")
    if x.layout != torch.strided or x.device.type == "meta":
        raise TypeError(
            f"{name}: {argument}: expected a dense tensor with memory, got {x.layout} on {x.device.type}"
        )
    if x.is_quantized:  # the other ranks would read its integers without its scale
        raise TypeError(f"{name}: {argument}: expected plain numbers, got a quantised tensor of {x.dtype}")
    if comm is None:
        if name in OVER_ELEMENTS:
            current.engine.refuse_shard(f"bmtrain.distributed.{name}", x)
        return current.world.comm
    if not isinstance(comm, Communicator):
        raise TypeError(f"{name}: comm: expected a communicator, got {type(comm).__name__}")
    return comm


def check_root(root: int, comm: Communicator, name: str = "root") -> None:
    """Raises TypeError or ValueError unless ``root``, the argument ``name``, is a rank of ``comm``."""
    require_integer(name, root)
    if not 0 <= root < comm.size:
        raise ValueError(f"{name}: expected a rank of the group, 0 to {comm.size - 1}, got {root}")


def require_linear(name: str, op: str) -> None:
    """Raises NotImplementedError for the backward of a reduction ``op`` other than sum and average."""
    if op not in ("sum", "avg"):
        raise NotImplementedError(f"{name}: backward of op {op!r} is not defined, only of sum and avg")


def fresh_copy(x: Tensor) -> Tensor:
    """A fresh contiguous copy, whatever the strides of ``x``."""
    return x.detach().clone(memory_format=torch.contiguous_format)
