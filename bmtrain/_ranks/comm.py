"""Construction of communicators, and Python's names for their operations."""

from __future__ import annotations

import datetime
import json
import os
import socket

import torch
import torch.distributed as dist

from .._C import (
    Communicator,
    GlooCommunicator,
    HostsCommunicator,
    ReduceOp,
    ShmCommunicator,
    SingleCommunicator,
)
from ..errors import CommunicationError
from ..topology import equal_runs
from . import context, shm_meeting
from .shm_meeting import exchange

#: The environment variable that selects the transport between CPU ranks.
TRANSPORT_VARIABLE = "BMTRAIN_CPU_TRANSPORT"

REDUCE_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PROD,
}


def reduce_op(op: str) -> ReduceOp:
    """The core's name of a reduction; ValueError for another than ``sum avg max min prod``."""
    found = REDUCE_OPS.get(op) if isinstance(op, str) else None
    if found is None:
        raise ValueError(f"op: expected one of {', '.join(REDUCE_OPS)}, got {op!r}")
    return found


def transport_timeout(timeout: float) -> float:
    """The time-out of transports: later than the watchdog's, whose error names the cause."""
    return timeout + 10.0


def wire_device(comm: Communicator) -> torch.device:
    """The device of small tensors that only serve an exchange."""
    if comm.backend != "nccl":
        return torch.device("cpu")
    current = context.current()
    return torch.device("cuda", torch.cuda.current_device()) if current is None else current.device


def create_gloo(
    store: dist.Store, prefix: str, rank: int, size: int, timeout: float, name: str
) -> Communicator:
    """Connects ``size`` CPU ranks by a store that is not needed afterwards; ``prefix`` is of this call. Collective.

    Ranks that can share memory do, and Gloo carries the bytes between hosts; `BMTRAIN_CPU_TRANSPORT` forces ``shm`` or
    ``gloo`` for all of them. See csrc/comm/hosts/hosts_communicator.h for groups on several hosts; where these have not
    equally many ranks, or ranks that do not follow each other, Gloo carries everything.

    Raises:
        ValueError: the environment variable holds something else, or not the same on all ranks.
        CommunicationError: not all ranks arrived in time, one could not be reached, or shared memory is forced where it
            cannot be had.
    """
    if size == 1:
        return SingleCommunicator(name)
    try:
        scoped = dist.PrefixStore(prefix, store)
        ranks = _meet(scoped, rank, size, timeout)
        reason = _why_no_shared_memory(ranks)
        if not reason:
            made, reason = shm_meeting.connect(dist.PrefixStore("shm", scoped), rank, size, timeout, name)
            if made is not None:
                return made
        if cpu_transport() == "shm":
            raise CommunicationError(
                f"group {name!r}: {TRANSPORT_VARIABLE}=shm, but shared memory cannot be used: {reason}"
            )
        local = _connect_host(dist.PrefixStore("hosts", scoped), ranks, rank, timeout, name)
        return connect_gloo(dist.PrefixStore("gloo", scoped), rank, size, timeout, name, local)
    except RuntimeError as error:
        if isinstance(error, CommunicationError):
            raise
        raise CommunicationError(
            f"group {name!r}: rank {rank} of {size} could not connect to the other ranks{_reason(error, timeout)}"
        ) from error


# What a system says when a limit on this process is reached, and which one.
_LIMITS = {
    "Resource temporarily unavailable": "no thread can be started: raise the limits on address space and on processes "
    "(ulimit -v, ulimit -u, the container's)",
    "Cannot allocate memory": "raise the limits on address space and on memory (ulimit -v, the container's)",
    "Too many open files": "raise the limit on open files (ulimit -n)",
}


def _reason(error: Exception, timeout: float) -> str:
    """Why a connection was not made: a limit of this process, or another rank.

    >>> _reason(RuntimeError("Too many open files"), 9.0)
    ': Too many open files: raise the limit on open files (ulimit -n)'
    >>> _reason(RuntimeError("wait timeout"), 9.0)
    ' within 9 s: wait timeout'
    """
    text = str(error).splitlines()[0]
    limit = next((remedy for said, remedy in _LIMITS.items() if said in text), "")
    return f": {text}: {limit}" if limit else f" within {timeout:g} s: {text}"


