"""In-place collectives over raw buffers, with NCCL's names; they work on CPU ranks as well.

A buffer is a contiguous tensor, or a storage, which means all of it: a typed storage has its dtype, an untyped one is
bytes, which can be copied but not reduced. A call returns when its result is usable, or, between `groupStart` and
`groupEnd`, at the outermost `groupEnd`.
"""

from __future__ import annotations

import threading
from typing import TypeAlias

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

from .._C import Communicator as NCCLCommunicator
from .._C import GuardedCommunicator, NcclCommunicator, ReduceOp, Work
from .._ranks.comm import reduce_op
from .._ranks.context import refuse_child
from . import enums
from ._unique_id import commInitRank, getUniqueId
from .enums import *  # noqa: F403 -- names of enums.__all__

__all__ = [
    "Buffer",
    "NCCLCommunicator",
    "allGather",
    "allReduce",
    "broadcast",
    "commCount",
    "commDestroy",
    "commInitRank",
    "commRank",
    "getUniqueId",
    "groupEnd",
    "groupStart",
    "recv",
    "reduce",
    "reduceScatter",
    "send",
]
__all__ += enums.__all__

Buffer: TypeAlias = Tensor | TypedStorage | UntypedStorage


class _Posted(threading.local):
    """Operations posted since the outermost `groupStart` of this thread, and the communicators that collect theirs."""

    depth = 0

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.comms: list[NcclCommunicator] = []


_posted = _Posted()


def allReduce(src: Buffer, dst: Buffer, op: str, comm: NCCLCommunicator) -> None:
    """Combine the ranks' ``src`` into every rank's ``dst``, which has the same size. Collective.

    Args:
        src: contiguous; the same dtype and number of elements on every rank.
        dst: may be ``src``.
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"prod"``.
        comm: of :func:`commInitRank`, or from ``config``: ``"comm"``, ``"tp_comm"``, ...

    Raises:
        TypeError: a buffer of another kind, not contiguous, or an untyped storage, whose bytes have no sum.
        ValueError: sizes do not fit, or another ``op``.
        CommunicationError: a rank does not come within the time-out, or has failed.

    Example:
        >>> import torch
        >>> comm = commInitRank(getUniqueId(), 1, 0)
        >>> x = torch.tensor([1.0, 2.0])
        >>> allReduce(x, x, "sum", comm)
        >>> x
        tensor([1., 2.])
    """
    target = _copied("allReduce", src, dst)
    _finish(
        _joined("allReduce", comm).all_reduce(target, _reduction("allReduce", op, src, dst), "nccl.allReduce")
    )


def reduce(src: Buffer, dst: Buffer, op: str, root: int, comm: NCCLCommunicator) -> None:
    """Combine the ranks' ``src`` into ``dst`` of rank ``root``; other ranks' ``dst`` is undefined. Collective.

    Args and errors: as :func:`allReduce`; ``root`` is a rank of ``comm``.
    """
    target = _copied("reduce", src, dst)
    _finish(_joined("reduce", comm).reduce(target, _reduction("reduce", op, src, dst), root, "nccl.reduce"))


def broadcast(src: Buffer, dst: Buffer, root: int, comm: NCCLCommunicator) -> None:
    """Copy ``src`` of rank ``root`` into every rank's ``dst``, which has the same size. Collective.

    Args and errors: as :func:`allReduce`; ``root`` is a rank of ``comm``.
    """
    _check_comm("broadcast", comm)
    if comm.rank == root:
        target = _copied("broadcast", src, dst)
    else:
        target = _as_tensor("broadcast", "dst", dst)
        _check_pair("broadcast", _as_tensor("broadcast", "src", src), target)
    _finish(_joined("broadcast", comm).broadcast(target, root, "nccl.broadcast"))


def allGather(src: Buffer, dst: Buffer, comm: NCCLCommunicator) -> None:
    """Put the ranks' ``src`` one after the other into ``dst``, ``commCount(comm)`` times as large. Collective.

    Args and errors: as :func:`allReduce`.

    Example:
        >>> comm, out = bmtrain.config["comm"], torch.empty(bmtrain.world_size() * 2)
        >>> allGather(torch.tensor([1.0, 2.0]), out, comm)
        >>> out[:2]
        tensor([1., 2.])
    """
    _finish(
        _joined("allGather", comm).all_gather(
            *_sliced("allGather", ("dst", dst), ("src", src), comm), "nccl.allGather"
        )
    )


def reduceScatter(src: Buffer, dst: Buffer, op: str, comm: NCCLCommunicator) -> None:
    """Combine the ranks' ``src``, ``commCount(comm)`` times as large as ``dst``; rank r gets slice r. Collective.

    Args and errors: as :func:`allReduce`.
    """
    _finish(
        _joined("reduceScatter", comm).reduce_scatter(
            *_sliced("reduceScatter", ("src", src), ("dst", dst), comm)[::-1],
            _reduction("reduceScatter", op, src, dst),
            "nccl.reduceScatter",
        )
    )


def send(src: Buffer, peer: int, comm: NCCLCommunicator) -> None:
    """Send ``src`` to rank ``peer`` of ``comm``, which receives the same size.

    Two ranks that send to each other at once do so between :func:`groupStart` and :func:`groupEnd`.

    Example::

        peer = (comm.rank + 1) % comm.size
        groupStart()
        send(mine, peer, comm)
        recv(theirs, (comm.rank - 1) % comm.size, comm)
        groupEnd()  # both are done
    """
    _finish(_joined("send", comm).send(_as_tensor("send", "src", src), peer, "nccl.send"))


