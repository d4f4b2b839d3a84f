"""Connecting ranks by NCCL: finding the library, exchanging ids."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from . import _C
from .errors import BMTrainError, CommunicationError

if TYPE_CHECKING:
    from ._context import Context

__all__ = [
    "create_nccl",
    "find_candidates",
    "library",
    "read_registration",
    "register_buffers",
    "split_nccl",
]

_REGISTER = "BMTRAIN_NCCL_REGISTER"
#: Smaller buffers are not worth a piece of memory of NCCL's own, which comes in such steps.
_LEAST_BYTES = 1 << 20

_log = logging.getLogger("bmtrain")


def find_candidates() -> list[str]:
    """Files of the ``nvidia-nccl`` package, if it is installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ImportError:
        return []
    folders = spec.submodule_search_locations if spec is not None else None
    return [str(path) for folder in folders or [] for path in sorted(Path(folder, "lib").glob("libnccl.so*"))]


@cache
def library() -> _C.NcclLibrary:
    """The NCCL of this process, opened at the first call.

    Looked for in this order: the file named by ``BMTRAIN_NCCL_LIBRARY`` (alone, if it is set), the copy that torch has
    loaded, the ``nvidia-nccl`` package, the system's ``libnccl.so.2``.

    Raises:
        BMTrainError: there is none, or it is older than 2.19; with what to do about it.
    """
    try:
        return _C.NcclLibrary(find_candidates())
    except RuntimeError as error:
        raise BMTrainError(f"{error}; or connect the ranks through the host with backend='gloo'") from None


def create_nccl(
    store: dist.Store, prefix: str, rank: int, size: int, timeout: float, name: str
) -> _C.Communicator:
    """Connect ``size`` ranks by NCCL, each with its current CUDA device. Collective over them.

    Args:
        store: where the ranks find each other; not needed any more when this returns.
        prefix: the part of the store this group uses; each call needs one of its own.
        rank: this process's rank in the group.
        size: number of ranks in the group.
        timeout: seconds after which connecting, and later every operation, gives up.
        name: what errors and records call the group.

    Raises:
        BMTrainError: no usable NCCL library.
        CommunicationError: not all ranks arrived in time, or NCCL failed.
    """
    nccl = library()
    scoped = dist.PrefixStore(prefix, store)
    try:
        if rank == 0:
            scoped.set("nccl_id", nccl.make_unique_id().hex())
        unique_id = bytes.fromhex(scoped.get("nccl_id").decode())
    except dist.DistError as error:
        raise CommunicationError(
            f"group {name!r}: rank {rank} of {size} waited in vain for the NCCL id of its rank 0: "
            f"{str(error).splitlines()[0]}"
        ) from error
    device = torch.device("cuda", torch.cuda.current_device())
    return _C.NcclCommunicator(nccl, unique_id, rank, size, name, device, float(timeout))


def split_nccl(parent: _C.Communicator, number: int, rank: int, size: int, name: str) -> _C.Communicator:
    """Connect some of the ranks of an NCCL communicator. Collective over all of them.

    Args:
        parent: of more ranks, guarded or not.
        number: of the new group: the same on its ranks, and on no others.
        rank: this process's rank in the new group.
        size: number of ranks in the new group.
        name: what errors and records call it.

    Raises:
        CommunicationError: not all ranks of ``parent`` took part in time, or NCCL failed.
    """
    inner = parent.inner if isinstance(parent, _C.GuardedCommunicator) else parent
    assert isinstance(inner, _C.NcclCommunicator)
    return inner.split(number, rank, size, name)


def read_registration() -> str:
    """``BMTRAIN_NCCL_REGISTER``: ``0`` (default), ``auto`` or ``1``.

    Raises:
        ValueError: it is something else.
    """
    setting = os.environ.get(_REGISTER, "") or "0"
    if setting not in ("0", "auto", "1"):
        raise ValueError(f"{_REGISTER}: expected 0, auto or 1, got {setting!r}")
    return setting


def register_buffers(context: Context, setting: str) -> bool:
    """Let blocks take large buffers from memory that NCCL has allocated and that communicators register. Collective.

    Args:
        context: of this process; none of its buffers is in use.
        setting: ``auto``: only if it works on every rank; ``1``: it has to.

    Returns:
        Whether they do, the same on every rank.

    Raises:
        BMTrainError: on every rank: it has to, and does not work on one of them.
    """
    guarded = context.groups["zero"].comm
    comm = guarded.inner if isinstance(guarded, _C.GuardedCommunicator) else guarded
    assert isinstance(comm, _C.NcclCommunicator)
    reason = comm.try_registration()
    works = torch.tensor([not reason], device=context.device, dtype=torch.int32)
    guarded.all_reduce(works, _C.ReduceOp.MIN, _REGISTER).wait()
    if works.item():
        context.engine.pool.set_source(_C.NcclMemory(comm.library, context.device), _LEAST_BYTES)
        return True
    told = reason or "it works on this rank, but not on another one"
    if setting == "1":
        raise BMTrainError(f"{_REGISTER}=1: NCCL does not register memory on every rank: {told}")
    _log.warning("bmtrain: %s=auto: buffers are torch's: %s", _REGISTER, told)
    return False
