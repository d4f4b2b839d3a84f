"""Cross-entropy that takes 16-bit logits and computes in fp32, also over a divided vocabulary."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from .._base.arguments import require_between, require_integer, require_tensor
from .._base.deprecate import warn_once
from ._function import CrossEntropyOptions, VocabularySlice, cross_entropy_rows

__all__ = ["FusedCrossEntropy"]


class FusedCrossEntropy(torch.nn.Module):
    r"""Cross-entropy between logits and class indices.

    The loss equals :func:`torch.nn.functional.cross_entropy` on ``input.float()``, without logits or softmax in fp32:
    only the logits themselves and two numbers per row are saved for backward.

    Args:
        weight: ``(C,)`` weight of each class, any float dtype; with ``parallel`` of the whole vocabulary.
        ignore_index: target value of rows that count neither in the loss nor in the mean.
        reduction: ``"mean"`` (over the weights of the rows that count), ``"sum"`` or ``"none"``.
        label_smoothing: share of the target probability spread over all classes, in [0, 1].
        parallel: the logits are this rank's slice of the vocabulary: rank ``j`` of the tensor-parallel group
            holds columns ``[j * C / tp, (j + 1) * C / tp)``; targets are equal on all ranks of the group.
            Collective over that group; needs :func:`bmtrain.init_distributed`.
        inplace: write the gradient over the logits in backward, which saves memory of their size. The tensor of logits
            then has the gradient, and a second backward through the loss raises.

    Shape:
        Input ``(N, C)``, ``(C,)`` or ``(N, C, d1, ...)``; target the same without ``C``, int32 or int64. The
        result is a scalar, or has the shape of target with ``reduction="none"``; fp32 (fp64 for fp64 logits).

    Raises:
        TypeError: a dtype does not fit, or an argument is of another type.
        ValueError: an option, a shape or the size of ``weight`` does not fit.
        IndexError: a target lies outside ``[0, C)`` and is not ``ignore_index`` (on the CPU; on a GPU the
            device reports it).

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16, requires_grad=True)
        >>> loss = FusedCrossEntropy()(logits, torch.tensor([0, -100]))
        >>> loss.dtype, round(loss.item(), 4)
        (torch.float32, 0.1269)
        >>> loss.backward()
        >>> logits.grad
        tensor([[-0.1191,  0.1191],
                [ 0.0000,  0.0000]], dtype=torch.bfloat16)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
        *,
        inplace: bool | None = None,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
        require_between("label_smoothing", label_smoothing, 0.0, 1.0)
        ignore_index = require_integer("ignore_index", ignore_index, -sys.maxsize)
        if weight is not None:
            require_tensor("weight", weight)
        if weight is not None and (not weight.is_floating_point() or weight.dim() != 1):
            raise ValueError(
                f"weight: expected 1-D of a float dtype, got shape {tuple(weight.shape)} of {weight.dtype}"
            )
        if inplace is not None:
            unless = " unless backward is to take the memory of the logits" if inplace else ""
            warn_once(
                "FusedCrossEntropy.inplace",
                f"FusedCrossEntropy(inplace={inplace}) is deprecated: leave it out{unless}",
            )
        self.register_buffer("weight", weight)
        self.weight: Tensor | None
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.parallel = parallel
        self.inplace = bool(inplace)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        _check_dtypes(input, target)
        rows = _as_rows(input, target)
        width = rows.shape[1]
        columns = _vocabulary_slice(width) if self.parallel else VocabularySlice(0, width, None)
        flat_target = target.reshape(-1).to(device=rows.device, dtype=torch.int64)
        check_range(flat_target, columns.total, self.ignore_index)
        weight = self.weight_for(rows, columns.total)
        options = CrossEntropyOptions(
            weight, self.ignore_index, float(self.label_smoothing), columns, self.inplace
        )
        loss = cross_entropy_rows(rows, flat_target, options)
        return reduce_rows(loss, flat_target, weight, self.ignore_index, self.reduction, target.shape)

    def weight_for(self, rows: Tensor, total: int) -> Tensor | None:
        """Returns the weights of ``total`` classes in the dtype and on the device of the computation on ``rows``."""
        if self.weight is None:
            return None
        if self.weight.numel() != total:
            raise ValueError(
                f"weight must have one element for each of the {total} classes, got {self.weight.numel()}"
            )
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        return self.weight.to(device=rows.device, dtype=dtype)

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, parallel={self.parallel}, inplace={self.inplace}"
        )


def _check_dtypes(input: Tensor, target: Tensor) -> None:
    require_tensor("input", input)
    require_tensor("target", target)
    if not input.is_floating_point():
        raise TypeError(f"input: expected float16, bfloat16, float32 or float64, got {input.dtype}")
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: expected class indices of dtype int32 or int64, got {target.dtype}")


def _as_rows(input: Tensor, target: Tensor) -> Tensor:
    """Returns the logits as ``(N, C)``: a view for the usual shapes, classes moved last for ``(N, C, d1, ...)``."""
    if input.dim() == 0:
        raise ValueError("input must have a dimension of classes, got a 0-d tensor")
    class_dim = 0 if input.dim() == 1 else 1
    expected = input.shape[:class_dim] + input.shape[class_dim + 1 :]
    if target.shape != expected:
        raise ValueError(
            f"target must have the shape of input without its classes, {tuple(expected)} for input "
            f"{tuple(input.shape)}, got {tuple(target.shape)}"
        )
    num_classes = input.shape[class_dim]
    if input.dim() == 1:
        return input.unsqueeze(0)
    return input if input.dim() == 2 else input.movedim(1, -1).reshape(-1, num_classes)


def _vocabulary_slice(width: int) -> VocabularySlice:
    from ..global_var import context

    group = context("FusedCrossEntropy(parallel=True)").groups["tp"]
    comm = group.comm if group.size > 1 else None
    return VocabularySlice(start=group.rank * width, total=group.size * width, comm=comm)


def reduce_rows(
    loss: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, shape: torch.Size
) -> Tensor:
    """Reduces the losses of rows by ``reduction``; ``shape`` is the shape of the targets."""
    if reduction == "none":
        return loss.reshape(shape)
    total = loss.sum()
    if reduction == "sum":
        return total
    counted = target != ignore_index
    if weight is None:
        return total / counted.sum()
    return total / weight[torch.where(counted, target, 0)].mul(counted).sum()


def check_range(target: Tensor, num_classes: int, ignore_index: int, name: str = "target") -> None:
    """Raises IndexError for a class index out of range, where the check does not wait for a device."""
    if target.device.type != "cpu":
        return  # reading the answer would stop the host; the device reports an index out of range itself
    bad = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise IndexError(
            f"{name} {int(target[row])} in row {row} is out of range: expected [0, {num_classes}) or "
            f"ignore_index {ignore_index}"
        )
