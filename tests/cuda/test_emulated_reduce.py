"""Sums, scaling and norms of csrc/cuda on the emulated device, against the CPU kernels, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch
from emulated_gpu import EmulatedGpu, Traffic, dtype_number, sparse_memory
from kernel_levels import same_bits
from torch import Tensor

from bmtrain import _ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 8191, 8192, 8193, 50_003]


def values(size: int, dtype: torch.dtype, offset: int = 0, seed: int = 0) -> Tensor:
    """Numbers of many magnitudes, infinities and NaN, at an address `offset` elements beyond an aligned one."""
    generator = torch.Generator().manual_seed(seed * 1000 + size)
    exponents = torch.randint(-20, 12, (size + offset,), generator=generator)
    x = (torch.randn(size + offset, generator=generator) * torch.exp2(exponents)).to(dtype)
    for place, special in ((3, torch.inf), (7, -torch.inf), (9, torch.nan), (20, 0.0), (21, -0.0)):
        x[offset + place : offset + place + 1] = special
    return x[offset:]


def finite(size: int, dtype: torch.dtype, offset: int = 0, seed: int = 0) -> Tensor:
    x = values(size + offset, dtype, 0, seed).nan_to_num(nan=1.0, posinf=2.0, neginf=-3.0)
    return x[offset:]


def launch_sum(
    gpu: EmulatedGpu, out: Tensor, sources: Sequence[Tensor], accumulate: bool, factor: float
) -> Traffic:
    pointers = (ctypes.c_void_p * len(sources))(*(x.data_ptr() for x in sources))
    others = [x for x in sources if x.data_ptr() != out.data_ptr()]
    return gpu.launch(
        "ordered_sum", out, pointers, len(sources), out.numel(), dtype_number(out), accumulate, factor,
        reads=others, writes=[out],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num", [0, 1, 3, 64])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 1), (0, 1)])
def test_ordered_sum(gpu: EmulatedGpu, num: int, dtype: torch.dtype, offsets: tuple[int, int]) -> None:
    for size in SIZES if num < 4 else [33, 2049]:
        for accumulate, factor in ((False, 1.0), (True, 0.37)):
            sources = [finite(size, dtype, offsets[0], seed) for seed in range(num)]
            out = finite(size, dtype, offsets[1], 99)
            expected = _ops.ordered_sum_(out.clone(), sources, accumulate=accumulate, factor=factor)
            launch_sum(gpu, out, sources, accumulate, factor)
            assert same_bits(out, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num", [65, 130])
@pytest.mark.parametrize("begin", [0, 1])
def test_ordered_sum_of_the_slices_of_more_ranks(
    gpu: EmulatedGpu, num: int, dtype: torch.dtype, begin: int
) -> None:
    """Pointers of so many would not fit among a kernel's arguments."""
    for size in (40, 517):
        received = finite(num * 520, dtype, 0, 3)
        sources = [whole[begin : begin + size] for whole in received.chunk(num)]
        for accumulate, factor in ((False, 1.0), (True, 0.37)):
            out = finite(size, dtype, begin, 99)
            expected = _ops.ordered_sum_(out.clone(), sources, accumulate=accumulate, factor=factor)
            launch_sum(gpu, out, sources, accumulate, factor)
            assert same_bits(out, expected)


def test_a_sum_may_be_written_over_one_of_its_sources(gpu: EmulatedGpu) -> None:
    sources = [finite(3001, torch.bfloat16, 0, seed) for seed in range(3)]
    expected = _ops.ordered_sum_(torch.empty(3001, dtype=torch.bfloat16), sources)
    launch_sum(gpu, sources[1], sources, False, 1.0)
    assert same_bits(sources[1], expected)


def test_what_the_kernels_do_not_take(gpu: EmulatedGpu) -> None:
    x = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="CUDA error 1"):
        launch_sum(gpu, x, [x] * 65, False, 1.0)
    many = list(torch.zeros(66, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="CUDA error 1"):  # not evenly spaced
        launch_sum(gpu, x, [*many[:64], many[65]], False, 1.0)
    calls: list[Callable[[], Traffic]] = [
        lambda: gpu.launch("scale", x, 3, 3, x, writes=[x]),
        lambda: gpu.launch("squared_sum", x, x, 3, 3, writes=[x]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="CUDA error 1"):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_scale(gpu: EmulatedGpu, dtype: torch.dtype, offset: int) -> None:
    for size in SIZES:
        for factor in (torch.tensor(0.123456789), torch.tensor(1.0)):
            x = values(size, dtype, offset)
            expected = x.clone()
            _ops.scale_([expected], factor)
            traffic = gpu.launch("scale", x, size, dtype_number(x), factor, reads=[factor], writes=[x])
            assert same_bits(x, expected)
            assert traffic.written[1] == (0 if factor == 1 else x.nbytes)


def norm(gpu: EmulatedGpu, tensors: Sequence[Tensor]) -> Tensor:
    partial = torch.zeros(1024, dtype=torch.float64)
    total = torch.full((1,), torch.nan, dtype=torch.float64)
    for x in tensors:
        traffic = gpu.launch(
            "squared_sum", partial, x, x.numel(), dtype_number(x), reads=[x], writes=[partial]
        )
        assert traffic.read[0] == x.nbytes
    gpu.launch("finish_squared_sum", total, partial, reads=[partial], writes=[total])
    return total[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_sum(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    for size in SIZES:
        tensors = [finite(size, dtype, offset) for offset in (0, 1)] + [finite(5, torch.float32)]
        total = norm(gpu, tensors)
        assert total == norm(gpu, tensors), "it depends on the order of threads"
        expected = torch.stack([x.double().square().sum() for x in tensors]).sum()
        torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    for size in (1, 700, 50_003):
        for place in (0, size // 2, size - 1):
            for bad in (torch.inf, torch.nan):
                x = finite(size, dtype)
                x[place] = bad
                assert not norm(gpu, [x]).isfinite()
    largest = torch.full((5000,), torch.finfo(dtype).max, dtype=dtype)
    assert norm(gpu, [largest]).isfinite()


def test_each_pass_fills_the_sectors_it_asks_for(gpu: EmulatedGpu) -> None:
    """Warps read and write whole sectors."""
    for dtype in DTYPES:
        x, out = finite(16_384, dtype), torch.empty(16_384, dtype=dtype)
        pointers = (ctypes.c_void_p * 1)(x.data_ptr())
        call = ("ordered_sum", out, pointers, 1, out.numel(), dtype_number(out), False, 1.0)
        assert gpu.sector_share(*call, reads=[x], writes=[out]) == 1


def test_more_elements_than_32_bits_count(gpu: EmulatedGpu) -> None:
    """One block of a launch over 2^32 + 5 elements, in memory of which only its pages exist."""
    size = (1 << 32) + 5
    x = sparse_memory(size, torch.bfloat16)
    x[-5:] = 3
    last_tile = (size - 1) // 8192
    gpu.only_blocks(last_tile)
    try:
        factor = torch.tensor(2.0)
        gpu.launch("scale", x, size, dtype_number(x), factor, reads=[factor], writes=[x])
        assert x[-5:].tolist() == [6.0] * 5
        partial = torch.zeros(1024, dtype=torch.float64)
        gpu.only_blocks(last_tile % 1024)
        gpu.launch("squared_sum", partial, x, size, dtype_number(x), reads=[x], writes=[partial])
        assert partial.sum() == 5 * 36
    finally:
        gpu.only_blocks()
