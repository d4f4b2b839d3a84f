"""Making communicators, and the words that Python uses for what they do."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from . import _C
from ._comm_nccl import create_nccl
from .errors import CommunicationError

__all__ = ["REDUCE_OPS", "create_gloo", "create_nccl", "create_single", "reduce_op", "wire_device"]

REDUCE_OPS = {
    "sum": _C.ReduceOp.SUM,
    "avg": _C.ReduceOp.AVG,
    "max": _C.ReduceOp.MAX,
    "min": _C.ReduceOp.MIN,
    "prod": _C.ReduceOp.PROD,
}


def reduce_op(op: str) -> _C.ReduceOp:
    """The core's name of a reduction.

    Raises:
        ValueError: not one of ``sum avg max min prod``.
    """
    found = REDUCE_OPS.get(op) if isinstance(op, str) else None
    if found is None:
        raise ValueError(f"op: expected one of {', '.join(REDUCE_OPS)}, got {op!r}")
    return found


def wire_device(comm: _C.Communicator) -> torch.device:
    """Where small tensors that only serve an exchange have to live."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if comm.backend == "nccl" else torch.device("cpu")
    )


def create_single(name: str) -> _C.Communicator:
    """The communicator of a group with one rank: collectives are local copies."""
    return _C.SingleCommunicator(name)


def create_gloo(
    store: dist.Store, prefix: str, rank: int, size: int, timeout: float, name: str
) -> _C.Communicator:
    """Connect ``size`` ranks with Gloo. Collective over them; each call needs a ``prefix`` of its own.

    The process group made here is registered nowhere: the default group, if somebody made one, is neither used
    nor touched.

    Args:
        store: where the ranks find each other; not needed any more when this returns.
        prefix: the part of the store this group uses.
        rank: this process's rank in the group.
        size: number of ranks in the group; 1 gives a communicator without connections.
        timeout: seconds after which connecting, and later every operation, gives up.
        name: what errors and records call the group.

    Raises:
        CommunicationError: not all ranks arrived in time, or one could not be reached.
    """
    if size == 1:
        return create_single(name)
    try:
        scoped = dist.PrefixStore(prefix, store)
        gloo = dist.ProcessGroupGloo(scoped, rank, size, datetime.timedelta(seconds=timeout))
        group = dist.ProcessGroup(scoped, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    except RuntimeError as error:
        raise CommunicationError(
            f"group {name!r}: rank {rank} of {size} could not connect to the other ranks within {timeout:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return _C.GlooCommunicator(group, rank, size, name, float(timeout))
