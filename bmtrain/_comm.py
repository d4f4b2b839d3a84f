"""Making communicators: the only file that touches ``torch.distributed`` for transport."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from . import _C
from .errors import CommunicationError

__all__ = ["create_gloo", "create_single"]


def create_single(name: str) -> _C.Communicator:
    """The communicator of a group with one rank: collectives are local copies."""
    return _C.SingleCommunicator(name)


def create_gloo(
    store: dist.Store, prefix: str, rank: int, size: int, timeout: float, name: str
) -> _C.Communicator:
    """Connect ``size`` ranks with Gloo. Collective over them; each call needs a ``prefix`` of its own.

    The process group made here is never registered anywhere: the default group, if somebody made one, is neither
    used nor touched.

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
    limit = datetime.timedelta(seconds=timeout)
    try:
        scoped = dist.PrefixStore(prefix, store)
        gloo = dist.ProcessGroupGloo(scoped, rank, size, limit)
        group = dist.ProcessGroup(scoped, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    except RuntimeError as error:
        raise CommunicationError(
            f"group {name!r}: rank {rank} of {size} could not connect to the other ranks within {timeout:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return _C.GlooCommunicator(group, rank, size, name, float(timeout))
