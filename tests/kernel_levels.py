"""Running the CPU kernels at a chosen instruction set level, on arrays at odd addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from typing_extensions import Self

from bmtrain import _C

__all__ = ["LEVELS", "Arrays", "level", "odd", "same_bits"]

_ALL = ("base", "neon") if _C.highest_cpu_isa() == "neon" else ("base", "avx2", "avx512")
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


def odd(values: torch.Tensor) -> torch.Tensor:
    """The same values one element behind the beginning of their memory."""
    memory = torch.empty(values.numel() + 1, dtype=values.dtype)
    memory[1:] = values
    return memory[1:]


@dataclass
class Arrays:
    """The tensors that one step works on, some of which may be missing; subclasses name them."""

    def copy(self) -> Self:
        return type(self)(*(t if t is None else t.clone() for t in vars(self).values()))

    def arrays(self) -> list[torch.Tensor]:
        return [t for t in vars(self).values() if t is not None]
