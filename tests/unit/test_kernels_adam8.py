"""The Adam pass over moments in 8 bits: against its formula in operations of torch, at all levels, cut anywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_levels import LEVELS, level, same_bits
from optimizer_steps import AdamRanges, adam_step
from torch import Tensor, nn

from bmtrain.optim import AdamOptimizer
from bmtrain.optim._narrow import dtype_for, store_values, stored_shape, values_of
from bmtrain.optim._updates import Update
from bmtrain.optim.places.device import widened

NAMES = ("exp_avg", "exp_avg_sq")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True},
    {"lr": 1e-2, "betas": (0.3, 0.5), "eps": 1e-3, "weight_decay": 0.1, "scale": 3.0, "maximize": True},
)
Parts = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]  # weight, rounded, gradient, moments


def encoded(values: Tensor, name: str) -> Tensor:
    array = torch.zeros(stored_shape(values.shape, torch.uint8), dtype=torch.uint8)
    store_values(array, values, name)
    return array


def parts_of(size: int, grad: torch.dtype, rounded: torch.dtype | None) -> Parts:
    generator = torch.Generator().manual_seed(size)
    draw = [torch.randn(size, generator=generator) for _ in range(3)]
    wide = torch.logspace(-9, 2, max(size, 1))[:size]  # more than a code can hold, from end to end
    return (
        draw[0],
        None if rounded is None else draw[0].to(rounded),
        (draw[1] * wide).to(grad),
        encoded(draw[2] * wide, "exp_avg"),
        encoded((draw[2] * wide).square(), "exp_avg_sq"),
    )


def special_parts() -> Parts:
    """Blocks with denormals, extremes, infinities and NaN, and blocks of zeros."""
    values = torch.tensor([0.0, -0.0, 1.0, 1e-45, -1e-40, 1e-30, 3e38, -3e38, math.inf, -math.inf, math.nan])
    gradient = torch.zeros(32 * len(values))
    gradient[::32] = values
    weight = torch.ones_like(gradient)
    weight[5::32] = values.roll(3)
    empty = torch.zeros(stored_shape(weight.shape, torch.uint8), dtype=torch.uint8)
    return weight, weight.bfloat16(), gradient, empty, empty.clone()


def copy_of(parts: Parts) -> Parts:
    return tuple(t if t is None else t.clone() for t in parts)  # type: ignore[return-value]


def step(parts: Parts, number: int, options: dict[str, Any]) -> None:
    weight, rounded, *rest = parts
    lists = [[weight], [] if rounded is None else [rounded], *([t] for t in rest)]
    adam_step(AdamRanges(*lists, [number]), **options)  # type: ignore[arg-type]


def step_by_torch(parts: Parts, number: int, options: dict[str, Any]) -> None:
    """Moments decoded to fp32, the kernel of fp32 moments, and moments rounded: what a GPU computes."""
    weight, rounded, grad, *moments = parts
    state = {"step": number, **dict(zip(NAMES, moments, strict=True))}
    with widened(Update(weight, grad, state), NAMES) as update:
        wide = (update.state[name] for name in NAMES)
        step((weight, rounded, grad, *wide), number, {**options, "folded": True})


def same(one: Parts, other: Parts) -> bool:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return all(torch.equal(a, b) if a.dtype is torch.uint8 else same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("options", OPTIONS, ids=("usual", "unusual"))
@pytest.mark.parametrize("rounded", (None, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("grad", (torch.float32, torch.bfloat16, torch.float16))
def test_every_level_has_the_bits_of_the_formula_in_torch(
    grad: torch.dtype, rounded: torch.dtype | None, options: dict[str, Any]
) -> None:
    starts = [parts_of(size, grad, rounded) for size in (0, 1, 31, 32, 33, 1_000, 40_001)]
    if grad is torch.float32 and rounded is torch.bfloat16:
        starts.append(special_parts())
    for start in starts:
        results = {name: copy_of(start) for name in (*LEVELS, "torch")}
        for number in (1, 2, 1000):
            for name, parts in results.items():
                with level(LEVELS[-1] if name == "torch" else name):
                    (step_by_torch if name == "torch" else step)(parts, number, options)
            assert all(same(results["torch"], parts) for parts in results.values())


def test_a_shard_has_the_bits_of_the_whole() -> None:
    whole = parts_of(40_001, torch.bfloat16, torch.bfloat16)
    weight, rounded, grad, *moments = whole
    assert rounded is not None
    first, second = (values_of(array, name, weight.shape) for array, name in zip(moments, NAMES, strict=True))
    pieces: list[Parts] = []
    for a, b in ((0, 32), (32, 20_000), (20_000, 40_001)):
        shards = [t[a:b].clone() for t in (weight, rounded, grad)]
        pieces.append((*shards, encoded(first[a:b], NAMES[0]), encoded(second[a:b], NAMES[1])))  # type: ignore[arg-type]
    for number in (1, 2):
        for parts in (whole, *pieces):
            step(parts, number, OPTIONS[0])
    assert same_bits(weight, torch.cat([parts[0] for parts in pieces]))
    for k, name in enumerate(NAMES, 3):
        own = [values_of(parts[k], name, parts[0].shape) for parts in pieces]
        assert same_bits(values_of(whole[k], name, weight.shape), torch.cat(own))


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_near_and_do_not_change_when_encoded_again(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4_000, generator=generator) * torch.logspace(-30, 30, 125).repeat_interleave(32)
    values[: 32 * 4] = 0
    values = values if name == "exp_avg" else values.abs()
    decoded = values_of(encoded(values, name), name, values.shape)
    assert decoded.dtype == torch.bfloat16
    # 3 bits of mantissa; far below the largest of a block, the first moment is 0, and the second is not.
    largest = values.view(-1, 32).abs().amax(1).repeat_interleave(32)
    within = values.abs() > largest * 2.0**-14
    error = (decoded.float() - values).abs()
    assert (error[within] <= values.abs()[within] / 16).all()
    assert (error[~within] <= largest[~within] * 2.0**-14).all()
    assert same_bits(values_of(encoded(decoded.float(), name), name, values.shape), decoded)
    assert bool(((decoded == 0) == (values == 0)).all()) or name == "exp_avg"


def test_a_second_moment_above_zero_stays_above_it() -> None:
    values = torch.full((32,), 1e-30)
    values[0] = 1.0
    assert values_of(encoded(values, "exp_avg_sq"), "exp_avg_sq", values.shape).min() > 0


def test_moments_are_right_on_the_average() -> None:
    size = 100_000
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
    moments = [
        encoded(torch.full((size,), value), name) for value, name in zip((-1.0, 1.0), NAMES, strict=True)
    ]
    parts = (weight, None, torch.zeros(size), *moments)
    for number in range(1, 201):
        step(parts, number, {**OPTIONS[0], "betas": (0.99, 0.999)})
        if number == 1:  # the neighbours of 0.999 and of 0.99
            sq = values_of(moments[1], NAMES[1], weight.shape)
            assert set(sq.tolist()) == {1.0, 0.9375}
            assert sq.double().mean().item() == pytest.approx(0.999, abs=3e-4)
    for array, name, expected in zip(moments, NAMES, (-(0.99**200), 0.999**200), strict=True):
        mean = values_of(array, name, weight.shape).double().mean().item()
        assert mean == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("bits", [0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1], ids=hex)
def test_a_block_with_a_number_that_is_not_finite_becomes_nan(bits: int) -> None:
    """Infinities, and NaN with the least and the most payload, as memory that nothing has been written to has."""
    parts = parts_of(96, torch.float32, None)
    parts[2].view(torch.int32)[40] = bits
    step(parts, 1, OPTIONS[0])
    for array, name in zip(parts[3:], NAMES, strict=True):
        assert array is not None
        assert values_of(array, name, torch.Size([96])).isnan().tolist() == [32 <= i < 64 for i in range(96)]


def test_what_does_not_fit_is_refused() -> None:
    parts = parts_of(40, torch.float32, None)
    with pytest.raises(
        ValueError, match=r"exp_avgs\[0\]: expected 42 contiguous bytes for 40 weights, got 41"
    ):
        step((*parts[:3], parts[3][:41], parts[4]), 1, OPTIONS[0])
    with pytest.raises(TypeError, match="expected no delta of moments in 8 bits"):
        step(parts, 1, {**OPTIONS[0], "with_delta": True})
    with pytest.raises(TypeError, match="expected float32 moments with as_torch, got narrower ones"):
        step(parts, 1, {**OPTIONS[0], "as_torch": True})
    with pytest.raises(TypeError, match=r"exp_avg_sqs\[0\]: expected uint8 like exp_avgs, got Float"):
        step((*parts[:3], parts[3], torch.zeros(40)), 1, OPTIONS[0])


def test_the_state_has_the_bytes_of_the_formula() -> None:
    p = nn.Parameter(torch.zeros(1_000, dtype=torch.bfloat16))
    optimizer = AdamOptimizer([p], state_dtype="int8")
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert dtype_for(p, torch.int8) is torch.uint8
    assert {name: array.nbytes for name, array in optimizer.state[p].items() if name != "step"} == {
        "exp_avg": 1_000 + 32,
        "exp_avg_sq": 1_000 + 32,
        "_param_fp32": 4_000,
    }
