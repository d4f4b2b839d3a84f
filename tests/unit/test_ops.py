"""What torch.compile and FakeTensorMode need of every operator: a truthful schema and a fake implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bmtrain import _ops
from bmtrain._ops import fakes
from bmtrain.loss import FusedCrossEntropy, _function


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def arguments(op: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, y = randn(8), randn(4)
    rows = [randn(3).abs() for _ in range(5)]
    weights, grads = [randn(8), randn(4)], [randn(8, dtype=torch.bfloat16), randn(4, dtype=torch.bfloat16)]
    rounded = [w.bfloat16() for w in weights]
    moments = [[torch.zeros(8), torch.zeros(4)] for _ in range(2)]
    known: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "ordered_sum_": ((torch.zeros(8), [x, x]), {}),
        "scale_": (([x, y], torch.tensor(0.5)), {}),
        "squared_sum": (([x, y],), {}),
        "abs_max": (([x, y],), {}),
        "abs_power_sum": (([x, y], 3.0), {}),
        "adam_move_": ((weights, rounded, grads, *moments), {}),
        "cross_entropy_sums": (
            (randn(3, 5), torch.tensor([0, 4, 2]), None),
            {"smooth": True, "divided": False},
        ),
        "cross_entropy_gradient_": (
            (
                torch.empty(3, 5),
                randn(3, 5),
                torch.tensor([0, 4, 2]),
                None,
                *rows,
                torch.zeros(3, dtype=torch.bool),
            ),
            {},
        ),
    }
    return known[op]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The operators that only a GPU has kernels for, by torch's operations: they say what the kernels compute."""
    library = torch.library.Library("bmtrain", "IMPL")
    library.impl("cross_entropy_sums", sums, "CPU")
    library.impl("cross_entropy_gradient_", gradient, "CPU")
    yield
    library._destroy()


def sums(
    logits: Tensor, target: Tensor, weight: Tensor | None, *, smooth: bool, divided: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = logits.float()
    maximum = x.amax(1)
    if divided:
        maximum = torch.where(maximum == -torch.inf, 0.0, maximum)
    here = (target >= 0) & (target < x.shape[1])
    at_target = x.gather(1, torch.where(here, target, 0)[:, None]).squeeze(1)
    centred = x - maximum[:, None]
    weights = torch.ones(x.shape[1]) if weight is None else weight
    return (
        maximum,
        centred.exp().sum(1),
        torch.where(here, at_target, 0.0 if divided else torch.nan),
        centred @ weights if smooth else torch.empty(0),
    )


def gradient(
    out: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    hit: Tensor,
    spread: Tensor,
    ignored: Tensor,
) -> None:
    p = (logits.float() - maximum[:, None] - log_sum[:, None]).exp() * scale[:, None]
    is_target = torch.arange(logits.shape[1]) == target[:, None]
    p = (
        p
        - is_target * hit[:, None]
        - spread[:, None] * (torch.ones(p.shape[1]) if weight is None else weight)
    )
    out.copy_(torch.where(ignored[:, None], 0.0, p))


@pytest.mark.parametrize("op", list(fakes.FAKES))
def test_opcheck(op: str, on_cpu: None) -> None:
    args, kwargs = arguments(op)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.bmtrain, op).default, args, kwargs, test_utils=tests)


def test_every_operator_has_a_fake() -> None:
    defined = {
        name.removeprefix("bmtrain::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("bmtrain::")
    }
    assert defined == set(fakes.FAKES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_loss_by_kernels(
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    smoothing: float,
    weighted: bool,
    inplace: bool,
) -> None:
    """The loss around the operators of a GPU is the loss of the chunks."""
    monkeypatch.setattr(_function, "_uses_kernels", lambda logits: True)
    logits, target = randn(6, 11, dtype=dtype) * 4, torch.tensor([0, 3, -100, 10, 5, 5])
    weight = randn(11).abs() if weighted else None
    mine, reference = (logits.clone().requires_grad_() for _ in range(2))
    work = mine * 1  # in place needs no leaf
    options = {"weight": weight, "label_smoothing": smoothing}
    loss = FusedCrossEntropy(**options, inplace=inplace or None)(work, target)
    expected = torch.nn.functional.cross_entropy(reference.float(), target, **options)
    torch.testing.assert_close(loss, expected)
    for value in (loss, expected):
        (value * 8).backward()
    torch.testing.assert_close(mine.grad, reference.grad)
    assert mine.grad is not None
    assert not mine.grad[2].any()


@pytest.mark.parametrize("by_kernels", [False, True])
def test_inplace_takes_the_memory_and_one_backward(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, by_kernels: bool
) -> None:
    monkeypatch.setattr(_function, "_uses_kernels", lambda logits: by_kernels)
    x = randn(4, 9).requires_grad_()
    logits = x * 2
    seen: list[int] = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    loss = FusedCrossEntropy(inplace=True)(logits, torch.tensor([1, 2, 3, 4]))
    loss.backward(retain_graph=True)
    assert seen == [logits.data_ptr()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_scale_is_rounded_once() -> None:
    x = randn(1000, dtype=torch.bfloat16)
    factor = torch.tensor(0.123456789, dtype=torch.float64)
    expected = (x.float() * factor.float()).bfloat16()
    version = x._version
    _ops.scale_([x], factor)
    assert torch.equal(x, expected)
    assert x._version > version
    _ops.scale_([], factor)
