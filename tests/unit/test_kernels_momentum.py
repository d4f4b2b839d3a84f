"""The fused SGD and Lion passes against torch's operations, and against themselves: levels, threads, ranges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_levels import LEVELS, Arrays, level, odd, same_bits
from optimizer_steps import MomentumRanges, lion_step, sgd_step

from bmtrain import _ops

SIZES = (0, 1, 15, 16, 33, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Problem(Arrays):
    """Arrays of one range, each at an odd address."""

    weight: torch.Tensor
    rounded: torch.Tensor | None
    grad: torch.Tensor
    momentum: torch.Tensor

    def ranges(self, fresh: bool = False, with_momentum: bool = True) -> MomentumRanges:
        momenta = [self.momentum] if with_momentum else []
        rounded = [] if self.rounded is None else [self.rounded]
        return MomentumRanges([self.weight], rounded, [self.grad], momenta, [fresh])


def problem(size: int, grad: torch.dtype = torch.float32, rounded: torch.dtype | None = None) -> Problem:
    generator = torch.Generator().manual_seed(size)
    w, g, m = (torch.randn(size, generator=generator) for _ in range(3))
    return Problem(odd(w), None if rounded is None else odd(w.to(rounded)), odd((g * 30).to(grad)), odd(m))


def special_problem(grad: torch.dtype, rounded: torch.dtype | None) -> Problem:
    """Every combination of denormals, zeros, extremes, infinities and NaN."""
    values = torch.tensor(
        [0.0, -0.0, 1.0, -3.0, 1e-45, -1e-40, 6e-8, 65504.0, 3e38, math.inf, -math.inf, math.nan]
    )
    k = len(values)
    g, m, w = (values.repeat(k**i).repeat_interleave(k ** (2 - i)) for i in range(3))
    return Problem(w.clone(), None if rounded is None else w.to(rounded), g.to(grad), m.clone())


def sgd_by_torch(p: Problem, *, fresh: bool = False, with_momentum: bool = True, **options: Any) -> None:
    """What torch.optim.SGD does, operation by operation."""
    o = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "scale": 1.0, "nesterov": False, **options}
    grad = p.grad.float() / (-o["scale"] if o.get("maximize") else o["scale"])
    if o["weight_decay"]:
        grad = grad.add(p.weight, alpha=o["weight_decay"])
    if with_momentum:
        if fresh:
            p.momentum.copy_(grad)
        else:
            p.momentum.mul_(o["momentum"]).add_(grad, alpha=1 - o["dampening"])
        grad = grad.add(p.momentum, alpha=o["momentum"]) if o["nesterov"] else p.momentum
    p.weight.add_(grad, alpha=-o["lr"])
    if p.rounded is not None:
        p.rounded.copy_(p.weight)


def lion_by_torch(p: Problem, *, lr: float, betas: tuple[float, float], **options: Any) -> None:
    """Algorithm 2 of "Symbolic Discovery of Optimization Algorithms", as it is written down."""
    scale = options.get("scale", 1.0)
    grad = p.grad.float() / (-scale if options.get("maximize") else scale)
    if decay := options.get("weight_decay", 0.0):
        p.weight.mul_(1 - lr * decay)
    direction = p.momentum.mul(betas[0]).add(grad, alpha=1 - betas[0]).sign()
    p.weight.add_(direction, alpha=-lr)
    p.momentum.mul_(betas[1]).add_(grad, alpha=1 - betas[1])
    if p.rounded is not None:
        p.rounded.copy_(p.weight)


SGD: tuple[dict[str, Any], ...] = (
    {"lr": 0.1, "with_momentum": False},
    {"lr": 0.1, "with_momentum": False, "weight_decay": 0.3, "maximize": True, "scale": 3.0},
    {"lr": 0.1, "momentum": 0.9, "fresh": True},
    {"lr": 0.1, "momentum": 0.9, "scale": 1024.0},
    {"lr": 1e-3, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    {"lr": 0.7, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "scale": 3.0},
    {"lr": 0.7, "momentum": 0.95, "nesterov": True, "fresh": True},
)
LION: tuple[dict[str, Any], ...] = (
    {"lr": 0.1, "betas": (0.9, 0.99)},
    {"lr": 1e-4, "betas": (0.95, 0.98), "weight_decay": 1.0, "scale": 3.0},
    {"lr": 0.1, "betas": (0.0, 0.0), "weight_decay": 0.1, "maximize": True, "scale": 1024.0},
)


def step(p: Problem, options: dict[str, Any]) -> None:
    if "betas" in options:
        lion_step(p.ranges(), **options)
    else:
        numbers = {name: o for name, o in options.items() if name not in ("fresh", "with_momentum")}
        sgd_step(p.ranges(options.get("fresh", False), options.get("with_momentum", True)), **numbers)


@pytest.mark.parametrize("rounded", (None, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("grad", DTYPES, ids=str)
def test_bits_are_those_of_torchs_operations(grad: torch.dtype, rounded: torch.dtype | None) -> None:
    """At every level, for any size, and for every combination of special values."""
    starts = [*(problem(size, grad, rounded) for size in SIZES), special_problem(grad, rounded)]
    for options in (*SGD, *LION):
        by_torch = lion_by_torch if "betas" in options else sgd_by_torch
        for start in starts:
            expected = start.copy()
            by_torch(expected, **options)
            for name in LEVELS:
                p = start.copy()
                with level(name):
                    step(p, options)
                assert all(same_bits(a, b) for a, b in zip(p.arrays(), expected.arrays(), strict=True)), (
                    f"{name}: {options}"
                )


def test_neighbours_are_one_range_and_threads_change_nothing() -> None:
    start = problem(200_003, torch.bfloat16, torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads, cuts in ((1, (200_003,)), (2, (70_001, 1, 130_001)), (5, (16, 199_987))):
            torch.set_num_threads(threads)
            p = start.copy()
            parts = [t.split(cuts) for t in p.arrays()]
            fresh = [k % 2 == 1 for k in range(len(cuts))]
            weights, rounded, grads, momenta = (list(part) for part in parts)
            lion_step(MomentumRanges(weights, rounded, grads, momenta, fresh), **LION[1])
            results.append(p)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0].arrays(), other.arrays(), strict=True))


@pytest.mark.parametrize("apart", ("weight", "rounded", "grad", "momentum"))
def test_a_range_ends_where_one_of_its_arrays_does(apart: str) -> None:
    whole = problem(64, torch.bfloat16, torch.bfloat16)
    halves = [Problem(*pair) for pair in zip(*(t.split(32) for t in whole.arrays()), strict=True)]
    behind = getattr(halves[1], apart)
    setattr(halves[1], apart, behind.clone())
    kept, expected = behind.zero_().clone(), [half.copy() for half in halves]
    for half in expected:
        step(half, LION[1])
    weights, rounded, grads, momenta = map(list, zip(*(half.arrays() for half in halves), strict=True))
    lion_step(MomentumRanges(weights, rounded, grads, momenta, []), **LION[1])
    assert same_bits(behind, kept)
    for half, other in zip(halves, expected, strict=True):
        assert all(same_bits(a, b) for a, b in zip(half.arrays(), other.arrays(), strict=True))


def test_a_range_ends_where_its_group_does() -> None:
    whole = problem(64)
    halves = [Problem(a, None, b, c) for a, b, c in zip(*(t.split(32) for t in whole.arrays()), strict=True)]
    expected = [half.copy() for half in halves]
    groups = [{"lr": lr, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0} for lr in (0.1, 0.01)]
    for half, group in zip(expected, groups, strict=True):
        lion_step(half.ranges()._replace(fresh=[]), lr=group["lr"], betas=(0.9, 0.99))
    weights, grads, momenta = map(list, zip(*(half.arrays() for half in halves), strict=True))
    numbers = [{**group, "scale": 1.0, "maximize": False} for group in groups]
    _ops.step_of_groups("lion", (weights, [], grads, momenta), [1, 1], numbers)
    for half, other in zip(halves, expected, strict=True):
        assert all(same_bits(a, b) for a, b in zip(half.arrays(), other.arrays(), strict=True))


def test_a_momentum_begins_where_it_is_fresh_only() -> None:
    start = problem(64)
    both, old, new = start.copy(), start.copy(), start.copy()
    halves = [list(t.split(32)) for t in (both.weight, both.grad, both.momentum)]
    ranges = MomentumRanges(halves[0], [], halves[1], halves[2], [False, True])
    sgd_step(ranges, lr=0.1, momentum=0.9)
    sgd_by_torch(old, lr=0.1, momentum=0.9)
    sgd_by_torch(new, lr=0.1, momentum=0.9, fresh=True)
    assert same_bits(both.weight, torch.cat([old.weight[:32], new.weight[32:]]))


WRONG: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"weights": [torch.zeros(4).half()]}, TypeError, r"weights\[0\]: expected float32, got Half"),
    ({"grads": [torch.zeros(3)]}, ValueError, r"grads\[0\]: expected 4 elements like weights, got 3"),
    ({"grads": [torch.zeros(4).double()]}, TypeError, r"grads\[0\]: expected float32, float16 or bfloat16"),
    ({"momenta": [torch.zeros(4).bfloat16()]}, TypeError, r"momenta\[0\]: expected float32, got BFloat16"),
    ({"momenta": [torch.zeros(3)]}, ValueError, r"momenta\[0\]: expected 4 elements like weights, got 3"),
    ({"rounded": [torch.zeros(4)]}, TypeError, r"rounded\[0\]: expected float16 or bfloat16, got Float"),
    ({"momenta": [torch.zeros(4)] * 2}, ValueError, "expected lists of one length, got weights 1, rounded 0"),
    ({"weights": [torch.zeros(8)[::2]]}, TypeError, r"weights\[0\]: expected a contiguous tensor"),
)


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_tensors_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    fields = {"weights": [torch.zeros(4)], "rounded": [], "grads": [torch.zeros(4)],
              "momenta": [torch.zeros(4)], "fresh": [False]}  # fmt: skip
    ranges = MomentumRanges(**{**fields, **change})
    for name, call in (
        ("sgd", lambda: sgd_step(ranges, lr=0.1, momentum=0.9)),
        ("lion", lambda: lion_step(ranges, **LION[0])),
    ):
        with pytest.raises(error, match=f"{name}: {message}"):
            call()


def test_lion_without_momentum_is_refused() -> None:
    ranges = MomentumRanges([torch.zeros(4)], [], [torch.zeros(4)], [], [])
    with pytest.raises(ValueError, match="lion: expected lists of one length.*momenta 0"):
        lion_step(ranges, **LION[0])
