"""Adam, SGD and Lion of csrc/cuda on the emulated device, against the CPU kernels, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from adam_factors import adam_factors as factors_of_adam
from emulated_gpu import EmulatedGpu, Traffic, dtype_number, sparse_memory
from kernel_levels import same_bits
from optimizer_steps import AdamRanges, MomentumRanges, adam_step, lion_step, sgd_step
from torch import Tensor

from bmtrain.optim._narrow import store_values, stored_shape

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 3, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049]
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1


class RangeStruct(ctypes.Structure):
    """Range of tests/cuda/emulate/entry.cpp."""

    _fields_ = [
        (name, ctypes.c_void_p if name in POINTERS else ctypes.c_int64)
        for POINTERS in [{"weight", "moment", "second_moment", "rounded", "grad", "factors"}]
        for name in (
            "weight", "moment", "second_moment", "rounded", "rounded_dtype", "grad", "grad_dtype", "n", "factors",
            "moment_bits",
        )
    ]  # fmt: skip


@dataclass
class Range:
    """One range's arrays."""

    weight: Tensor
    moments: list[Tensor]
    rounded: Tensor | None
    grad: Tensor

    def outputs(self) -> list[Tensor]:
        return [self.weight, *self.moments, *([] if self.rounded is None else [self.rounded])]

    def copy(self) -> Range:
        rounded = None if self.rounded is None else self.rounded.clone()
        return Range(self.weight.clone(), [m.clone() for m in self.moments], rounded, self.grad.clone())


def placed(x: Tensor, offset: int) -> Tensor:
    """A copy at an address `offset` elements beyond an aligned one."""
    memory = torch.empty(x.numel() + offset, dtype=x.dtype)
    memory[offset:] = x
    return memory[offset:]


