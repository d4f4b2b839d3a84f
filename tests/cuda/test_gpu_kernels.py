"""The CUDA kernels on a GPU: against the CPU's, bit for bit where their arithmetic is the same, and against torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.losses import assert_cross_entropy
from optimizer_steps import AdamRanges, MomentumRanges, adam_step, lion_step, sgd_step
from torch import Tensor

from bmtrain import _ops
from bmtrain.loss import FusedCrossEntropy
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, LionOptimizer, SGDOptimizer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not _ops.has_steps("cuda"), reason="the core was built without CUDA"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 8, 255, 2048, 1_000_003]
OFFSETS = [0, 1]  # elements: the second is aligned to nothing


@pytest.fixture(autouse=True)
def no_host_waits() -> Iterator[None]:
    """A call for which the host would wait is an error, inside `quiet`."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formulas of the core's steps, one for each call."""
    formulas: list[str] = []
    step_of_groups = _ops.step_of_groups

    def listed(formula: str, *args: Any, **options: Any) -> Any:
        formulas.append(formula)
        return step_of_groups(formula, *args, **options)

    monkeypatch.setattr(_ops, "step_of_groups", listed)
    return formulas


def quiet() -> None:
    torch.cuda.set_sync_debug_mode("error")


def loud() -> None:
    torch.cuda.set_sync_debug_mode("default")


def values(size: int, dtype: torch.dtype, offset: int = 0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + size)
    return (torch.randn(size + offset, generator=generator) * 3).to(dtype).cuda()[offset:]


