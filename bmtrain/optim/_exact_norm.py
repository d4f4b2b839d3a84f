"""Norms whose bits do not depend on the distribution of elements over ranks.

[Note: Exact sums]
A floating-point sum depends on its order, and the order on where shards begin and end. So the terms are turned into
whole numbers of 60 bits, relative to a power of two above the largest term of all ranks, in three pieces of 20 bits:
integers have the same sum in any order. In each term, digits below 2^-60 of the largest term are dropped. Terms are
computed in fp64, where the square of an fp32 number is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_PIECES = 3
_BITS = 20  # of a piece; an int64 holds the sum of 2**43 of them
#: Elements that are widened at a time; on a processor they stay in its cache, and a sum of pieces is exact in fp64.
_CHUNK, _CPU_CHUNK = 1 << 20, 1 << 16


def exact_norm(
    gradients: Iterable[Tensor],
    p: float,
    largest: float,
    add_up: Callable[[Tensor], Tensor],
    device: torch.device,
) -> float:
    """Returns the p-norm of gradients that are distributed over ranks.

    Args:
        gradients: gradients of this rank; each logical element is on one rank.
        p: 1 or 2.
        largest: the largest magnitude on all ranks.
        add_up: adds int64 tensors over the ranks.
        device: device of these tensors.

    Raises:
        ValueError: for another p, whose powers are not the same bits on all paths of a processor.
    """
    if p not in (1.0, 2.0):
        raise ValueError(f"norm_type: expected 1, 2 or 'inf' with virtual shards, got {p:g}")
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = max(math.frexp(largest)[1], -1000)  # every |g| is below 2**exponent
    unit = math.ldexp(1.0, -exponent)
    pieces = torch.zeros(_PIECES, dtype=torch.int64, device=device)
    for gradient in gradients:
        for chunk in gradient.reshape(-1).split(_CHUNK if gradient.is_cuda else _CPU_CHUNK):
            pieces += _pieces_of(chunk.to(torch.float64, copy=True).abs_().mul_(unit), p)
    total = 0
    for piece in add_up(pieces).tolist():
        total = (total << _BITS) + piece
    bits = _BITS * _PIECES
    if p == 2:
        return math.ldexp(math.sqrt(total), exponent - bits // 2)
    return math.ldexp(float(total), exponent - bits)


def _pieces_of(rest: Tensor, p: float) -> Tensor:
    """Returns the sums of the pieces of powers of numbers in [0, 1), which it overwrites."""
    if p == 2:
        rest.mul_(rest)
    sums = []
    for _ in range(_PIECES):
        sums.append((whole := rest.mul_(2.0**_BITS).floor()).sum())
        rest.sub_(whole)
    return torch.stack(sums).to(torch.int64)