def make_range(
    size: int,
    grad: torch.dtype,
    rounded: torch.dtype | None,
    num_moments: int = 2,
    offsets: tuple[int, ...] = (0, 0, 0, 0),
) -> Range:
    generator = torch.Generator().manual_seed(size)

    def draw(offset: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return placed((torch.randn(size, generator=generator) * 3).to(dtype), offset)

    weight, g = draw(offsets[0]), draw(offsets[3], grad)
    moments = [draw(offsets[1]), draw(offsets[2]).abs_()][:num_moments]
    return Range(weight, moments, None if rounded is None else placed(weight.to(rounded), offsets[3]), g)


def adam_factors(step: int, scale: float, decoupled: bool, folded: bool = False) -> Tensor:
    numbers = {"lr": LR, "betas": BETAS, "eps": EPS, "decay": DECAY, "scale": scale}
    return factors_of_adam(step, **numbers, decoupled=decoupled, folded=folded)


def lion_factors(scale: float) -> Tensor:
    beta1, beta2 = BETAS
    values = [1, 1 / scale, 0, 0, 0, beta2, 1 - beta2, beta1, 1 - beta1, -LR, 2, 1 - LR * DECAY]
    return torch.tensor(values)


def sgd_factors(starts: bool, nesterov: bool) -> Tensor:
    return torch.tensor([0, 1, 0, starts, nesterov, 0.9, 1, 0, 0, -LR, 1, DECAY])


def run(
    gpu: EmulatedGpu,
    kernel: str,
    ranges: list[Range],
    factors: list[Tensor],
    *,
    measure: Callable[..., object] | None = None,
) -> object:
    """Launch; the gradients may only be read."""
    structs = (RangeStruct * len(ranges))()
    for struct, r, f in zip(structs, ranges, factors, strict=True):
        pointers = [m.data_ptr() for m in r.moments] + [None, None]
        struct.weight, struct.moment, struct.second_moment = r.weight.data_ptr(), *pointers[:2]
        if r.rounded is not None:
            struct.rounded, struct.rounded_dtype = r.rounded.data_ptr(), dtype_number(r.rounded)
        struct.grad, struct.grad_dtype, struct.n = r.grad.data_ptr(), dtype_number(r.grad), r.weight.numel()
        struct.factors = f.data_ptr()
        struct.moment_bits = 8 * r.moments[0].element_size() if r.moments else 32
    reads = [r.grad for r in ranges]
    writes = [x for r in ranges for x in r.outputs()]
    do = measure or gpu.launch
    return do(kernel, structs, len(ranges), reads=reads, writes=writes)


def adam_on_cpu(r: Range, step: int, scale: float, decoupled: bool) -> None:
    rounded = [] if r.rounded is None else [r.rounded]
    ranges = AdamRanges([r.weight], rounded, [r.grad], [r.moments[0]], [r.moments[1]], [step])
    adam_step(ranges, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, scale=scale, decoupled=decoupled)


def assert_same(mine: Range, theirs: Range) -> None:
    for x, y in zip(mine.outputs(), theirs.outputs(), strict=True):
        assert same_bits(x, y)


@pytest.mark.parametrize("rounded", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("offsets", [(0, 0, 0, 0), (3, 3, 3, 3), (1, 2, 0, 1)])
def test_adam(
    gpu: EmulatedGpu, grad: torch.dtype, rounded: torch.dtype | None, offsets: tuple[int, ...]
) -> None:
    """Sizes around tiles, arrays that lie alike and unlike, both kinds of weight decay, exact and other scales."""
    for size in SIZES:
        scale, decoupled = ((1024.0, True), (3.0, False))[size % 2]
        mine = make_range(size, grad, rounded, offsets=offsets)
        theirs = mine.copy()
        for step in (1, 2):
            run(gpu, "adam", [mine], [adam_factors(step, scale, decoupled)])
            adam_on_cpu(theirs, step, scale, decoupled)
        assert_same(mine, theirs)


def narrowed(r: Range, dtype: torch.dtype) -> Range:
    """The same with moments in bf16, or in 8 bits."""
    moments = []
    for name, wide in zip(("exp_avg", "exp_avg_sq"), r.moments, strict=True):
        moments.append(torch.zeros(stored_shape(wide.shape, dtype), dtype=dtype))
        store_values(moments[-1], wide, name)
    return replace(r, moments=moments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("rounded", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", DTYPES)
def test_adam_with_narrow_moments(
    gpu: EmulatedGpu, grad: torch.dtype, rounded: torch.dtype | None, dtype: torch.dtype
) -> None:
    for size in SIZES[1:]:
        scale, decoupled = ((1024.0, True), (3.0, False))[size % 2]
        mine = narrowed(make_range(size, grad, rounded, offsets=(size % 3,) * 4), dtype)
        mine.grad[: size // 2] *= 1e-6  # more than a code can hold, within a block
        theirs = mine.copy()
        for step in (1, 2):
            run(gpu, "adam", [mine], [adam_factors(step, scale, decoupled, dtype is torch.uint8)])
            adam_on_cpu(theirs, step, scale, decoupled)
        for x, y in zip(mine.outputs(), theirs.outputs(), strict=True):
            assert torch.equal(x, y) if x.dtype is torch.uint8 else same_bits(x, y)


@pytest.mark.parametrize("rounded", [None, torch.bfloat16])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("rule", ["lion", "sgd", "fresh", "nesterov", "without momentum"])
def test_sgd_and_lion(gpu: EmulatedGpu, grad: torch.dtype, rounded: torch.dtype | None, rule: str) -> None:
    for index, size in enumerate(SIZES):
        mine = make_range(size, grad, rounded, rule != "without momentum", (index % 4,) * 4)
        theirs = mine.copy()
        low = [] if theirs.rounded is None else [theirs.rounded]
        fresh = rule == "fresh"
        ranges = MomentumRanges([theirs.weight], low, [theirs.grad], theirs.moments, [fresh])
        if rule == "lion":
            run(gpu, "momentum", [mine], [lion_factors(4.0)])
            lion_step(ranges._replace(fresh=[]), lr=LR, betas=BETAS, weight_decay=DECAY, scale=4.0)
        else:
            nesterov = rule == "nesterov"
            run(gpu, "momentum", [mine], [sgd_factors(fresh, nesterov)])
            momentum = 0.0 if rule == "without momentum" else 0.9
            sgd_step(ranges, lr=LR, momentum=momentum, nesterov=nesterov, weight_decay=DECAY)
        assert_same(mine, theirs)


def test_many_ranges(gpu: EmulatedGpu) -> None:
    """More than one launch takes, empty ones among them, each with its own numbers, dtypes and places."""
    sizes = [0, 5, 2048, 0, 0, 70_001, *[33] * 12, 4097, 0, 1, 0]
    mine = [
        make_range(n, DTYPES[i % 3], (None, torch.bfloat16, torch.float16)[i // 2 % 3], offsets=(i % 5,) * 4)
        for i, n in enumerate(sizes)
    ]
    theirs = [r.copy() for r in mine]
    steps = [1 + i % 3 for i in range(len(sizes))]
    run(gpu, "adam", mine, [adam_factors(step, 2.0, step == 1) for step in steps])
    for r, step in zip(theirs, steps, strict=True):
        adam_on_cpu(r, step, 2.0, step == 1)
    for x, y in zip(mine, theirs, strict=True):
        assert_same(x, y)
    run(gpu, "adam", [], [])
    run(gpu, "adam", [make_range(0, torch.float32, None)] * 3, [adam_factors(1, 1.0, False)] * 3)


def test_infinities_and_nan_go_where_they_go_on_the_cpu(gpu: EmulatedGpu) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, 3e38, torch.inf, -torch.inf, torch.nan, 1e-30])
    mine = make_range(2048, torch.float32, torch.float16)
    mine.grad[: 8 * 8] = special.repeat(8)
    mine.weight[: 8 * 8] = special.repeat_interleave(8)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        ours = mine.copy() if dtype is torch.float32 else narrowed(mine.copy(), dtype)
        theirs = ours.copy()
        run(gpu, "adam", [ours], [adam_factors(1, 1.0, True, dtype is torch.uint8)])
        adam_on_cpu(theirs, 1, 1.0, True)
        for x, y in zip(ours.outputs(), theirs.outputs(), strict=True):
            assert torch.equal(x, y) if x.dtype is torch.uint8 else same_bits(x, y)


def test_a_step_moves_28_bytes_per_parameter_in_whole_sectors(gpu: EmulatedGpu) -> None:
    size = 8192
    r = make_range(size, torch.bfloat16, torch.bfloat16)
    traffic = run(gpu, "adam", [r], [adam_factors(1, 1.0, True)])
    assert isinstance(traffic, Traffic)
    assert sum(traffic.read) + sum(traffic.written) == 28 * size
    r = make_range(size, torch.bfloat16, torch.bfloat16)
    assert run(gpu, "adam", [r], [adam_factors(1, 1.0, True)], measure=gpu.sector_share) == 1


def test_more_elements_than_32_bits_count(gpu: EmulatedGpu) -> None:
    """One block of a launch over a range of 2^32 + 5, in memory of which only its pages exist."""
    size = (1 << 32) + 5
    weight, momentum = (sparse_memory(size, torch.float32) for _ in range(2))
    grad = sparse_memory(size, torch.bfloat16)
    grad[-5:] = 1
    gpu.only_blocks((size - 1) // 2048)
    try:
        run(gpu, "momentum", [Range(weight, [momentum], None, grad)], [sgd_factors(True, False)])
    finally:
        gpu.only_blocks()
    assert torch.equal(weight[-6:], torch.tensor([0.0] + [-LR] * 5))
    assert torch.equal(momentum[-6:], torch.tensor([0.0] + [1.0] * 5))
