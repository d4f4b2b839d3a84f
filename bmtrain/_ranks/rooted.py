"""Collectives in which one rank, the root, is special, and messages between two ranks.

[Note: Results on ranks other than the root]
Backward of these collectives communicates, so that every rank must run it. Ranks other than the root therefore get
a tensor too, one without elements: ``gather(x, 0).sum().backward()`` is right on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.opaque import opaque
from .._C import Communicator
from ..errors import UnevenSplitError
from .collectives import recv_activations, send_activations
from .comm import reduce_op
from .context import context
from .operands import check_root, fresh_copy, require_linear, resolve_comm


@opaque
def send(x: Tensor, dst: int, comm: Communicator | None = None) -> None:
    """Sends a tensor, its shape and dtype included, to a rank that calls `recv`.

    Returns when the data has left. Not differentiable.

    Args:
        x: any shape with at most 30 dimensions; any strides.
        dst: rank in ``comm``, another than this one.
        comm: communicator; default all ranks.

    Raises:
        RuntimeError: before `init_distributed`.
        ValueError: ``dst`` is not another rank of ``comm``, or a dtype or shape that cannot be sent.

    Example::

        if bmt.rank() == 0:
            bmt.distributed.send(torch.ones(2, 3), dst=1)
        elif bmt.rank() == 1:
            x = bmt.distributed.recv(src=0)  # its shape and dtype come with it
    """
    comm = resolve_comm("send", x, comm)
    send_activations(x, _peer("send", "dst", dst, comm), comm)


@opaque
def recv(src: int, comm: Communicator | None = None) -> Tensor:
    """Receives what `send` sends: a new tensor on the run device that requires no gradient.

    Args:
        src: rank in ``comm``, another than this one.
        comm: communicator; default all ranks.

    Raises:
        RuntimeError: before `init_distributed`.
        ValueError: ``src`` is not another rank of ``comm``.

    Example:
        See `send`.
    """
    device = context("recv()").device
    comm = resolve_comm("recv", torch.empty(0, device=device), comm)
    return recv_activations(_peer("recv", "src", src, comm), comm)


@opaque
def scatter(src: Tensor, root: int, comm: Communicator | None = None) -> Tensor:
    """Row r of rank ``root``'s tensor, on rank r. [collective over comm, backward too]

    Args:
        src: shape ``(size, *rest)``: gives shape and dtype on every rank, and the values on ``root``.
        root: rank in ``comm``.
        comm: communicator; default all ranks.

    Returns:
        a new tensor of shape ``rest``. Backward gathers the ranks' gradients on ``root``, the other ranks' ``src``
        gets zeros; ``src`` must require a gradient on all ranks or on none.

    Raises:
        RuntimeError: before `init_distributed`.
        ValueError: ``root`` is not a rank of ``comm``, or a first dimension other than its size (an AssertionError
            as well).

    Example:
        >>> import bmtrain, torch
        >>> bmtrain.init_distributed()
        >>> bmtrain.distributed.scatter(torch.tensor([[1.0, 2.0]]), 0)
        tensor([1., 2.])
    """
    comm = resolve_comm("scatter", src, comm, "src")
    check_root(root, comm)
    if src.dim() == 0 or src.shape[0] != comm.size:
        raise UnevenSplitError(
            f"scatter: expected a first dimension of {comm.size}, one row for each rank of group {comm.name!r}, "
            f"got shape {tuple(src.shape)}"
        )
    return _Scatter.apply(src, root, comm)  # type: ignore[no-any-return]


@opaque
def gather(x: Tensor, root: int, comm: Communicator | None = None) -> Tensor:
    """Stacks the ranks' tensors in rank order, on rank ``root`` alone. [collective over comm, backward too]

    Args:
        x: same shape and dtype on every rank; any strides.
        root: rank in ``comm``.
        comm: communicator; default all ranks.

    Returns:
        on ``root`` a new tensor of shape ``(size, *x.shape)``, elsewhere one of shape ``(0, *x.shape)`` (see [Note:
        Results on ranks other than the root]). Backward scatters the root's gradient; ``x`` must require a gradient
        on all ranks or on none.

    Raises:
        RuntimeError: before `init_distributed`.
        ValueError: ``root`` is not a rank of ``comm``.

    Example:
        >>> import bmtrain, torch
        >>> bmtrain.init_distributed()
        >>> bmtrain.distributed.gather(torch.tensor([1.0, 2.0]), 0)
        tensor([[1., 2.]])
    """
    comm = resolve_comm("gather", x, comm)
    check_root(root, comm)
    return _Gather.apply(x, root, comm)  # type: ignore[no-any-return]


@opaque
def reduce(x: Tensor, root: int, op: str = "sum", comm: Communicator | None = None) -> Tensor:
    """Combines the ranks' tensors elementwise, on rank ``root`` alone. [collective over comm, backward too]

    16-bit values are combined in fp32, in rank order, and rounded once.

    Args:
        x: same shape and dtype on every rank; any strides.
        root: rank in ``comm``.
        op: ``sum``, ``avg`` (floating point only), ``max``, ``min`` or ``prod``.
        comm: communicator; default all ranks.

    Returns:
        on ``root`` a new tensor with the shape and dtype of ``x``, elsewhere one of shape ``(0, *x.shape)`` (see
        [Note: Results on ranks other than the root]). Backward of ``sum`` gives every rank the root's gradient, of
        ``avg`` that divided by the number of ranks; the others have none. ``x`` must require a gradient on all
        ranks or on none.

    Raises:
        RuntimeError: before `init_distributed`.
        ValueError: another ``op``, ``avg`` of integers, or ``root`` is not a rank of ``comm``.
        NotImplementedError: in backward, for ``max``, ``min`` and ``prod``.

    Example:
        >>> import bmtrain, torch
        >>> bmtrain.init_distributed()
        >>> bmtrain.distributed.reduce(torch.tensor([1.0, 2.0]), 0)
        tensor([1., 2.])
    """
    comm = resolve_comm("reduce", x, comm)
    check_root(root, comm)
    return _Reduce.apply(x, root, op, comm)  # type: ignore[no-any-return]


def _peer(call: str, argument: str, peer: int, comm: Communicator) -> int:
    if not 0 <= peer < comm.size or peer == comm.rank:
        raise ValueError(
            f"{call}: {argument}: expected a rank of the group, 0 to {comm.size - 1}, other than this rank "
            f"{comm.rank}, got {peer}"
        )
    return peer


def _scattered(rows: Tensor | None, like: Tensor, root: int, comm: Communicator) -> Tensor:
    """This rank's row of the root's ``rows``; ``like`` has a row's shape, dtype and device."""
    label = "scatter"
    if rows is None:
        row = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if row.numel():
            comm.recv(row, root, label).wait()
        return row
    rows = rows.detach().contiguous()
    if like.numel():
        works = [comm.send(rows[peer], peer, label) for peer in range(comm.size) if peer != root]
        for work in works:
            work.wait()
    return fresh_copy(rows[root])


