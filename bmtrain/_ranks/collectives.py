"""Collectives that autograd can differentiate, and the exchange of activations between pipeline stages.

[Note: Backward of a collective]
Every rank differentiates its own copy of the loss: the backward of `all_gather` and `all_reduce` uses this rank's
incoming gradient alone and does not communicate. This is not the adjoint of the collective over all ranks, and
programs rely on it. Only `broadcast` and `reduce_scatter` communicate in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.opaque import opaque
from .._C import Communicator
from ..errors import UnevenSplitError
from .comm import reduce_op, wire_device
from .context import context
from .messages import DTYPES, MAX_DIMS, header_of, read_header
from .operands import check_root, fresh_copy, require_linear, resolve_comm


@opaque
def all_reduce(x: Tensor, op: str = "sum", comm: Communicator | None = None) -> Tensor:
    """Combines the ranks' tensors elementwise; every rank has the result. [collective over comm]

    16-bit values are combined in fp32, in rank order, and rounded once.

    Args:
        x: same shape and dtype on every rank; any strides.
        op: ``sum``, ``avg`` (floating point only), ``max``, ``min`` or ``prod``.
        comm: communicator; default all ranks.

    Returns:
        a new tensor with the shape and dtype of ``x``. Backward (see [Note: Backward of a collective]): ``sum`` passes
        the gradient on, ``avg`` divides it by the number of ranks, ``max`` and ``min`` pass it where this rank's value
        is the result, ``prod`` multiplies it by the product of the other ranks' values.

    Raises:
        RuntimeError: before `init_distributed`.
        ValueError: another ``op``, or ``avg`` of integers.

    Example:
        >>> import bmtrain, torch
        >>> bmtrain.init_distributed()
        >>> all_reduce(torch.tensor([1.0, 2.0]), "avg")
        tensor([1., 2.])
    """
    comm = resolve_comm("all_reduce", x, comm)
    if op in ("max", "min"):
        return _Extremum.apply(x, op, comm)  # type: ignore[no-any-return]
    if op == "prod" and x.is_floating_point():
        return _Product.apply(x, comm)  # type: ignore[no-any-return]
    return _Sum.apply(x, op, comm)  # type: ignore[no-any-return]


@opaque
def all_gather(x: Tensor, comm: Communicator | None = None) -> Tensor:
    """Stacks the ranks' tensors in rank order. [collective over comm]

    Args:
        x: same shape and dtype on every rank; any strides.
        comm: communicator; default all ranks.

    Returns:
        a new tensor of shape ``(size, *x.shape)``. Backward takes this rank's own slice of this rank's gradient:
        multiply a loss over all ranks' tensors (contrastive losses), which each rank computes, by
        ``bmtrain.world_size()``. This multiplies the gradient of a parameter behind the gather too (a learnt
        temperature): apply it before. A loss of this rank's rows against the columns of all ranks needs the gradients
        of the other ranks' losses as well: concatenate :func:`broadcast` from each rank, whose backward sums them.

    Raises:
        RuntimeError: before `init_distributed`.

    Example:
        >>> import bmtrain, torch
        >>> bmtrain.init_distributed()
        >>> all_gather(torch.tensor([1.0, 2.0])).shape
        torch.Size([1, 2])
    """
    return _AllGather.apply(x, resolve_comm("all_gather", x, comm))  # type: ignore[no-any-return]


@opaque
def broadcast(src: Tensor, root: int, comm: Communicator | None = None) -> Tensor:
    """The tensor of rank ``root``, on every rank. [collective over comm, backward too]

    Args:
        src: gives shape and dtype on every rank, and the values on ``root``.
        root: rank in ``comm``.
        comm: communicator; default all ranks.

    Returns:
        a new tensor. Backward gives every rank the sum of the ranks' gradients, so that ``src`` must require a
        gradient on all ranks or on none.

    Raises:
        RuntimeError: before `init_distributed`.
        ValueError: ``root`` is not a rank of ``comm``.

    Example:
        >>> bmtrain.distributed.broadcast(torch.tensor([1.0, 2.0]), 0)
        tensor([1., 2.])
    """
    comm = resolve_comm("broadcast", src, comm, "src")
    check_root(root, comm)
    return _Broadcast.apply(src, root, comm)  # type: ignore[no-any-return]


@opaque
def reduce_scatter(x: Tensor, op: str = "sum", comm: Communicator | None = None) -> Tensor:
    """Combines the ranks' tensors elementwise; keeps this rank's slice of dim 0. [collective over comm, backward too]

    Args:
        x: same shape and dtype on every rank; ``x.shape[0]`` must divide by the number of ranks.
        op: ``sum``, ``avg`` (floating point only), ``max``, ``min`` or ``prod``.
        comm: communicator; default all ranks.

    Returns:
        a new tensor of shape ``(x.shape[0] // size, *x.shape[1:])``. Backward of ``sum`` and ``avg`` concatenates the
        ranks' gradients; the others have none.

    Raises:
        RuntimeError: before `init_distributed`.
        ValueError: another ``op``, or a first dimension that does not divide (an AssertionError as well).
        NotImplementedError: in backward, for ``max``, ``min`` and ``prod``.

    Example:
        >>> bmtrain.distributed.reduce_scatter(torch.ones(bmtrain.world_size(), 2))
        tensor([[1., 1.]])
    """
    comm = resolve_comm("reduce_scatter", x, comm)
    if x.dim() == 0 or x.shape[0] % comm.size != 0:
        raise UnevenSplitError(
            f"reduce_scatter: expected a first dimension that divides by the {comm.size} ranks of group "
            f"{comm.name!r}, got shape {tuple(x.shape)}"
        )
    return _ReduceScatter.apply(x, op, comm)  # type: ignore[no-any-return]


def send_activations(x: Tensor, next_rank: int, comm: Communicator) -> None:
    """Sends a tensor, its shape and dtype included, to a rank that calls `recv_activations`.

    Returns when the data has left. Not differentiable.

    Args:
        x: any shape with at most 30 dimensions; any strides.
        next_rank: rank in ``comm``.
        comm: communicator, usually ``config["pipe_comm"]``.

    Raises:
        RuntimeError: before `init_distributed`.
        ValueError: a dtype or shape that cannot be sent.
    """
    comm = resolve_comm("send_activations", x, comm)
    if x.dtype not in DTYPES or x.dim() > MAX_DIMS:
        raise ValueError(
            f"send_activations: expected at most {MAX_DIMS} dimensions and a dtype of {', '.join(map(str, DTYPES))}, "
            f"got shape {tuple(x.shape)} of {x.dtype}"
        )
    works = [
        comm.send(header_of(x, wire_device(comm)), next_rank, "send_activations"),
        comm.send(x.detach().contiguous(), next_rank, "send_activations"),
    ]
    for work in works:
        work.wait()


def recv_activations(prev_rank: int, comm: Communicator) -> Tensor:
    """Receives what `send_activations` sends: a new tensor on the run device that requires no gradient.

    Args:
        prev_rank: rank in ``comm``.
        comm: communicator, usually ``config["pipe_comm"]``.

    Raises:
        RuntimeError: before `init_distributed`.
    """
    device = context("recv_activations()").device
    header = header_of(None, wire_device(comm))
    comm.recv(header, prev_rank, "recv_activations").wait()
    shape, dtype = read_header(header)
    x = torch.empty(shape, dtype=dtype, device=device)
    comm.recv(x, prev_rank, "recv_activations").wait()
    return x


def _gathered(x: Tensor, comm: Communicator) -> Tensor:
    result = torch.empty((comm.size, *x.shape), dtype=x.dtype, device=x.device)
    comm.all_gather(result, x.detach().contiguous(), "all_gather").wait()
    return result


class _Sum(torch.autograd.Function):
    """Sum and average, and the integer product, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, comm: Communicator) -> Tensor:
        ctx.divisor = comm.size if op == "avg" else 1
        result = fresh_copy(x)
        comm.all_reduce(result, reduce_op(op), "all_reduce").wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad if ctx.divisor == 1 else grad / ctx.divisor), None, None


