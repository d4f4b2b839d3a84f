"""The arithmetic of the CUDA kernels (csrc/cuda/*_math.h, element.h) on the host, against torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch
from adam_factors import adam_factors
from kernel_levels import same_bits
from optimizer_steps import MomentumRanges, lion_step, sgd_step
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("kernels") / "kernel_math.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra"]
    source = "tests/cuda/host/kernel_math.cpp"
    subprocess.run(
        [*command, "-Werror", "-fPIC", "-shared", "-Icsrc", source, "-o", str(library)],
        cwd=ROOT,
        check=True,
        timeout=300,
    )
    return ctypes.CDLL(str(library))


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def awkward() -> Tensor:
    """Every exponent and sign with fractions around the ties of both 16-bit types, and random bits."""
    exponents = torch.arange(256, dtype=torch.int64)[:, None] << 23
    fractions = torch.tensor(
        [
            0,
            1,
            0xFFF,
            0x1000,
            0x1001,
            0x2FFF,
            0x3000,
            0x3001,
            0x7FFF,
            0x8000,
            0x8001,
            0x17FFF,
            0x18000,
            0x7FFFFF,
        ]
    )
    bits = (exponents + fractions).reshape(-1)
    bits = torch.cat([bits, bits + (1 << 31), torch.randint(1 << 32, (200_000,))])
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, b"bf16"), (torch.float16, b"half")])
def test_rounding_is_torchs(kernels: ctypes.CDLL, dtype: torch.dtype, name: bytes) -> None:
    x = awkward()
    out = torch.empty(x.numel(), dtype=dtype)
    kernels[f"round_to_{name.decode()}"](at(x), at(out), ctypes.c_int64(x.numel()))
    expected = x.to(dtype)
    is_number = ~x.isnan()
    assert torch.equal(out.view(torch.int16)[is_number], expected.view(torch.int16)[is_number])
    assert torch.equal(out.isnan(), expected.isnan())


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, b"bf16"), (torch.float16, b"half")])
def test_widening_is_exact_for_every_value(kernels: ctypes.CDLL, dtype: torch.dtype, name: bytes) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(x.numel())
    kernels[f"widen_{name.decode()}"](at(x), at(out), ctypes.c_int64(x.numel()))
    assert torch.equal(out.nan_to_num(nan=7.0), x.float().nan_to_num(nan=7.0))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_adam_is_torchs(kernels: ctypes.CDLL, decoupled: bool, scale: float, beta1: float) -> None:
    torch.manual_seed(0)
    lr, beta2, eps, decay = 1e-2, 0.999, 1e-8, 0.1
    mine = torch.randn(1000)
    w, m, v = mine.clone().double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    exp_avg, exp_avg_sq = torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 6):
        g = torch.randn(1000) * scale
        factors = adam_factors(
            step, lr=lr, betas=(beta1, beta2), eps=eps, decay=decay, scale=scale, decoupled=decoupled
        )
        kernels.adam_step(at(factors), at(mine), at(g), at(exp_avg), at(exp_avg_sq), ctypes.c_int64(1000))
        exact = g.double() / scale
        if decoupled:
            w *= 1 - lr * decay
        else:
            exact = exact + decay * w
        m = beta1 * m + (1 - beta1) * exact
        v = beta2 * v + (1 - beta2) * exact**2
        w -= lr / (1 - beta1**step) * m / ((v / (1 - beta2**step)).sqrt() + eps)
    torch.testing.assert_close(mine.double(), w, rtol=1e-5, atol=1e-6)


def test_sgd_and_lion_are_those_of_the_cpu(kernels: ctypes.CDLL) -> None:
    """Bit for bit, zeros, infinities and NaN included."""
    special = torch.tensor([0.0, -0.0, 1e-45, 3e38, torch.inf, -torch.inf, torch.nan, 1.0])
    values = torch.cat([torch.randn(1000, generator=torch.Generator().manual_seed(0)), special])
    lr, keep, decay, dampening = 0.1, 0.9, 0.3, 0.25
    for fresh, nesterov, has_momentum in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 0)):
        mine, b = values.clone(), values.roll(3)
        theirs, c = mine.clone(), b.clone()
        take = 1 - (0 if nesterov else dampening)
        factors = floats(0, 3.0, 1, fresh, nesterov, keep, take, 0, 0, -lr, 1, decay)
        momentum = b if has_momentum else None
        kernels.momentum_step(at(factors), at(mine), at(values), at(momentum), ctypes.c_int64(len(mine)))
        ranges = MomentumRanges([theirs], [], [values], [c] if has_momentum else [], [bool(fresh)])
        sgd_step(ranges, lr=lr, momentum=keep, dampening=1 - take, weight_decay=decay, scale=3.0,
                  nesterov=bool(nesterov))  # fmt: skip
        assert same_bits(mine, theirs)
        assert same_bits(b, c)
    mine, b = values.clone(), values.roll(3)
    theirs, c = mine.clone(), b.clone()
    factors = floats(1, 0.5, 0, 0, 0, 0.99, 1 - 0.99, 0.9, 1 - 0.9, -lr, 2, 1 - lr * decay)
    kernels.momentum_step(at(factors), at(mine), at(values), at(b), ctypes.c_int64(len(mine)))
    ranges = MomentumRanges([theirs], [], [values], [c], [])
    lion_step(ranges, lr=lr, betas=(0.9, 0.99), weight_decay=decay, scale=2.0)
    assert same_bits(mine, theirs)
    assert same_bits(b, c)


ROWS = {
    "random": torch.randn(1001, generator=torch.Generator().manual_seed(1)) * 8,
    "growing": torch.arange(300.0),
    "falling": -torch.arange(300.0) * 7,
    "equal": torch.full((70,), 6e4),
    "one": torch.tensor([3.0]),
    "some -inf": torch.where(torch.arange(90) % 3 == 0, -torch.inf, torch.arange(90.0)),
    "first -inf": torch.cat(
        [torch.full((64,), -torch.inf), torch.randn(9, generator=torch.Generator().manual_seed(2))]
    ),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("num_parts", [1, 7, 256])
@pytest.mark.parametrize("weighted", [False, True])
def test_row_sums(kernels: ctypes.CDLL, name: str, num_parts: int, weighted: bool) -> None:
    x = ROWS[name].contiguous()
    weight = torch.rand(x.numel()) if weighted else None
    out = torch.empty(3)
    kernels.row_sums(at(x), at(weight), ctypes.c_int64(x.numel()), num_parts, at(out))
    centred = x.double() - x.double().max()
    assert out[0] == x.max()
    torch.testing.assert_close(out[1].double(), centred.exp().sum(), rtol=1e-5, atol=0)
    if weight is not None:
        torch.testing.assert_close(out[2].double(), (centred * weight).sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ROWS)
def test_packed_row_sums(kernels: ctypes.CDLL, name: str) -> None:
    x = ROWS[name].contiguous()
    out = torch.empty(2)
    kernels.row_sums_packed(at(x), ctypes.c_int64(x.numel()), at(out))
    assert out[0] == x.max()
    torch.testing.assert_close(
        out[1].double(), (x.double() - x.double().max()).exp().sum(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 5, 99])
def test_bad_logits_make_a_bad_loss(kernels: ctypes.CDLL, bad: float, place: int) -> None:
    x = torch.randn(100)
    x[place] = bad
    out = torch.empty(3)
    kernels.row_sums(at(x), None, ctypes.c_int64(100), 8, at(out))
    assert out[1].isnan()
    kernels.row_sums_packed(at(x), ctypes.c_int64(100), at(out))
    assert out[1].isnan()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradient_is_torchs(kernels: ctypes.CDLL, smoothing: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(257, requires_grad=True)
    weight = torch.rand(257)
    target = torch.tensor(31)
    loss = torch.nn.functional.cross_entropy(
        x, target, weight=weight, label_smoothing=smoothing, reduction="sum"
    )
    loss.backward()
    values = x.detach()
    maximum = values.max()
    log_sum = (values - maximum).exp().sum().log()
    hit = weight[target] * (1 - smoothing)
    spread = smoothing / 257
    factors = torch.stack([maximum, log_sum, hit + spread * weight.sum(), hit, torch.tensor(spread)])
    out = torch.empty(257)
    kernels.row_gradient(
        at(values), at(weight), at(factors), ctypes.c_int64(31), ctypes.c_int64(257), at(out)
    )
    assert x.grad is not None
    torch.testing.assert_close(out, x.grad, rtol=1e-5, atol=1e-6)