def _gathered_on(x: Tensor, root: int, comm: Communicator) -> Tensor:
    """The ranks' tensors stacked on the root, nothing elsewhere."""
    label = "gather"
    x = x.detach().contiguous()
    at_root = comm.rank == root
    rows = torch.empty((comm.size if at_root else 0, *x.shape), dtype=x.dtype, device=x.device)
    if x.numel() and at_root:
        works = [comm.recv(rows[peer], peer, label) for peer in range(comm.size) if peer != root]
        rows[root].copy_(x)
        for work in works:
            work.wait()
    elif x.numel():
        comm.send(x, root, label).wait()
    return rows


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, src: Tensor, root: int, comm: Communicator) -> Tensor:
        ctx.root, ctx.comm = root, comm
        return _scattered(src if comm.rank == root else None, src[0], root, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = _gathered_on(grad, ctx.root, ctx.comm)
        if ctx.comm.rank != ctx.root:
            rows = grad.new_zeros((ctx.comm.size, *grad.shape))
        return rows, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, root: int, comm: Communicator) -> Tensor:
        ctx.root, ctx.comm = root, comm
        return _gathered_on(x, root, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        like = grad.new_empty(grad.shape[1:])
        rows = grad if ctx.comm.rank == ctx.root else None
        return _scattered(rows, like, ctx.root, ctx.comm), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, root: int, op: str, comm: Communicator) -> Tensor:
        ctx.root, ctx.op, ctx.comm, ctx.shape = root, op, comm, x.shape
        result = fresh_copy(x)
        comm.reduce(result, reduce_op(op), root, "reduce").wait()
        return result if comm.rank == root else x.new_empty((0, *x.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_linear("reduce", ctx.op)
        whole = fresh_copy(grad) if ctx.comm.rank == ctx.root else grad.new_empty(ctx.shape)
        ctx.comm.broadcast(whole, ctx.root, "reduce backward").wait()
        return (whole / ctx.comm.size if ctx.op == "avg" else whole), None, None, None
