"""Wrapped SyncBatchNorm: statistics, results and gradients are those of one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt

SHAPE = (12, 5, 3)


class Net(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        self.first = kind(5, **options)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Conv1d(5, 5, 1), kind(5, **options), torch.nn.Tanh())]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.first(x))


def whole_batch(options: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = Net(torch.nn.BatchNorm1d, options)
    torch.manual_seed(1)
    x, weights = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    for _ in range(2):
        out = net(x * 2 + 1)
        (out * weights).sum().backward()
    return out.detach(), x.grad, [p.grad for p in net.parameters()], net.state_dict(), net.eval()(x).detach()


def parts(options: dict[str, Any], sizes: list[int], recompute: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    policy = bmt.BlockPolicy(recompute=recompute)
    with bmt.default_policy(policy):
        net = bmt.BMTrainModelWrapper(Net(torch.nn.SyncBatchNorm, options))
    torch.manual_seed(1)
    x, weights = (torch.randn(SHAPE).split(sizes)[bmt.rank()] for _ in range(2))
    x.requires_grad_()
    for _ in range(2):
        out = net(x * 2 + 1)
        (out * weights).sum().backward()
    gradients = [p.gather_grad() for p in net.parameters()]
    return out.detach(), x.grad, gradients, net.state_dict(), net.eval()(x).detach()


@pytest.mark.parametrize("recompute", ["whole", "off"])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_as_one_process_with_the_whole_batch(options: dict[str, Any], recompute: str) -> None:
    expected = whole_batch(options)
    found = run_ranks(3, parts, options, [5, 1, 6], recompute)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    for index in (0, 1):
        torch.testing.assert_close(torch.cat([value[index] for value in found]), expected[index], **close)
    for value in found:
        torch.testing.assert_close(dict(value[3]), dict(expected[3]), **close)
        for gradient, reference in zip(value[2], expected[2], strict=True):
            torch.testing.assert_close(gradient, reference, **close)
    if options.get("track_running_stats", True):
        torch.testing.assert_close(torch.cat([value[4] for value in found]), expected[4], **close)


def in_bfloat16() -> None:
    net = bmt.BMTrainModelWrapper(torch.nn.SyncBatchNorm(4, dtype=torch.bfloat16))
    x = torch.randn(6, 4, dtype=torch.bfloat16).add_(3 * bmt.rank()).requires_grad_()
    out = net(x)
    out.float().square().sum().backward()
    assert out.dtype is x.grad.dtype is torch.bfloat16
    mean = bmt.distributed.all_reduce(out.detach().float().mean(0), "avg")
    assert mean.abs().max() < 0.05 and out.detach().float().mean(0).abs().min() > 0.5


def refused() -> None:
    net = bmt.BMTrainModelWrapper(torch.nn.SyncBatchNorm(4))
    with pytest.raises(ValueError, match="2D"):
        net(torch.ones(3))


def test_16_bits_and_shapes() -> None:
    run_ranks(2, in_bfloat16)
    run_ranks(2, refused)
