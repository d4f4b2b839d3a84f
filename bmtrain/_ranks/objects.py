"""Exchange of picklable Python objects between the ranks of one job."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any, TypeVar

import torch

from .._base.deprecate import warn_once
from .._C import Communicator
from .comm import wire_device
from .context import context

T = TypeVar("T")

_FAILED = -1  # sent in place of a size by a rank that could not pickle its object


def allgather_objects(obj: T) -> list[T]:
    """Every rank's object, in rank order. [collective]

    Args:
        obj: anything that can be pickled; sizes may differ between ranks.

    Raises:
        RuntimeError: before `init_distributed`, or on all ranks if one rank's object cannot be pickled.

    Example:
        >>> import bmtrain
        >>> bmtrain.init_distributed()
        >>> allgather_objects({"rank": bmtrain.rank()})
        [{'rank': 0}]
    """
    return _allgather(obj, context("allgather_objects()").world.comm)


def allgather_object(obj: T, comm: Communicator) -> list[T]:
    """Every object of the ranks of ``comm``, in rank order; the form of 0.2. [collective over comm]

    Args:
        obj: anything that can be pickled; sizes may differ between ranks.
        comm: communicator.

    Raises:
        RuntimeError: on all ranks if one rank's object cannot be pickled.
    """
    warn_once("store.allgather_object", "store.allgather_object() is deprecated: call allgather_objects()")
    return _allgather(obj, comm)


def _allgather(obj: T, comm: Communicator) -> list[T]:
    if comm.size == 1:
        return [obj]
    device = wire_device(comm)
    data, error = _pickled(obj)
    mine = torch.tensor([_FAILED if data is None else len(data)], device=device)
    sizes = torch.empty(comm.size, dtype=torch.int64, device=device)
    comm.all_gather(sizes, mine, "allgather_object").wait()
    lengths: list[int] = sizes.tolist()
    _raise_if_failed([rank for rank, length in enumerate(lengths) if length == _FAILED], error, comm)
    buffers = [torch.empty(length, dtype=torch.uint8, device=device) for length in lengths]
    if data is not None:
        buffers[comm.rank].copy_(_as_tensor(data))
    works = [comm.broadcast(buffer, rank, "allgather_object") for rank, buffer in enumerate(buffers)]
    for work in works:
        work.wait()
    return [obj if rank == comm.rank else _unpickled(buffer) for rank, buffer in enumerate(buffers)]


def broadcast_object(obj: T, comm: Communicator | None = None, src: int = 0) -> T:
    """The object of rank ``src``, on every rank. [collective over comm]

    Args:
        obj: anything that can be pickled; ignored on ranks other than ``src``.
        comm: communicator; default all ranks.
        src: rank in ``comm``.

    Raises:
        RuntimeError: before `init_distributed`, or on all ranks if the object cannot be pickled.
        ValueError: ``src`` is not a rank of ``comm``.

    Example:
        >>> bmtrain.store.broadcast_object({"seed": 7} if bmtrain.rank() == 0 else None)
        {'seed': 7}
    """
    if comm is None:
        comm = context("broadcast_object()").world.comm
    if not 0 <= src < comm.size:
        raise ValueError(f"src: expected a rank of the group, 0 to {comm.size - 1}, got {src}")
    if comm.size == 1:
        return obj
    device = wire_device(comm)
    data, error = _pickled(obj) if comm.rank == src else (b"", None)
    size = torch.tensor([_FAILED if data is None else len(data)], device=device)
    comm.broadcast(size, src, "broadcast_object").wait()
    length = int(size.item())
    _raise_if_failed([src] if length == _FAILED else [], error, comm)
    buffer = _as_tensor(data).to(device) if data else torch.empty(length, dtype=torch.uint8, device=device)
    comm.broadcast(buffer, src, "broadcast_object").wait()
    result: T = obj if comm.rank == src else _unpickled(buffer)
    return result


def _pickled(obj: object) -> tuple[bytes | None, Exception | None]:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:  # whatever __reduce__ of the object raises; told to all ranks below
        return None, error


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpickled(buffer: torch.Tensor) -> Any:
    host = buffer.cpu()
    return pickle.loads(ctypes.string_at(host.data_ptr(), host.numel()))


def _raise_if_failed(ranks: list[int], error: Exception | None, comm: Communicator) -> None:
    if not ranks:
        return
    where = ", ".join(map(str, ranks))
    raise RuntimeError(
        f"objects of rank {where} of group {comm.name!r} could not be pickled"
        + (f": {type(error).__name__}: {error}" if error is not None else "; see the error there")
    ) from error