def cpu_transport(asked: str | None = None) -> str:
    """The setting of `BMTRAIN_CPU_TRANSPORT` (or ``asked`` in its place): ``"auto"``, ``"shm"`` or ``"gloo"``."""
    asked = asked or os.environ.get(TRANSPORT_VARIABLE) or "auto"
    if asked not in ("auto", "shm", "gloo"):
        raise ValueError(
            f"environment variable {TRANSPORT_VARIABLE}: expected 'shm', 'gloo' or 'auto', got {asked!r}"
        )
    return asked


def describe_cpu_transport(asked: str | None = None) -> str:
    """One line that names the transport between CPU ranks of this host, and the reason for it."""
    asked, lack = cpu_transport(asked), shm_meeting.why_not()
    if asked == "gloo":
        return f"Gloo ({TRANSPORT_VARIABLE}=gloo)"
    if lack:
        return f"Gloo: {lack}"
    if asked == "shm":
        return f"shared memory only ({TRANSPORT_VARIABLE}=shm)"
    return "shared memory between ranks of one host, Gloo between hosts"


def _meet(store: dist.Store, rank: int, size: int, timeout: float) -> list[dict[str, str]]:
    """Exchanges the requirements of shared memory that each rank meets. Collective."""
    mine = {
        "asked": cpu_transport(),
        "place": shm_meeting.place(),
        "lack": shm_meeting.why_not(),
        "host": socket.gethostname(),
    }
    ranks = [json.loads(text) for text in exchange(store, "place", json.dumps(mine), rank, size, timeout)]
    for other, found in enumerate(ranks):
        if found["asked"] != ranks[0]["asked"]:
            raise ValueError(
                f"environment variable {TRANSPORT_VARIABLE}: expected the same on every rank of a group, got "
                f"{ranks[0]['asked']!r} on rank 0 and {found['asked']!r} on rank {other}"
            )
    return ranks


def _why_no_shared_memory(ranks: list[dict[str, str]]) -> str:
    """The reason why the ranks do not all share memory; empty if they do."""
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


def _connect_host(
    store: dist.Store, ranks: list[dict[str, str]], rank: int, timeout: float, name: str
) -> ShmCommunicator | None:
    """The communicator of this host's ranks, if every host has one for equally many that follow each other, else None.
    Collective."""
    num_local = _ranks_per_host(ranks)
    if num_local == 1:
        return None
    host, local_rank = divmod(rank, num_local)
    made, reason = shm_meeting.connect(
        dist.PrefixStore(str(host), store), local_rank, num_local, timeout, f"{name} on host {host}"
    )
    reasons = exchange(store, "made", reason, rank, len(ranks), timeout)
    if made is not None and any(reasons):
        made.close()
        made = None
    return made


def _ranks_per_host(ranks: list[dict[str, str]]) -> int:
    """The number of consecutive ranks that share memory, if equal on all hosts; else 1.

    >>> of = lambda places: [{"asked": "auto", "lack": "", "place": place} for place in places]
    >>> [_ranks_per_host(of(places)) for places in ("aabb", "aaabbb", "aab", "abab", "ab", "aa")]
    [2, 3, 1, 1, 1, 2]
    """
    usable = ranks[0]["asked"] == "auto" and not any(found["lack"] for found in ranks)
    return equal_runs([found["place"] for found in ranks]) if usable else 1


def connect_gloo(
    store: dist.Store, rank: int, size: int, timeout: float, name: str, local: ShmCommunicator | None = None
) -> Communicator:
    """A mesh of Gloo connections, used only between hosts if the ranks of this one share memory as ``local``.

    The process group made here is registered nowhere: a default group, if there is one, is neither used
    nor changed.
    """
    gloo = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout))
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if local is not None:
        return HostsCommunicator(group, rank, size, name, float(timeout), local)
    return GlooCommunicator(group, rank, size, name, float(timeout))