def recv(dst: Buffer, peer: int, comm: NCCLCommunicator) -> None:
    """Receive ``dst`` from rank ``peer`` of ``comm``, which sends the same size."""
    _finish(_joined("recv", comm).recv(_as_tensor("recv", "dst", dst), peer, "nccl.recv"))


def groupStart() -> None:
    """Post the calls up to `groupEnd` without waiting, so that opposite sends and receives meet. Nestable."""
    _posted.depth += 1


def groupEnd() -> None:
    """Wait for everything posted since the outermost `groupStart`.

    Raises:
        RuntimeError: without a `groupStart`.
    """
    if _posted.depth == 0:
        raise RuntimeError("nccl.groupEnd: no groupStart came before it on this thread")
    _posted.depth -= 1
    if _posted.depth == 0:
        works, _posted.works = _posted.works, []
        comms, _posted.comms = _posted.comms, []
        for comm in comms:
            comm.end_group()
        for work in works:
            work.wait()


def commCount(comm: NCCLCommunicator) -> int:
    """Number of ranks of a communicator."""
    return _open("commCount", comm).size


def commRank(comm: NCCLCommunicator) -> int:
    """This process's rank in a communicator."""
    return _open("commRank", comm).rank


def commDestroy(comm: NCCLCommunicator) -> None:
    """Close a communicator; using it afterwards raises RuntimeError."""
    _open("commDestroy", comm).close()


def _check_comm(call: str, comm: NCCLCommunicator) -> None:
    refuse_child(f"nccl.{call}")
    if not isinstance(comm, NCCLCommunicator):
        raise TypeError(f"nccl.{call}: comm: expected a communicator, got {type(comm).__name__}")


def _open(call: str, comm: NCCLCommunicator) -> NCCLCommunicator:
    _check_comm(call, comm)
    if comm.closed:
        raise RuntimeError(f"nccl.{call}: the communicator {comm.name!r} was destroyed")
    return comm


def _joined(call: str, comm: NCCLCommunicator) -> NCCLCommunicator:
    """``comm``, for an operation; over NCCL the operations of a group must start as one."""
    _check_comm(call, comm)
    transport = comm.inner if isinstance(comm, GuardedCommunicator) else comm
    if _posted.depth and isinstance(transport, NcclCommunicator) and transport not in _posted.comms:
        transport.begin_group()
        _posted.comms.append(transport)
    return comm


def _finish(work: Work) -> None:
    if _posted.depth:
        _posted.works.append(work)
    else:
        work.wait()


def _as_tensor(call: str, argument: str, buffer: Buffer) -> Tensor:
    """The memory of a buffer as a tensor, without a copy and without torch's warning about typed storages."""
    if isinstance(buffer, Tensor):
        return buffer.detach()
    if isinstance(buffer, TypedStorage):
        untyped, dtype = buffer._untyped_storage, buffer.dtype
    elif isinstance(buffer, UntypedStorage):
        untyped, dtype = buffer, torch.uint8
    else:
        raise TypeError(
            f"nccl.{call}: {argument}: expected a tensor or a storage, got {type(buffer).__name__}"
        )
    return torch.empty(0, dtype=dtype, device=untyped.device).set_(untyped)


def _check_pair(call: str, src: Tensor, dst: Tensor) -> None:
    _check_alike(call, src, dst)
    if src.numel() != dst.numel():
        raise ValueError(
            f"nccl.{call}: expected src and dst of equal size, got {src.numel()} and {dst.numel()} elements"
        )


def _check_alike(call: str, src: Tensor, dst: Tensor) -> None:
    for argument, buffer in (("src", src), ("dst", dst)):
        if not buffer.is_contiguous():
            raise TypeError(
                f"nccl.{call}: {argument}: expected a contiguous tensor, got strides {buffer.stride()}"
            )
    if src.dtype != dst.dtype or src.device != dst.device:
        raise TypeError(
            f"nccl.{call}: expected src and dst of one dtype on one device, got {src.dtype} on {src.device} and "
            f"{dst.dtype} on {dst.device}"
        )


def _sliced(
    call: str, whole: tuple[str, Buffer], part: tuple[str, Buffer], comm: NCCLCommunicator
) -> tuple[Tensor, Tensor]:
    """Two named buffers as tensors, of which the first must be as large as one ``part`` for every rank."""
    _check_comm(call, comm)
    large, small = (_as_tensor(call, argument, buffer) for argument, buffer in (whole, part))
    _check_alike(call, *((large, small) if whole[0] == "src" else (small, large)))
    if large.numel() != comm.size * small.numel():
        raise ValueError(
            f"nccl.{call}: expected {whole[0]} to be {comm.size} times as large as {part[0]}, got {large.numel()} and "
            f"{small.numel()} elements"
        )
    return large, small


def _copied(call: str, src: Buffer, dst: Buffer) -> Tensor:
    """``dst`` holding the values of ``src``, as the in-place operations of a communicator need it."""
    source, target = _as_tensor(call, "src", src), _as_tensor(call, "dst", dst)
    _check_pair(call, source, target)
    if source.data_ptr() != target.data_ptr():
        target.view(-1).copy_(source.view(-1))
    return target


def _reduction(call: str, op: str, *buffers: Buffer) -> ReduceOp:
    if any(isinstance(buffer, UntypedStorage) for buffer in buffers):
        raise TypeError(
            f"nccl.{call}: expected tensors or typed storages, got an untyped storage: bytes have no sum"
        )
    return reduce_op(op)
