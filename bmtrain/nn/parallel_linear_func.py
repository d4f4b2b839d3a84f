"""A linear layer divided over the ranks of a tensor-parallel group, as one differentiable function.

[Note: Tensor-parallel gradients]
The ranks of a tensor-parallel group compute one loss together. A value that is a sum over the ranks passes its gradient
on unchanged; a value that every rank uses whole collects the sum of the ranks' gradients; a value gathered from slices
gives each rank back the sum of its slice (M. Shoeybi et al., Megatron-LM, 2019, section 3; V. Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.2, for slices of tokens).
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .._base.differentiable_once import differentiable_once
from .._base.opaque import opaque
from .._base.precision import as_autocast_has_it
from .._C import ReduceOp
from .._engine.dropout import divide_features
from ..global_var import context
from ._divide import check_features
from ._intercept import install
from .functional import attention

__all__ = [
    "OpParallelLinear",
    "ReduceType",
    "gather_rows",
    "parallel_linear",
    "reduce_rows",
    "replicate",
    "scatter_rows",
]


class ReduceType(enum.IntEnum):
    """Reduction of the partial outputs of the ranks."""

    ALL_REDUCE = 1  # every rank gets the sum
    REDUCE_SCATTER = 2  # every rank gets its slice, along dim 0, of the sum


def _tp() -> Any:
    return context().groups["tp"]


@opaque
def gather_rows(x: torch.Tensor) -> torch.Tensor:
    """Concatenates the ranks' tensors along dim 0."""
    tp = _tp()
    if tp.size == 1:
        return x
    out = x.new_empty((tp.size * x.shape[0], *x.shape[1:]))
    tp.comm.all_gather(out, x.contiguous(), "tp.gather_rows").wait()
    return out


@opaque
def reduce_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns this rank's slice, along dim 0, of the sum of the ranks' tensors."""
    tp = _tp()
    if tp.size == 1:
        return x
    out = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    tp.reduce_comm.reduce_scatter(out, x.contiguous(), ReduceOp.SUM, "tp.reduce_rows").wait()
    return out


def _sum(x: torch.Tensor) -> torch.Tensor:
    tp = _tp()
    if tp.size == 1:
        return x
    out = x.contiguous().clone()
    tp.reduce_comm.all_reduce(out, ReduceOp.SUM, "tp.sum").wait()
    return out


def _gather_features(x: torch.Tensor) -> torch.Tensor:
    """Concatenates the ranks' tensors along the last dim."""
    tp = _tp()
    return x if tp.size == 1 else torch.cat(gather_rows(x[None]).unbind(0), dim=-1)


def _feature_slice(x: torch.Tensor) -> torch.Tensor:
    tp = _tp()
    width = x.shape[-1] // tp.size
    return x.narrow(-1, tp.rank * width, width)


def _rows_to_features(x: torch.Tensor) -> torch.Tensor:
    """Exchanges this rank's rows with all features for all rows with this rank's features."""
    tp = _tp()
    if tp.size == 1:
        return x
    parts = torch.stack(x.chunk(tp.size, dim=-1))
    out = torch.empty_like(parts)
    tp.comm.all_to_all(out, parts, "tp.rows_to_features").wait()
    return out.flatten(0, 1)


