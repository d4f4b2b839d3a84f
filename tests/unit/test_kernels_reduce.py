"""Ordered sums, norms and finite checks against fp64, at every level, thread count, size and alignment."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_levels import LEVELS, level, same_bits

from bmtrain import _ops

SIZES = (0, 1, 31, 32, 33, 255, 1_000_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype)


def in_order(sources: list[torch.Tensor], factor: float, old: torch.Tensor | None) -> torch.Tensor:
    """The definition, by torch operations of one rounding each."""
    wide = torch.float64 if sources[0].dtype == torch.float64 else torch.float32
    total = sources[0].to(wide)
    for source in sources[1:]:
        total = total + source.to(wide)
    total = total * torch.tensor(factor, dtype=wide)
    return (total if old is None else old.to(wide) + total).to(sources[0].dtype)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64))
def test_sum_is_in_order_and_rounded_once(dtype: torch.dtype, name: str) -> None:
    with level(name):
        for size in SIZES:
            if name == "base" and size > 1000:
                continue
            for num in (1, 2, 4):
                sources = [numbers(size + 3, dtype, seed)[seed % 3 :][:size] for seed in range(num)]
                for old, factor in ((None, 1.0), (numbers(size, dtype, 9), 0.3)):
                    out = torch.full((size + 2,), 7, dtype=dtype)
                    if old is not None:
                        out[1 : size + 1] = old
                    _ops.ordered_sum_(out[1 : size + 1], sources, accumulate=old is not None, factor=factor)
                    assert same_bits(out[1 : size + 1], in_order(sources, factor, old))
                    assert out[0] == 7
                    assert out[-1] == 7


def test_sum_may_write_to_a_source_and_may_have_none() -> None:
    a, b = numbers(100, torch.bfloat16, 1), numbers(100, torch.bfloat16, 2)
    expected = in_order([a, b], 1.0, None)
    assert torch.equal(_ops.ordered_sum_(b, [a, b]), expected)
    assert torch.equal(_ops.ordered_sum_(b, []), torch.zeros(100, dtype=torch.bfloat16))


def test_sum_of_special_values_is_alike_at_all_levels() -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 6e-8, 65504.0, 3e38, math.inf, -math.inf, math.nan])
    for dtype in DTYPES:
        a = special.repeat_interleave(10).to(dtype)
        b = special.repeat(10).to(dtype)
        results = []
        for name in LEVELS:
            with level(name):
                results.append(_ops.ordered_sum_(torch.empty_like(a), [a, b]))
        assert all(same_bits(r, in_order([a, b], 1.0, None)) for r in results)


def test_sum_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="sources with 2 elements like out, got 3"):
        _ops.ordered_sum_(torch.empty(2), [torch.empty(3)])
    with pytest.raises(TypeError, match="sources of Float like the first, got Half"):
        _ops.ordered_sum_(torch.empty(2), [torch.empty(2), torch.empty(2).half()])
    with pytest.raises(TypeError, match="expected float32, float16, bfloat16 or float64, got Long"):
        _ops.ordered_sum_(torch.empty(2).long(), [torch.empty(2).long()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_against_fp64(dtype: torch.dtype) -> None:
    for size in SIZES:
        x = numbers(size + 1, dtype)[1:]
        wide = x.double().abs()
        for name in LEVELS:
            with level(name):
                assert _ops.squared_sum([x]).item() == pytest.approx(wide.square().sum().item(), rel=1e-13)
                assert _ops.abs_power_sum([x], 3).item() == pytest.approx(wide.pow(3).sum().item(), rel=1e-12)
                assert _ops.abs_max([x]).item() == (wide.max().item() if size else 0)


def test_norms_are_alike_at_all_levels_and_threads() -> None:
    tensors = [numbers(100_003, torch.float32), numbers(70_001, torch.bfloat16), numbers(5, torch.float16)]
    before = torch.get_num_threads()
    sums = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for name in LEVELS:
                with level(name):
                    sums.add((_ops.squared_sum(tensors).item(), _ops.abs_power_sum(tensors, 1.5).item()))
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1


def test_squares_neither_overflow_nor_vanish() -> None:
    assert _ops.squared_sum([torch.full((100,), 3e38)]).item() == pytest.approx(100 * 9e76, rel=1e-6)
    tiny = torch.full((100,), 1e-45)
    assert _ops.squared_sum([tiny]).item() == pytest.approx(100 * tiny[0].double().item() ** 2, rel=1e-12)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", (math.inf, -math.inf, math.nan))
def test_one_bad_element_is_found_anywhere(bad: float, dtype: torch.dtype, name: str) -> None:
    with level(name):
        for size in (1, 16, 31, 33, 40_000):
            for position in {0, size // 2, size - 1}:
                x = numbers(size, dtype)
                x[position] = bad
                assert not math.isfinite(_ops.squared_sum([torch.ones(3), x]).item())
                assert not math.isfinite(_ops.abs_max([torch.ones(3), x]).item())
                assert math.isnan(_ops.abs_max([x]).item()) == math.isnan(bad)
                assert math.isinf(_ops.abs_max([x]).item()) != math.isnan(bad)


def test_layout_does_not_matter_and_nothing_is_fine() -> None:
    x = numbers(6000, torch.float32).view(60, 100)
    for view in (x.t(), x[:, ::2], x[3:7]):
        assert _ops.squared_sum([view]).item() == pytest.approx(
            view.double().square().sum().item(), rel=1e-13
        )
    assert _ops.squared_sum([]).item() == _ops.abs_max([]).item() == 0
    with pytest.raises(ValueError, match="p: expected a finite number above 0, got 0"):
        _ops.abs_power_sum([x], 0)


def test_fakes_have_the_shape_of_the_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(5, dtype=torch.bfloat16)
        assert _ops.squared_sum([x]).dtype == torch.float64
        assert _ops.abs_max([x]).shape == ()
        assert _ops.ordered_sum_(torch.empty(5), [x]).shape == (5,)
