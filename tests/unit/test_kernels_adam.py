"""The fused Adam pass against its formula in fp64, and against itself: levels, threads, ranges, alignments."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_levels import LEVELS, Arrays, level, odd, same_bits
from optimizer_steps import AdamRanges, DeltaSums, adam_step

SIZES = (0, 1, 31, 32, 33, 255, 1_000_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Problem(Arrays):
    """Arrays of one range, each at an odd address."""

    weight: torch.Tensor
    rounded: torch.Tensor | None
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def step(self, number: int = 3, **options: Any) -> DeltaSums:
        return adam_step(ranges_of([self], number), **options)


def ranges_of(problems: list[Problem], number: int) -> AdamRanges:
    return AdamRanges(
        [p.weight for p in problems],
        [p.rounded for p in problems if p.rounded is not None],
        [p.grad for p in problems],
        [p.exp_avg for p in problems],
        [p.exp_avg_sq for p in problems],
        [number] * len(problems),
    )


def problem(size: int, grad: torch.dtype = torch.float32, rounded: torch.dtype | None = None) -> Problem:
    generator = torch.Generator().manual_seed(size)
    draw = [torch.randn(size, generator=generator) for _ in range(4)]
    return Problem(
        odd(draw[0]),
        None if rounded is None else odd(draw[0].to(rounded)),
        odd((draw[1] * 30).to(grad)),
        odd(draw[2]),
        odd(draw[3].square() * 0.01),
    )


DEFAULTS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled": True},
    {"scale": 1024.0, "maximize": True},
    {"scale": 3.0, "betas": (0.3, 0.5), "eps": 1e-3},
    {"betas": (0.0, 0.0), "weight_decay": 0.01, "maximize": True},
    {"hold_steps": 3, "weight_decay": 0.1, "decoupled": True},
)


def reference(p: Problem, number: int, options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """CONTRACT: the formula as it is written down, in fp64."""
    o = {"scale": 1.0, "decoupled": False, "maximize": False, "hold_steps": 0, **DEFAULTS, **options}
    b1, b2 = o["betas"]
    w, g = p.weight.double(), p.grad.double() / o["scale"]
    g = -g if o["maximize"] else g
    lr = 0.0 if number <= o["hold_steps"] else o["lr"]
    if not o["decoupled"]:
        g = g + o["weight_decay"] * w
    m = b1 * p.exp_avg.double() + (1 - b1) * g
    v = b2 * p.exp_avg_sq.double() + (1 - b2) * g * g
    u = (m / (1 - b1**number)) / ((v / (1 - b2**number)).sqrt() + o["eps"])
    delta = u + o["weight_decay"] * w
    w = w - lr * u - (lr * o["weight_decay"] * w if o["decoupled"] else 0)
    return w, m, v, delta


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("grad", DTYPES)
def test_against_the_formula_in_fp64(grad: torch.dtype, options: dict[str, Any]) -> None:
    for name in LEVELS:
        for size in SIZES if name != "base" else SIZES[:-1]:
            p = problem(size, grad, torch.bfloat16)
            w, m, v, _ = reference(p, 3, options)
            with level(name):
                p.step(3, **{**DEFAULTS, **options})
            torch.testing.assert_close(p.exp_avg.double(), m, rtol=1e-6, atol=1e-6)
            # A gradient that L2 decay nearly cancels keeps the absolute error of its parts.
            cancels = options.get("weight_decay") and not options.get("decoupled")
            torch.testing.assert_close(p.exp_avg_sq.double(), v, rtol=1e-6, atol=1e-10 if cancels else 0)
            torch.testing.assert_close(p.weight.double(), w, rtol=1e-6, atol=1e-6)
            assert p.rounded is not None
            assert same_bits(p.rounded, p.weight.to(torch.bfloat16))


def special_problem(grad: torch.dtype, rounded: torch.dtype | None) -> Problem:
    """Every combination of denormals, zeros, extremes, infinities and NaN."""
    values = torch.tensor(
        [0.0, -0.0, 1.0, -3.0, 1e-45, -1e-40, 6e-8, 65504.0, 3e38, math.inf, -math.inf, math.nan]
    )
    k = len(values)
    g, m, w = (values.repeat(k**i).repeat_interleave(k ** (2 - i)) for i in range(3))
    v = values.abs().repeat(len(w) // k).roll(5)
    return Problem(
        w.clone(), None if rounded is None else w.to(rounded), g.to(grad), m.clone(), v.contiguous()
    )


@pytest.mark.parametrize("as_torch", (False, True))
@pytest.mark.parametrize("grad", DTYPES)
def test_levels_agree_bit_for_bit(grad: torch.dtype, as_torch: bool) -> None:
    for rounded in (None,) if as_torch else (None, torch.bfloat16, torch.float16):
        for start in (problem(4_099, grad, rounded), special_problem(grad, rounded)):
            for options in OPTIONS:
                results = []
                for name in LEVELS:
                    p = start.copy()
                    with level(name):
                        for number in (1, 2, 1000):
                            p.step(number, **{**DEFAULTS, **options}, as_torch=as_torch)
                    results.append(p)
                for other in results[1:]:
                    assert all(
                        same_bits(a, b) for a, b in zip(results[0].arrays(), other.arrays(), strict=True)
                    )


def test_levels_divide_alike_at_any_step() -> None:
    """The wide levels divide by multiplying; the base level divides."""
    start = problem(512)
    start.exp_avg_sq.copy_(torch.arange(512.0) * 2.0 ** torch.arange(512).sub(256).div(4))
    start.grad.zero_()
    for beta2 in (0.999, 0.95, 0.5, 1 - 1e-7, 0.0):
        for number in (*range(1, 60), 10**3, 10**4, 10**6):
            weights = []
            for name in LEVELS:
                p = start.copy()
                with level(name):
                    p.step(number, **{**DEFAULTS, "betas": (0.9, beta2)})
                weights.append(p.weight)
            assert all(same_bits(weights[0], w) for w in weights)


@pytest.mark.parametrize("rounded", (torch.bfloat16, torch.float16))
def test_parameter_is_its_rounded_master(rounded: torch.dtype) -> None:
    p = special_problem(torch.float32, rounded)
    assert p.rounded is not None
    for number in range(1, 4):
        p.step(number, **DEFAULTS)
        assert same_bits(p.rounded, p.weight.to(rounded))


def test_master_is_torch_adamw_and_fp32_is_torch_adam() -> None:
    for cls, decoupled in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        p = problem(10_007)
        p.exp_avg.zero_()
        p.exp_avg_sq.zero_()
        parameter = torch.nn.Parameter(p.weight.clone())
        optimizer = cls([parameter], lr=1e-2, weight_decay=0.1)
        for number in range(1, 20):
            p.grad = torch.randn(10_007)
            parameter.grad = p.grad.clone()
            optimizer.step()
            p.step(number, **{**DEFAULTS, "weight_decay": 0.1}, decoupled=decoupled, as_torch=True)
            assert same_bits(parameter.data, p.weight)


def test_threads_do_not_change_anything() -> None:
    start = problem(200_003, torch.bfloat16, torch.bfloat16)
    before = torch.get_num_threads()
    results, sums = [], set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            p = start.copy()
            sums.add(p.step(3, **DEFAULTS, with_delta=True))
            results.append(p)
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0].arrays(), other.arrays(), strict=True))


def test_neighbours_are_one_range_and_gaps_are_left_alone() -> None:
    whole = problem(40_000, torch.bfloat16, torch.bfloat16)
    start = whole.copy()
    single = start.copy()
    single.step(3, **DEFAULTS)

    def part(first: int, count: int) -> Problem:
        return Problem(*(t if t is None else t[first : first + count] for t in vars(whole).values()))

    pieces = [part(0, 100), part(100, 0), part(100, 20_001), part(20_101, 7), part(20_150, 1000)]
    adam_step(ranges_of(pieces, 3), **DEFAULTS)
    for name, t in vars(whole).items():
        expected = getattr(start, name).clone()
        for first, last in ((0, 20_108), (20_150, 21_150)):
            expected[first:last] = getattr(single, name)[first:last]
        assert same_bits(t, expected)


@pytest.mark.parametrize("apart", ("weight", "rounded", "grad", "exp_avg", "exp_avg_sq"))
def test_a_range_ends_where_one_of_its_arrays_does(apart: str) -> None:
    for whole in (
        problem(64, torch.bfloat16, torch.bfloat16),
        moments_in_bf16(problem(64, torch.bfloat16, torch.bfloat16)),
    ):
        halves = [Problem(*pair) for pair in zip(*(t.split(32) for t in whole.arrays()), strict=True)]
        behind = getattr(halves[1], apart)
        setattr(halves[1], apart, behind.clone())
        kept, expected = behind.zero_().clone(), [half.copy() for half in halves]
        for half in expected:
            half.step(3, **DEFAULTS)
        adam_step(ranges_of(halves, 3), **DEFAULTS)
        assert same_bits(behind, kept)
        for half, other in zip(halves, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(half.arrays(), other.arrays(), strict=True))


def test_each_tensor_has_its_own_step_number() -> None:
    p, q = problem(100), problem(101)
    p2, q2 = p.copy(), q.copy()
    adam_step(ranges_of([p, q], 1)._replace(steps=[1, 9]), **DEFAULTS, hold_steps=2)
    p2.step(1, **DEFAULTS, hold_steps=2)
    q2.step(9, **DEFAULTS)
    assert same_bits(p.weight, p2.weight)
    assert same_bits(q.weight, q2.weight)
    assert same_bits(p.weight, problem(100).weight)  # held
    assert not same_bits(p.exp_avg, problem(100).exp_avg)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_delta_sums(options: dict[str, Any]) -> None:
    sums = set()
    for name in LEVELS:
        p = problem(33_001, torch.float32, torch.bfloat16)
        delta = reference(p, 3, options)[-1]
        with level(name):
            got = p.step(3, **{**DEFAULTS, **options}, with_delta=True)
        sums.add(got)
        assert got.total == pytest.approx(delta.sum().item(), rel=1e-4, abs=1e-3)
        assert got.squares == pytest.approx(delta.square().sum().item(), rel=1e-4)
    assert len(sums) == 1
    assert problem(9).step(1, **DEFAULTS) == (0.0, 0.0)


def test_empty_tail_of_delta_ignores_what_is_not_there() -> None:
    p = problem(5)
    got = p.step(1, **{**DEFAULTS, "eps": 0.0}, with_delta=True)
    assert math.isfinite(got.total)


BAD: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"weight": torch.zeros(4).double()}, TypeError, r"weights\[0\]: expected float32, got Double"),
    (
        {"grad": torch.zeros(4).int()},
        TypeError,
        r"grads\[0\]: expected float32, float16 or bfloat16, got Int",
    ),
    (
        {"exp_avg": torch.zeros(4).half()},
        TypeError,
        r"exp_avgs\[0\]: expected float32, bfloat16 or uint8, got Half",
    ),
    (
        {"exp_avg_sq": torch.zeros(3)},
        ValueError,
        r"exp_avg_sqs\[0\]: expected 4 elements like weights, got 3",
    ),
    (
        {"grad": torch.zeros(8)[::2]},
        TypeError,
        r"grads\[0\]: expected a contiguous tensor, got strides \[2\]",
    ),
    ({"rounded": torch.zeros(4)}, TypeError, r"rounded\[0\]: expected float16 or bfloat16, got Float"),
)


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[m for _, _, m in BAD])
def test_what_does_not_fit_is_refused_before_anything_is_written(
    change: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    good, bad = problem(4), replace(problem(4), **change)
    if bad.rounded is not None:
        good.rounded = torch.zeros(4).half()
    before = good.copy()
    with pytest.raises(error, match=message):
        adam_step(ranges_of([bad, good] if bad.rounded is not None else [bad], 1), **DEFAULTS)
    ranges = ranges_of([good, bad], 1)
    with pytest.raises(error):
        adam_step(ranges, **DEFAULTS)
    assert same_bits(good.weight, before.weight)


def test_lists_of_different_lengths_are_refused() -> None:
    p = problem(4)
    with pytest.raises(ValueError, match=r"lists of one length, got weights 1, rounded 0, grads 0"):
        adam_step(ranges_of([p], 1)._replace(grads=[]), **DEFAULTS)
    with pytest.raises(ValueError, match=r"steps\[0\]: expected 1 or more, got 0"):
        p.step(0, **DEFAULTS)


def moments_in_bf16(p: Problem) -> Problem:
    return replace(p, exp_avg=odd(p.exp_avg.bfloat16()), exp_avg_sq=odd(p.exp_avg_sq.bfloat16()))


@pytest.mark.parametrize("rounded", (None, torch.bfloat16))
def test_bf16_moments_have_the_same_bits_at_every_level_and_for_every_partition(
    rounded: torch.dtype | None,
) -> None:
    for start in (problem(4_099, torch.float32, rounded), special_problem(torch.float32, rounded)):
        results = []
        for name in LEVELS:
            p, pieces = moments_in_bf16(start.copy()), moments_in_bf16(start.copy())
            parts = [
                Problem(*(t if t is None else t[part] for t in vars(pieces).values()))
                for part in (slice(1, 18), slice(18, None), slice(0, 1))
            ]
            with level(name):
                for number in (1, 2, 1000):
                    p.step(number, **DEFAULTS)
                    adam_step(ranges_of(parts, number), **DEFAULTS)
            results += [p, pieces]
        for other in results[1:]:
            assert all(same_bits(a, b) for a, b in zip(results[0].arrays(), other.arrays(), strict=True))


@pytest.mark.parametrize("array", ("weight", "exp_avg"))
def test_bf16_moments_take_one_nan_for_another(array: str) -> None:
    """Which bits a NaN has that an operation gives is up to the compiler."""
    results = []
    for bits in (0x7FC0, 0x7FD5, 0xFFC0 - 0x10000):
        p = moments_in_bf16(problem(1_000))
        numbers = getattr(p, array)
        numbers.copy_(torch.full((1_000,), bits, dtype=torch.int16).view(torch.bfloat16))
        p.step(1, **DEFAULTS)
        results.append(p.exp_avg_sq)
    assert all(same_bits(results[0], other) for other in results[1:])


def test_bf16_moments_go_to_a_neighbour_and_are_right_on_the_average() -> None:
    p = problem(100_003)
    p.grad.zero_()
    p.exp_avg_sq.fill_(1.0)
    p.exp_avg.fill_(-1.0)
    p = moments_in_bf16(p)
    for number in range(1, 201):
        p.step(number, **{**DEFAULTS, "betas": (0.99, 0.999)})
        if number == 1:  # bf16 has 1 and, below it, 1 - 2^-8
            assert set(p.exp_avg_sq.tolist()) == {1.0, 1 - 2**-8}
            assert p.exp_avg_sq.double().mean().item() == pytest.approx(0.999, abs=1e-4)
    assert p.exp_avg_sq.double().mean().item() == pytest.approx(0.999**200, rel=1e-3)
    assert p.exp_avg.double().mean().item() == pytest.approx(-(0.99**200), rel=1e-3)
