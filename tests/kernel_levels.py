"""Running the CPU kernels at a chosen instruction set level."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bmtrain import _C

__all__ = ["LEVELS", "level", "same_bits"]

_ALL = ("base", "avx2", "avx512")
LEVELS = _ALL[: _ALL.index(_C.highest_cpu_isa()) + 1]


@contextmanager
def level(name: str) -> Iterator[None]:
    """Use the kernels of one level."""
    before = _C.cpu_isa()
    _C.force_cpu_isa(name)
    try:
        yield
    finally:
        _C.force_cpu_isa(before)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, any NaN being like any other."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same = (a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())
    return bool(same.all())