def assert_bits(gpu: Tensor, cpu: Tensor) -> None:
    assert torch.equal(gpu.cpu().nan_to_num(nan=7.0), cpu.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num", [1, 2, 5, 64])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("offset", OFFSETS)
def test_ordered_sum(num: int, accumulate: bool, dtype: torch.dtype, offset: int) -> None:
    sources = [values(10_007, dtype, offset, seed) for seed in range(num)]
    out = values(10_007, dtype, offset, 99)
    on_cpu = out.cpu()
    quiet()
    _ops.ordered_sum_(out, sources, accumulate=accumulate, factor=0.37)
    loud()
    _ops.ordered_sum_(on_cpu, [x.cpu() for x in sources], accumulate=accumulate, factor=0.37)
    assert_bits(out, on_cpu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_squared_sum_and_scale(size: int, dtype: torch.dtype) -> None:
    tensors = [values(size, dtype, 1), values(size, dtype), values(3, torch.float32)]
    quiet()
    total, again = _ops.squared_sum(tensors), _ops.squared_sum(tensors)
    loud()
    assert torch.equal(total, again)
    expected = torch.stack([x.double().square().sum() for x in tensors]).sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    tensors[0][size // 2] = torch.inf
    assert not _ops.squared_sum(tensors).isfinite()
    factor = torch.tensor(0.123456789, dtype=torch.float64, device="cuda")
    on_cpu = [x.cpu() for x in tensors]
    quiet()
    _ops.scale_(tensors, factor)
    loud()
    _ops.scale_(on_cpu, factor.cpu())
    for x, y in zip(tensors, on_cpu, strict=True):
        assert_bits(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_has_the_bits_of_the_cpu(
    dtype: torch.dtype, grad_dtype: torch.dtype, scale: float, decoupled: bool
) -> None:
    sizes = [5, 2048, 70_001] + [33] * 20  # more ranges than one launch takes
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    weights = [values(n, torch.float32, n % 2) for n in sizes]
    gpu = AdamRanges(
        weights,
        [] if dtype is torch.float32 else [w.to(dtype) for w in weights],
        [],
        [torch.zeros(n, device="cuda") for n in sizes],
        [torch.zeros(n, device="cuda") for n in sizes],
        [1] * len(sizes),
    )
    cpu = AdamRanges(*([x.cpu() for x in tensors] for tensors in gpu[:5]), steps=[1] * len(sizes))
    for step in range(1, 5):
        grads = [values(n, grad_dtype, seed=step) for n in sizes]
        steps = [step + index % 2 for index in range(len(sizes))]
        quiet()
        adam_step(
            gpu._replace(grads=grads, steps=steps), **options, scale=scale, decoupled=decoupled, hold_steps=1
        )
        loud()
        on_cpu = cpu._replace(grads=[g.cpu() for g in grads], steps=steps)
        adam_step(on_cpu, **options, scale=scale, decoupled=decoupled, hold_steps=1)
    for of_gpu, of_cpu in zip(gpu[:5], cpu[:5], strict=True):
        for x, y in zip(of_gpu, of_cpu, strict=True):
            assert_bits(x, y)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"betas": (0.3, 0.9), "maximize": True}])
def test_fp32_adam_has_the_bits_of_torchs_and_its_own_kernel(
    cls: type[torch.optim.Adam], options: dict[str, Any], steps: list[str]
) -> None:
    sizes = [5, 2048, 70_001]
    mine, theirs = ([torch.nn.Parameter(values(n, torch.float32)) for n in sizes] for _ in range(2))
    numbers: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    ours = AdamOptimizer([{"params": mine, **options}], decoupled=cls is torch.optim.AdamW, **numbers)
    peer = cls([{"params": theirs, **options}], **numbers)
    for step in range(4):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = values(p.numel(), torch.float32, seed=step)
            q.grad = p.grad.clone()
        steps.clear()
        ours.step()
        peer.step()
        assert step == 0 or steps == ["adam"]
    for p, q in zip(mine, theirs, strict=True):
        assert torch.equal(p.detach(), q.detach())


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_state_has_the_bits_of_the_cpu(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    sizes = [5, 2048, 70_001]
    pairs = [[torch.nn.Parameter(values(n, dtype).to(device)) for n in sizes] for device in ("cuda", "cpu")]
    optimizers = [
        AdamOptimizer(params, lr=1e-2, weight_decay=0.1, state_dtype=state_dtype) for params in pairs
    ]
    for step in range(4):
        for params, optimizer in zip(pairs, optimizers, strict=True):
            for p in params:
                p.grad = values(p.numel(), dtype, seed=step).to(p.device)
            optimizer.step()
    for x, y in zip(*pairs, strict=True):
        assert_bits(x.detach(), y.detach())
        for name, array in optimizers[0].state[x].items():
            if isinstance(array, Tensor):
                assert torch.equal(array.cpu(), optimizers[1].state[y][name]), name


@pytest.mark.parametrize("optimizer_class", [AdamOptimizer, SGDOptimizer, LionOptimizer])
def test_parameter_groups_share_a_call(optimizer_class: Any, steps: list[str]) -> None:
    """One for all 16-bit parameters of a step, which has the bits of the CPU."""
    with_momentum = {"momentum": 0.9} if optimizer_class is SGDOptimizer else {}
    models = []
    for device in ("cuda", "cpu"):
        groups: list[dict[str, Any]] = [
            {
                "params": [torch.nn.Parameter(values(size, torch.bfloat16).to(device))],
                "weight_decay": 0.1 * size,
            }
            for size in (5, 2048, 33)
        ]
        optimizer = optimizer_class(groups, lr=1e-2, **with_momentum)
        parameters = [p for group in groups for p in group["params"]]
        for step in range(3):
            for p in parameters:
                p.grad = values(p.numel(), torch.bfloat16, seed=step).to(device)
            steps.clear()
            optimizer.step()
            assert len(steps) == 1
        models.append(parameters)
    for of_gpu, of_cpu in zip(*models, strict=True):
        assert_bits(of_gpu.detach(), of_cpu.detach())


@pytest.mark.parametrize("rounded", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_sgd_and_lion_have_the_bits_of_the_cpu(grad_dtype: torch.dtype, rounded: torch.dtype | None) -> None:
    sizes = [5, 2048, 70_001] + [33] * 20
    weights = [values(n, torch.float32, n % 2) for n in sizes]
    momenta = [torch.zeros(n, device="cuda") for n in sizes]
    low = [] if rounded is None else [w.to(rounded) for w in weights]
    gpu = MomentumRanges(weights, low, [], momenta, [])
    cpu = MomentumRanges(*([x.cpu() for x in tensors] for tensors in gpu[:4]), fresh=[])
    for step in range(4):
        grads = [values(n, grad_dtype, seed=step) for n in sizes]
        for ranges, gradients in ((gpu, grads), (cpu, [g.cpu() for g in grads])):
            now = ranges._replace(grads=gradients, fresh=[step == 0] * len(sizes))
            sgd_step(now, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, scale=3.0)
            lion_step(now, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, scale=4.0, maximize=True)
    for of_gpu, of_cpu in zip(gpu[:4], cpu[:4], strict=True):
        for x, y in zip(of_gpu, of_cpu, strict=True):
            assert_bits(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offloaded_adam_has_the_bits_of_the_gpus(dtype: torch.dtype) -> None:
    start = [values(n, dtype) for n in (1, 100, 50_000)]
    pairs = [[torch.nn.Parameter(x.clone()) for x in start] for _ in range(2)]
    optimizers = [
        cls(params, lr=1e-2, weight_decay=0.1)
        for cls, params in zip((AdamOptimizer, AdamOffloadOptimizer), pairs, strict=True)
    ]
    for step in range(4):
        for params, optimizer in zip(pairs, optimizers, strict=True):
            for p in params:
                p.grad = values(p.numel(), dtype, seed=step)
            optimizer.step(scale=8.0)
    for x, y in zip(*pairs, strict=True):
        assert_bits(x.detach(), y.detach().cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_adam_of_every_dtype_is_adam(dtype: torch.dtype) -> None:
    mine, reference = (torch.nn.Parameter(values(999, dtype).to(d)) for d in (dtype, torch.float64))
    ours = AdamOptimizer([mine], lr=1e-2)
    theirs = torch.optim.AdamW([reference], lr=1e-2, weight_decay=0)
    for step in range(10):
        mine.grad = values(999, dtype, seed=step)
        reference.grad = mine.grad.double()
        ours.step()
        theirs.step()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(mine.detach().double(), reference.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 1000), (17, 50_257), (4, 131_072)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("inplace", [None, True])
def test_cross_entropy(
    dtype: torch.dtype, shape: tuple[int, int], smoothing: float, weighted: bool, inplace: bool | None
) -> None:
    rows, vocab = shape
    x = values(rows * vocab, dtype).view(shape)
    target = torch.randint(vocab, (rows,), device="cuda")
    target[rows // 2] = -100 if rows > 1 else target[0]
    weight = values(vocab, torch.float32).abs() if weighted else None
    mine = x.clone().requires_grad_()
    loss_of = FusedCrossEntropy(weight, label_smoothing=smoothing, inplace=inplace)
    quiet()
    loss = loss_of(mine * 1, target)
    (loss * 128).backward()
    loud()
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    tolerances = {"rtol": tolerance, "atol": tolerance}
    assert_cross_entropy(loss, mine, target, weight=weight, smoothing=smoothing, factor=128, **tolerances)
    assert mine.grad is not None
    assert rows == 1 or not mine.grad[rows // 2].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_logits_and_targets_make_the_loss_nan(bad: float) -> None:
    x = values(3000, torch.bfloat16).view(3, 1000)
    target = torch.tensor([5, 6, 7], device="cuda")
    x[1, 800] = bad
    losses = FusedCrossEntropy(reduction="none")(x, target)
    assert losses.isnan().tolist() == [False, True, False]
    losses = FusedCrossEntropy(reduction="none")(x, target + 995)
    assert losses.isnan().tolist() == [True, True, True]


def test_cross_entropy_allocates_the_gradient_and_nothing_else_of_its_size() -> None:
    x = torch.randn(1024, 32_768, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(32_768, (1024,), device="cuda")
    size = x.numel() * 2
    for inplace, expected in ((None, 1.0), (True, 0.0)):
        logits = x.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        FusedCrossEntropy(inplace=inplace)(logits, target).backward()
        added = (torch.cuda.max_memory_allocated() - before) / size
        assert expected <= added < expected + 0.02


def test_more_elements_than_32_bits_count() -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of the GPU")
    size = (1 << 32) + 5
    x = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3
    assert _ops.squared_sum([x]).item() == 9
    _ops.scale_([x], torch.tensor(2.0))
    assert x[-1].item() == 6
