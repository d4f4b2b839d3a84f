"""Fused output projection and cross-entropy, without the logits of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .._base.arguments import require_integer, require_tensor
from .._base.differentiable_once import differentiable_once
from .._base.precision import as_autocast_has_it
from ._function import CrossEntropyOptions, VocabularySlice, cross_entropy_rows
from .cross_entropy import FusedCrossEntropy, check_range, reduce_rows

__all__ = ["fused_linear_cross_entropy"]


class _LinearCrossEntropyRows(torch.autograd.Function):
    """Loss of each row. Forward and backward compute the logits of ``chunk`` rows at a time.

    Backward recomputes them instead of keeping gradients from forward: gradients of an unscaled loss would underflow in
    16-bit floats.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, options: CrossEntropyOptions, chunk: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, target)
        ctx.options, ctx.chunk = options, chunk
        losses = [
            cross_entropy_rows(linear(hidden[rows], weight), target[rows], options)
            for rows in _chunks(len(hidden), chunk)
        ]
        return torch.cat(losses)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, target = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:  # summed over chunks in at least fp32
            grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows in _chunks(len(hidden), ctx.chunk):
            grad = _logits_gradient(linear(hidden[rows], weight), target[rows], ctx.options, grad_loss[rows])
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _chunks(num_rows: int, chunk: int) -> Iterator[slice]:
    for start in range(0, max(num_rows, 1), chunk):  # at least one, so that no rows have a loss of no rows
        yield slice(start, start + chunk)


def _logits_gradient(
    logits: Tensor, target: Tensor, options: CrossEntropyOptions, grad_loss: Tensor
) -> Tensor:
    with torch.enable_grad():
        loss = cross_entropy_rows(logits.requires_grad_(), target, options)
    return torch.autograd.grad(loss, logits, grad_loss)[0]


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int = 1024,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of ``linear(hidden, weight)`` without ever holding the ``N x C`` logits.

    Equal to ``FusedCrossEntropy(...)(linear(hidden, weight), targets)``: logits in the dtype of ``hidden``, everything
    after them in fp32. Logits exist for ``chunk`` rows at a time and are computed again in backward, which costs one
    matrix product more.

    Args:
        hidden: ``(..., D)``, fp16, bf16, fp32 or fp64.
        weight: ``(C, D)``, of the same dtype: the output projection, or the table of a tied embedding.
        targets: ``(...)``, int32 or int64 class indices, or ``ignore_index``.
        chunk: rows whose logits exist together.
        class_weight: ``(C,)`` weight of each class.
        ignore_index: target value of rows that count neither in the loss nor in the mean.
        reduction: ``"mean"`` (over the weights of the rows that count), ``"sum"`` or ``"none"``.
        label_smoothing: share of the target probability spread over all classes, in [0, 1].

    Returns:
        A scalar, or with ``reduction="none"`` the shape of ``targets``; fp32 (fp64 for fp64).

    Raises:
        TypeError: a dtype does not fit, or an argument is of another type.
        ValueError: a shape, the dtype of ``weight``, ``chunk`` or an option does not fit.
        IndexError: a target lies outside ``[0, C)`` and is not ``ignore_index`` (on the CPU).

    Example:
        >>> import torch
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
        >>> table = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> round(fused_linear_cross_entropy(hidden, table, torch.tensor([0, 1]), chunk=1).item(), 4)
        0.2395
    """
    for name, value in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        require_tensor(name, value)
    chunk = require_integer("chunk", chunk, 1)
    if class_weight is not None:
        require_tensor("class_weight", class_weight)
        if class_weight.dim() != 1 or not class_weight.is_floating_point():
            raise ValueError(
                f"class_weight: expected 1-D of a float dtype, got shape {tuple(class_weight.shape)} of "
                f"{class_weight.dtype}"
            )
    options = FusedCrossEntropy(class_weight, ignore_index, reduction, label_smoothing)
    hidden, weight = as_autocast_has_it(hidden), as_autocast_has_it(weight)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight: expected shape (C, {hidden.shape[-1]}) and {hidden.dtype} as of hidden, got "
            f"{tuple(weight.shape)} and {weight.dtype}"
        )
    if not hidden.is_floating_point() or targets.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"expected floating hidden and int32 or int64 targets, got {hidden.dtype} and {targets.dtype}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets: expected shape {tuple(hidden.shape[:-1])}, got {tuple(targets.shape)}")
    num_classes = weight.shape[0]
    rows = hidden.reshape(-1, hidden.shape[-1])
    target = targets.reshape(-1).to(device=hidden.device, dtype=torch.int64)
    check_range(target, num_classes, ignore_index, "targets")
    class_weight = options.weight_for(rows, num_classes)
    columns = VocabularySlice(0, num_classes, None)
    row_options = CrossEntropyOptions(class_weight, ignore_index, float(label_smoothing), columns)
    function: Any = _LinearCrossEntropyRows
    loss: Tensor = function.apply(rows, weight, target, row_options, chunk)
    return reduce_rows(loss, target, class_weight, ignore_index, reduction, targets.shape)
