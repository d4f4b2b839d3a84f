"""Making communicators, and the words that Python uses for what they do."""

from __future__ import annotations

import datetime
import json
import os
import socket

import torch
import torch.distributed as dist

from . import _C, _context, _shm_meeting
from ._comm_nccl import create_nccl
from .errors import CommunicationError

__all__ = [
    "REDUCE_OPS",
    "TRANSPORT_VARIABLE",
    "connect_gloo",
    "cpu_transport",
    "create_gloo",
    "create_nccl",
    "create_single",
    "describe_cpu_transport",
    "reduce_op",
    "wire_device",
]

#: The environment variable that forces what carries bytes between CPU ranks.
TRANSPORT_VARIABLE = "BMTRAIN_CPU_TRANSPORT"

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
    if comm.backend != "nccl":
        return torch.device("cpu")
    current = _context.current()
    return torch.device("cuda", torch.cuda.current_device()) if current is None else current.device


def create_single(name: str) -> _C.Communicator:
    """The communicator of a group with one rank: collectives are local copies."""
    return _C.SingleCommunicator(name)


def create_gloo(
    store: dist.Store, prefix: str, rank: int, size: int, timeout: float, name: str
) -> _C.Communicator:
    """Connect ``size`` CPU ranks. Collective over them; each call needs a ``prefix`` of its own.

    Ranks that can all share memory do, else Gloo carries the bytes; `BMTRAIN_CPU_TRANSPORT` forces ``shm`` or
    ``gloo``.

    Args:
        store: where the ranks find each other; not needed any more when this returns.
        prefix: the part of the store this group uses.
        rank: this process's rank in the group.
        size: number of ranks in the group; 1 gives a communicator without connections.
        timeout: seconds after which connecting, and later every operation, gives up.
        name: what errors and records call the group.

    Raises:
        ValueError: the environment variable holds something else, or not the same on all ranks.
        CommunicationError: not all ranks arrived in time, one could not be reached, or shared memory is forced where it
            cannot be had.
    """
    if size == 1:
        return create_single(name)
    try:
        scoped = dist.PrefixStore(prefix, store)
        reason = _why_no_shared_memory(scoped, rank, size, timeout)
        if not reason:
            made, reason = _shm_meeting.connect(dist.PrefixStore("shm", scoped), rank, size, timeout, name)
            if made is not None:
                return made
        if cpu_transport() == "shm":
            raise CommunicationError(
                f"group {name!r}: {TRANSPORT_VARIABLE}=shm, but shared memory cannot be used: {reason}"
            )
        return connect_gloo(dist.PrefixStore("gloo", scoped), rank, size, timeout, name)
    except RuntimeError as error:
        if isinstance(error, CommunicationError):
            raise
        raise CommunicationError(
            f"group {name!r}: rank {rank} of {size} could not connect to the other ranks within {timeout:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from error


def cpu_transport(asked: str | None = None) -> str:
    """What `BMTRAIN_CPU_TRANSPORT` (or ``asked`` in its place) asks for: ``"auto"``, ``"shm"`` or ``"gloo"``.

    Raises:
        ValueError: it is set to something else.
    """
    asked = asked or os.environ.get(TRANSPORT_VARIABLE) or "auto"
    if asked not in ("auto", "shm", "gloo"):
        raise ValueError(
            f"environment variable {TRANSPORT_VARIABLE}: expected 'shm', 'gloo' or 'auto', got {asked!r}"
        )
    return asked


def describe_cpu_transport(asked: str | None = None) -> str:
    """One line: what carries the bytes between CPU ranks of this host, and why.

    Args:
        asked: as in `cpu_transport`.

    Raises:
        ValueError: the environment variable holds something unknown.

    >>> describe_cpu_transport()  # doctest: +SKIP
    'shared memory between ranks of one host, Gloo between hosts'
    """
    asked, lack = cpu_transport(asked), _shm_meeting.why_not()
    if asked == "gloo":
        return f"Gloo ({TRANSPORT_VARIABLE}=gloo)"
    if lack:
        return f"Gloo: {lack}"
    if asked == "shm":
        return f"shared memory only ({TRANSPORT_VARIABLE}=shm)"
    return "shared memory between ranks of one host, Gloo between hosts"


def _why_no_shared_memory(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Empty if all ranks can share memory, else the reason: the same on all of them. [collective]"""
    mine = {
        "asked": cpu_transport(),
        "place": _shm_meeting.place(),
        "lack": _shm_meeting.why_not(),
        "host": socket.gethostname(),
    }
    store.set(f"place/{rank}", json.dumps(mine))
    keys = [f"place/{other}" for other in range(size)]
    store.wait(keys, datetime.timedelta(seconds=timeout))
    ranks = [json.loads(store.get(key)) for key in keys]
    for other, found in enumerate(ranks):
        if found["asked"] != ranks[0]["asked"]:
            raise ValueError(
                f"environment variable {TRANSPORT_VARIABLE}: expected the same on every rank of a group, got "
                f"{ranks[0]['asked']!r} on rank 0 and {found['asked']!r} on rank {other}"
            )
    if ranks[0]["asked"] == "gloo":
        return f"{TRANSPORT_VARIABLE}=gloo"
    for other, found in enumerate(ranks):
        if found["lack"]:
            return f"rank {other}: {found['lack']}"
        if found["place"] != ranks[0]["place"]:
            return (
                f"rank 0 runs on {ranks[0]['host']}, rank {other} on {found['host']} or in another container"
            )
    return ""


def connect_gloo(store: dist.Store, rank: int, size: int, timeout: float, name: str) -> _C.Communicator:
    """A mesh of Gloo connections.

    The process group made here is registered nowhere: the default group, if somebody made one, is neither used
    nor touched.
    """
    gloo = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout))
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return _C.GlooCommunicator(group, rank, size, name, float(timeout))