def _features_to_rows(x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_rows_to_features`."""
    tp = _tp()
    if tp.size == 1:
        return x
    parts = x.contiguous()
    out = torch.empty_like(parts)
    tp.comm.all_to_all(out, parts, "tp.features_to_rows").wait()
    return torch.cat(out.chunk(tp.size, dim=0), dim=-1)


class _Replicate(torch.autograd.Function):
    """Identity for a replicated tensor; backward sums gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _sum(grad)


class _ScatterRows(torch.autograd.Function):
    """Reduces partial sums into slices of rows; backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return reduce_rows(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return gather_rows(grad)


@opaque
def replicate(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x``, equal on all ranks, with a gradient that is summed over them."""
    out: torch.Tensor = _Replicate.apply(x)
    return out


@opaque
def scatter_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns this rank's slice, along dim 0, of the sum of the ranks' ``x``; differentiable."""
    out: torch.Tensor = _ScatterRows.apply(x)
    return out


@opaque
def parallel_linear(*arguments: Any, training: bool = True) -> torch.Tensor:
    """`OpParallelLinear.apply`; see [Note: Dropout in divided computations]."""
    out: torch.Tensor = OpParallelLinear.apply(*arguments)
    gathers_output, reduction = arguments[4], arguments[6]
    if _tp().size > 1 and (reduction is not None or not gathers_output):
        divide_features(out if reduction is None and training else None, arguments[0])
        install(attention)
    return out


class OpParallelLinear(torch.autograd.Function):
    """``input @ weight.T + bias`` over slices; see :class:`ColumnParallelLinear` and :class:`RowParallelLinear`.

    ``OpParallelLinear.apply(input, weight, bias, gather_input, gather_output, split_input, reduce_output_type,
    async_gather_chunks=2)``:

    Args:
        input: ``(d0, ..., k)``.
        weight: this rank's slice, ``(out, in)``.
        bias: None, or ``(out,)``; added before ``gather_output``, after a reduction.
        gather_input: the ranks' inputs are concatenated along dim 0.
        gather_output: the ranks' outputs are concatenated along the last dim.
        split_input: the input has all features of this rank's rows; it becomes all rows of this rank's features.
        reduce_output_type: None, or the reduction of the ranks' partial outputs (:class:`ReduceType`).
        async_gather_chunks: number of pieces in which rows are sent, so that communication overlaps with compute.
            Results do not depend on it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gather_input: bool,
        gather_output: bool,
        split_input: bool,
        reduce_output_type: ReduceType | int | None,
        async_gather_chunks: int = 2,
    ) -> torch.Tensor:
        # Before communication: an error on one rank afterwards would leave the others waiting.
        check_features("input", input, weight, weight.shape[1] * (_tp().size if split_input else 1))
        reduction = None if reduce_output_type is None else ReduceType(reduce_output_type)
        if gather_output and reduction is not None and _tp().size > 1:
            raise ValueError(
                f"gather_output: expected False with {reduction.name}, after which outputs are not slices of features"
            )
        if async_gather_chunks < 1:
            raise ValueError(f"async_gather_chunks: expected at least 1, got {async_gather_chunks}")
        is_divided = gather_input or split_input or reduction is ReduceType.REDUCE_SCATTER
        if is_divided and input.dim() < 2 and _tp().size > 1:
            raise ValueError(f"input: expected the ranks' rows along dim 0, got shape {tuple(input.shape)}")
        if reduction is ReduceType.REDUCE_SCATTER:
            rows = input.shape[0] * (_tp().size if gather_input or split_input else 1)
            if rows % _tp().size:
                raise ValueError(
                    f"input: expected a dim 0 that divides by tp_size {_tp().size}, got {rows} rows"
                )
        input, weight = as_autocast_has_it(input), as_autocast_has_it(weight)
        bias = None if bias is None else as_autocast_has_it(bias)
        ctx.save_for_backward(input, weight)
        ctx.has_bias = bias is not None
        ctx.layout = (gather_input and not split_input, gather_output, split_input, reduction)
        gathers_rows = gather_input and not split_input
        if gathers_rows and reduction is None:
            return _finish(_gathered_matmul(input, weight, bias, async_gather_chunks), gather_output)
        x = _rows_to_features(input) if split_input else gather_rows(input) if gathers_rows else input
        if reduction is None:
            return _finish(torch.nn.functional.linear(x, weight, bias), gather_output)
        out = _reduced_matmul(x, weight, reduction, async_gather_chunks)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        gather_input, gather_output, split_input, reduction = ctx.layout
        divide_features(None)  # no row-parallel layer may have followed, as behind a model's head
        if gather_output:
            grad = _feature_slice(grad)
        elif reduction is ReduceType.REDUCE_SCATTER:
            grad = gather_rows(grad)
        grads: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if split_input:
                grads[0] = _features_to_rows(grad_x)
            elif gather_input:
                grads[0] = reduce_rows(grad_x)
            else:
                grads[0] = _sum(grad_x) if reduction is None else grad_x
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            x = _rows_to_features(input) if split_input else gather_rows(input) if gather_input else input
            grads[1] = rows.t() @ x.reshape(-1, x.shape[-1])
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grads[2] = rows.sum(0)
        return tuple(grads)


def _finish(out: torch.Tensor, gather_output: bool) -> torch.Tensor:
    return _gather_features(out).contiguous() if gather_output else out


def _gathered_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_chunks: int
) -> torch.Tensor:
    """Computes ``gather_rows(x) @ weight.T + bias``; later chunks are in flight while the first is multiplied."""
    tp = _tp()
    if tp.size == 1:
        return torch.nn.functional.linear(x, weight, bias)
    arriving = []
    for chunk in x.contiguous().chunk(num_chunks, dim=0):
        gathered = x.new_empty((tp.size, *chunk.shape))
        arriving.append((gathered, tp.comm.all_gather(gathered, chunk, "tp.gather_input")))
    out = x.new_empty((tp.size, *x.shape[:-1], weight.shape[0]))
    begin = 0
    for gathered, work in arriving:
        work.wait()
        rows = gathered.shape[1]
        out[:, begin : begin + rows] = torch.nn.functional.linear(gathered, weight, bias)
        begin += rows
    return out.flatten(0, 1)


def _reduced_matmul(
    x: torch.Tensor, weight: torch.Tensor, reduction: ReduceType, num_chunks: int
) -> torch.Tensor:
    """Computes the sum over ranks of ``x @ weight.T``; a chunk is multiplied while the previous one is reduced."""
    tp = _tp()
    if tp.size == 1:
        return torch.nn.functional.linear(x, weight)
    comm = tp.reduce_comm
    pieces, works = [], []
    if reduction is ReduceType.ALL_REDUCE:
        for chunk in x.chunk(num_chunks, dim=0) if x.dim() > 1 else (x,):
            piece = torch.nn.functional.linear(chunk, weight).contiguous()
            pieces.append(piece)
            works.append(comm.all_reduce(piece, ReduceOp.SUM, "tp.all_reduce_output"))
    else:
        by_rank = x.reshape(tp.size, x.shape[0] // tp.size, *x.shape[1:])
        for chunk in by_rank.chunk(num_chunks, dim=1):
            partial = torch.nn.functional.linear(chunk, weight).contiguous()
            piece = partial.new_empty(partial.shape[1:])
            pieces.append(piece)
            works.append(comm.reduce_scatter(piece, partial, ReduceOp.SUM, "tp.scatter_output"))
    for work in works:
        work.wait()
    return torch.cat(pieces, dim=0)
