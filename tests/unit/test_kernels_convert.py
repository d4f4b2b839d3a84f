"""Casts between fp32, bf16 and fp16: every 16-bit value, every tie, any size and alignment."""

from __future__ import annotations

import pytest
import torch
from kernel_levels import LEVELS, level, same_bits

from bmtrain import _ops

SIZES = (0, 1, 31, 32, 33, 255, 1_000_001)
NARROW = (torch.bfloat16, torch.float16)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def hard_to_round(dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit value, the midpoints between neighbours, and the fp32 numbers next to both."""
    exact = every_value(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    middle = ((exact[1:].double() + exact[:-1].double()) / 2).float()
    largest = exact[-1].double() * 2 - exact[-2].double()  # where rounding to infinity begins, and beyond
    beyond = torch.tensor([largest, 2 * largest, 3.4e38, 1e-45, 1e-40, torch.inf, torch.nan]).float()
    x = torch.cat([exact, middle, (exact[-1] + largest.float()).reshape(1) / 2, beyond])
    x = torch.cat([x, -x])
    return torch.cat([x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(-torch.inf))])


def rounded(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A sum of one tensor, in the dtype of ``out``."""
    return _ops.ordered_sum_(out, [x])


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", NARROW)
def test_every_16_bit_value_widens_exactly(dtype: torch.dtype, name: str) -> None:
    x = every_value(dtype)
    with level(name):
        got = rounded(x, torch.empty(x.shape))
    assert same_bits(got, x.float())


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_to_nearest_even(dtype: torch.dtype, name: str) -> None:
    x = hard_to_round(dtype)
    with level(name):
        got = rounded(x, torch.empty(x.shape, dtype=dtype))
    assert same_bits(got, x.to(dtype))


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("source", (torch.float32, *NARROW))
@pytest.mark.parametrize("target", (torch.float32, *NARROW))
def test_any_size_and_alignment(source: torch.dtype, target: torch.dtype, name: str) -> None:
    data = torch.randn(SIZES[-1] + 3).to(source)
    with level(name):
        for size in SIZES if name != "base" else SIZES[:-1]:
            for offset in (0, 1, 3):
                x = data[offset : offset + size]
                memory = torch.full((size + 8,), 7, dtype=target)
                rounded(x, memory[offset : offset + size])
                assert torch.equal(memory[offset : offset + size], x.to(target))
                assert (memory[:offset] == 7).all()
                assert (memory[offset + size :] == 7).all()


def test_nan_stays_nan() -> None:
    nan = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32).view(torch.float32)
    for name in LEVELS:
        with level(name):
            for dtype in NARROW:
                assert rounded(nan, torch.empty(4, dtype=dtype)).isnan().all()


def test_bad_tensors_are_named() -> None:
    with pytest.raises(TypeError, match=r"sources and out all of float64, or none, got Double and Float"):
        rounded(torch.empty(2, dtype=torch.float64), torch.empty(2))
    with pytest.raises(TypeError, match=r"out: expected .*got Int"):
        rounded(torch.empty(2), torch.empty(2, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"sources: expected .*got Int"):
        rounded(torch.empty(2, dtype=torch.int32), torch.empty(2))
    with pytest.raises(TypeError, match=r"sources: expected a contiguous tensor"):
        rounded(torch.empty(4)[::2], torch.empty(2))
    with pytest.raises(ValueError, match=r"expected sources with 2 elements like out, got 3"):
        rounded(torch.empty(3), torch.empty(2))
