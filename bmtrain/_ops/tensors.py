"""Sums and reductions of tensors.

Reductions take a list of tensors of any shapes, fp32, fp16 and bf16 mixed; their results are bit-identical for every
number of threads and every instruction set level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._base.arguments import require_tensor

_ops = torch.ops.bmtrain


def ordered_sum_(
    out: Tensor, sources: Sequence[Tensor], *, accumulate: bool = False, factor: float = 1.0
) -> Tensor:
    """Adds ``sources`` in order and writes ``factor`` times the sum, plus the old ``out`` if ``accumulate``.

    All contiguous, and sources of one dtype: of the dtype of ``out`` (fp64 included), or on a CPU any of fp32, fp16 and
    bf16 with any other. 16-bit values are added in fp32 and rounded once.

    Example:
        >>> ordered_sum_(torch.ones(2), [torch.ones(2), torch.ones(2)], accumulate=True, factor=0.5)
        tensor([2., 2.])
    """
    _ops.ordered_sum_(out, list(sources), accumulate, factor)
    return out


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies tensors of any float dtypes in place by one number, in fp32 or wider, rounded once.

    Args:
        tensors: of one device; on a GPU fp32, fp16 or bf16 and contiguous.
        factor: one element, fp32 or fp64; read on the device, so that the host does not wait for it.

    Example:
        >>> x = torch.ones(2)
        >>> scale_([x], torch.tensor(0.5)); x
        tensor([0.5000, 0.5000])
    """
    require_tensor("factor", factor)
    if tensors:
        _ops.scale_(list(tensors), factor.to(tensors[0].device))
        torch.autograd.graph.increment_version(list(tensors))


def squared_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squares of all elements, a 0-dim fp64 tensor; finite if and only if every element is."""
    return _tensor(
        _ops.squared_sum(list(tensors)) if tensors else torch.zeros((), dtype=torch.float64, device="cpu")
    )


def abs_max(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the largest magnitude, a 0-dim fp32 tensor: NaN if an element is NaN, 0 without elements."""
    return _tensor(_ops.abs_max(list(tensors)) if tensors else torch.zeros((), device="cpu"))


def abs_power_sum(tensors: Sequence[Tensor], p: float) -> Tensor:
    """Returns the sum of ``|x| ** p`` for a finite p > 0, a 0-dim fp64 tensor. For p = 2 squared_sum is far faster."""
    return _tensor(
        _ops.abs_power_sum(list(tensors), p)
        if tensors
        else torch.zeros((), dtype=torch.float64, device="cpu")
    )


def _tensor(result: Tensor) -> Tensor:  # torch.ops are untyped
    return result
