"""Connecting ranks by NCCL: finding the library, exchanging ids."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from .._C import Communicator, GuardedCommunicator, NcclCommunicator, NcclLibrary
from ..errors import BMTrainError, CommunicationError

_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"

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
def library() -> NcclLibrary:
    """The NCCL of this process, opened at the first call.

    Looked for in this order: the file named by ``BMTRAIN_NCCL_LIBRARY`` (alone, if it is set), the copy that torch has
    loaded, the ``nvidia-nccl`` package, the system's ``libnccl.so.2``.
    """
    try:
        found = NcclLibrary(find_candidates())
    except RuntimeError as error:
        raise BMTrainError(f"{error}; or connect the ranks through the host with backend='gloo'") from None
    order_launches(found.version)
    return found


def order_launches(version: str) -> None:
    """Lets NCCL start the operations of all communicators in the order in which the host posts them, where it can.

    [Note: Order of launches]
    A rank has several communicators, whose kernels run at the same time by design. All ranks post in one order, and
    NCCL keeps that order between communicators from 2.26 on, if the option is set before the first operation. With a
    driver older than CUDA 12.3 one operation would wait for the end of another, so that nothing overlaps, and a stage
    of a pipeline could not send while it receives: there the option is not set. A setting of the user's stays.
    """
    new_enough = tuple(map(int, version.split(".")[:2])) >= (2, 26) and _driver_version() >= 12030
    if new_enough:
        os.environ.setdefault(_ORDER, "1")


def _driver_version() -> int:
    """CUDA's version number, for example 12030 for 12.3; 0 without a driver, or if torch cannot read it."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return int(ask()) if ask is not None and torch.cuda.is_available() else 0


def create_nccl(
    store: dist.Store, prefix: str, rank: int, size: int, timeout: float, name: str
) -> Communicator:
    """Connects ``size`` ranks by NCCL, each with its current CUDA device. Arguments as of `create_gloo`. Collective."""
    nccl = library()
    scoped = dist.PrefixStore(prefix, store)
    try:
        if rank == 0:
            scoped.set("nccl_id", nccl.make_unique_id().hex())
        unique_id = bytes.fromhex(scoped.get("nccl_id").decode())
    except dist.DistError as error:
        raise CommunicationError(
            f"group {name!r}: rank {rank} of {size} did not get the NCCL id of its rank 0: "
            f"{str(error).splitlines()[0]}"
        ) from error
    device = torch.device("cuda", torch.cuda.current_device())
    return NcclCommunicator(nccl, unique_id, rank, size, name, device, float(timeout))


def split_nccl(parent: Communicator, number: int, rank: int, size: int, name: str) -> Communicator:
    """Connects some of the ranks of an NCCL communicator, guarded or not. Collective over all of them.

    ``number`` is the same on the ranks of the new group, and on no others.
    """
    inner = parent.inner if isinstance(parent, GuardedCommunicator) else parent
    assert isinstance(inner, NcclCommunicator)
    return inner.split(number, rank, size, name)
