"""Recomputing one function: with and without sharded parameters in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import bmtrain as bmt
from bmtrain.parameter import gather_flat


def keeps_only_the_inputs() -> None:
    calls = []

    @bmt.checkpoint
    def wide(x: Tensor, factor: float, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Doc."""
        calls.append(torch.is_grad_enabled())
        y = torch.nn.functional.dropout((x * factor + shift).exp().sin(), 0.5)
        return y, y.sum()

    assert (wide.__name__, wide.__doc__) == ("wide", "Doc.")
    x, shift = torch.randn(64, requires_grad=True), torch.randn(64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, total = wide(x, 2.0, shift=shift)
        kept = sum(t.numel() for t in saved)
    assert len(calls) == 1
    after = torch.random.get_rng_state()
    (y.sum() + total).backward()
    assert len(calls) == 2
    assert torch.equal(torch.random.get_rng_state(), after)
    inner = x.detach() * 2 + shift.detach()
    expected = 2 * inner.exp() * inner.exp().cos() * (y.detach() != 0) * 2  # the mask of the first run
    torch.testing.assert_close(shift.grad, expected)
    torch.testing.assert_close(x.grad, expected * 2)
    assert kept <= 2 * x.numel()  # the inputs at most
    with torch.no_grad():
        assert not wide(x, 1.0, shift=shift)[0].requires_grad


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = bmt.DistributedParameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def sharded_parameters() -> None:
    layer, block = Layer(), bmt.Block(Layer())
    grads = []
    for call in (lambda x: block(layer(x)), bmt.checkpoint(lambda x: block(layer(x)))):
        x = torch.ones(2, 5, requires_grad=True)
        layer.zero_grad()
        block.zero_grad()
        call(x).sum().backward()
        grads.append([x.grad, *(gather_flat(p, p.grad) for p in (*layer.parameters(), *block.parameters()))])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


_saved: list[StorageWeakRef] = []
_seen: list[bool] = []


class Look(torch.autograd.Function):
    """Notes in backward which of the tensors in `_saved` are still there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _seen.extend(not storage.expired() for storage in _saved)
        return gradient


class Chain(torch.nn.Module):
    """Its second product is kept by selective recomputing; all of its results are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        product = self.second(Look.apply(self.first(x).exp()))
        result = product.square().exp()
        _saved[:] = [StorageWeakRef(t.untyped_storage()) for t in (product, result)]
        return result.sin()


def tensors_are_freed_one_after_the_other(recompute: str, keeps: bool) -> None:
    _seen.clear()
    block = bmt.Block(bmt.BMTrainModelWrapper(Chain()), policy=bmt.BlockPolicy(recompute=recompute))
    block(torch.ones(2, 8)).sum().backward(retain_graph=keeps)
    assert _seen == [keeps, keeps]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("recompute", ["whole", "selective", "off"])
def test_tensors_are_freed_one_after_the_other(recompute: str, keeps: bool) -> None:
    """In the backward of an operator those that later ones saved are gone, unless the graph is kept."""
    run_ranks(1, tensors_are_freed_one_after_the_other, recompute, keeps)


@pytest.mark.parametrize(
    ("world", "case"), [(1, keeps_only_the_inputs), (1, sharded_parameters), (2, sharded_parameters)]
)
def test_checkpoint(world: int, case: object) -> None:
    run_ranks(world, case)
