"""Exchange of picklable Python objects between the ranks of one job."""

from __future__ import annotations

import pickle
from typing import TypeVar

from .._base.arguments import require_kind
from .._base.deprecate import warn_once
from .._C import Communicator
from .context import context
from .messages import broadcast_bytes, gather_bytes
from .operands import check_root

T = TypeVar("T")


def allgather_objects(obj: T) -> list[T]:
    """Every rank's object, in rank order. Collective.

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
    require_kind("comm", comm, Communicator)
    return _allgather(obj, comm)


def _allgather(obj: T, comm: Communicator) -> list[T]:
    if comm.size == 1:
        return [obj]
    data, error = _pickled(obj)
    parts = gather_bytes(data, comm, "allgather_object")
    _raise_if_failed([rank for rank, part in enumerate(parts) if part is None], error, comm)
    return [obj if rank == comm.rank else pickle.loads(part or b"") for rank, part in enumerate(parts)]


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
    require_kind("comm", comm, Communicator)
    check_root(src, comm, "src")
    if comm.size == 1:
        return obj
    data, error = _pickled(obj) if comm.rank == src else (None, None)
    received = broadcast_bytes(data, src, comm, "broadcast_object")
    if received is None:
        _raise_if_failed([src], error, comm)
    result: T = obj if comm.rank == src else pickle.loads(received or b"")
    return result


def _pickled(obj: object) -> tuple[bytes | None, Exception | None]:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:  # whatever __reduce__ of the object raises; told to all ranks below
        return None, error


def _raise_if_failed(ranks: list[int], error: Exception | None, comm: Communicator) -> None:
    if not ranks:
        return
    where = ", ".join(map(str, ranks))
    raise RuntimeError(
        f"objects of rank {where} of group {comm.name!r} could not be pickled"
        + (f": {type(error).__name__}: {error}" if error is not None else "; see the error there")
    ) from error