class _Extremum(torch.autograd.Function):
    """Maximum and minimum. Keeps a mask, not the result: the caller may overwrite that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, comm: Communicator) -> Tensor:
        result = fresh_copy(x)
        comm.all_reduce(result, reduce_op(op), "all_reduce").wait()
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x.detach() == result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (chosen,) = ctx.saved_tensors
        return torch.where(chosen, grad, torch.zeros_like(grad)), None, None


class _Product(torch.autograd.Function):
    """Product of floating-point tensors.

    All ranks gather, whether or not they need a gradient: they must agree on the messages. The product of the other
    ranks' values is not the result divided by the own value, which fails at 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        values = _gathered(x, comm)
        if x.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        before = torch.ones_like(values[0])
        for value in values[: comm.rank]:
            before = before * value
        if ctx.needs_input_grad[0]:
            others = before
            for value in values[comm.rank + 1 :]:
                others = others * value
            ctx.save_for_backward(others)
        result = before
        for value in values[comm.rank :]:
            result = result * value
        return result.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (others,) = ctx.saved_tensors
        return (grad * others).to(grad.dtype), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.rank = comm.rank
        return _gathered(x, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[ctx.rank], None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, src: Tensor, root: int, comm: Communicator) -> Tensor:
        ctx.comm = comm
        result = fresh_copy(src)
        comm.broadcast(result, root, "broadcast").wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Sum.apply(grad, "sum", ctx.comm), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, comm: Communicator) -> Tensor:
        ctx.op, ctx.comm = op, comm
        shape = (x.shape[0] // comm.size, *x.shape[1:])
        result = torch.empty(shape, dtype=x.dtype, device=x.device)
        comm.reduce_scatter(result, x.detach().contiguous(), reduce_op(op), "reduce_scatter").wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_linear("reduce_scatter", ctx.op)
        whole = _gathered(grad, ctx.comm).flatten(0, 1)
        return (whole / ctx.comm.size if ctx.op == "avg" else whole), None, None
