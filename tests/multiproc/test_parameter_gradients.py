"""Reading parameters outside blocks, and the gradients that come of it: hooks, freezing, several backwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.twins import (
    Layer,
    batches,
    check_gradients,
    distribute,
    full_gradient,
    summed_reference,
    twins,
)

import bmtrain as bmt
from bmtrain.parameter import full_value

WORLDS = [1, 2, 4]


class Reader(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(5, 3))
        self.child = distribute(torch.nn.Linear(3, 5))
        self.register_parameter("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.weight, self.weight
        assert torch.equal(first, second) and first.shape == (5, 3) and self.nothing is None
        with torch.no_grad():
            assert not self.weight.requires_grad
        return (x @ first.T + (x * 2) @ second.T + self.child(x) + self.child.bias).square().sum()


def reading() -> None:
    torch.manual_seed(1)
    model = Reader()
    values = [full_value(p).clone().requires_grad_() for p in model.parameters()]
    inputs = batches(4, 3)

    def plain(x: torch.Tensor) -> torch.Tensor:
        weight, w, b = values
        return (x @ weight.T * 3 + torch.nn.functional.linear(x, w, b) + b).square().sum()

    for _ in range(2):  # a second backward without zeroing doubles (BC-13)
        wanted = summed_reference(lambda rank: plain(inputs[rank]))
        loss = model(inputs[bmt.rank()])
        loss.backward()
        assert loss.item() == pytest.approx(wanted[bmt.rank()], rel=1e-6)
        check_gradients(values, model)
    for p in model.parameters():
        assert p.grad is not None and p.grad.shape == p.shape  # the slice of the sum over the ranks (BC-12)
    model.weight[0] = 0  # type: ignore[index]  # acts on a temporary
    assert torch.equal(full_value(model._parameters["weight"]), values[0])


@pytest.mark.parametrize("world", WORLDS)
def test_reading_and_gradients_bc10_bc11_bc12_bc13(world: int) -> None:
    run_ranks(world, reading)


def twice(form: str) -> None:
    plain, _ = twins(lambda: torch.nn.ModuleList([Layer(), Layer()]))
    layers: Any = [distribute(copy.deepcopy(m)) for m in plain]
    model: Any = torch.nn.Sequential(*layers)
    if form == "blocks":
        model = torch.nn.Sequential(*[bmt.Block(m) for m in layers])
    elif form == "list":
        model = bmt.TransformerBlockList(layers)
    inputs = batches(2, 6)
    for _ in range(2):
        summed_reference(lambda rank: plain[1](plain[0](inputs[rank])).square().sum())
        model(inputs[bmt.rank()]).square().sum().backward()
        check_gradients(plain, model)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("form", ["bare", "blocks", "list"])
def test_second_backward_doubles_bc13(world: int, form: str) -> None:
    run_ranks(world, twice, form)


REPLACED = {
    "part of another": lambda grad: grad.view(-1).flip(0).view(grad.shape),
    "own memory": lambda grad: grad.detach(),
}


def added_to_what_a_user_put_there(form: str) -> None:
    plain, layer = twins(Layer)
    model: Any = layer if form == "bare" else bmt.Block(layer)
    x = batches(1, 6)[0]
    for change in (None, *REPLACED.values()):
        if change is not None:
            for p in (*plain.parameters(), *model.parameters()):
                p.grad = change(p.grad)
        for module in (plain, model):
            module(x).square().sum().backward()
        check_gradients(plain, model)
    for module in (plain, model):
        module.zero_grad(set_to_none=True)
        module(x).square().sum().backward()
        *_, norm, bias = (p for p in module.parameters() if p.numel() == 6)
        norm.grad, bias.grad = bias.grad, norm.grad
        module(x).square().sum().backward()
    check_gradients(plain, model)
    for module in (plain, model):  # all elements in one place, at the start of the parameter's own
        module.zero_grad(set_to_none=True)
        module(x).square().sum().backward()
        for p in module.parameters():
            p.grad = p.grad.view(-1)[:1].expand(p.grad.numel()).view_as(p.grad)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers"):
            module(x).square().sum().backward()


@pytest.mark.parametrize("form", ["bare", "block"])
def test_backward_adds_to_gradients_that_a_user_replaced(form: str) -> None:
    run_ranks(1, added_to_what_a_user_put_there, form)


def frozen_later(form: str) -> None:
    inner = twins(Layer)[1]
    if form == "before":
        inner.up.requires_grad_(False)
    model: Any = inner if form == "bare" else bmt.Block(inner)
    model.up.requires_grad_(True)
    x = torch.randn(2, 6)
    model(x).square().sum().backward()
    frozen = list(model.up.parameters())
    once = [p.grad.clone() for p in frozen]
    others = [p.grad.clone() for p in model.down.parameters()]
    model.up.requires_grad_(False)
    model(x).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(frozen, once, strict=True))
    for p, g in zip(model.down.parameters(), others, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)
    model.up.requires_grad_(True)
    model(x).square().sum().backward()
    for p, g in zip(frozen, once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("form", ["bare", "before", "after"])
def test_freezing_keeps_gradients_bc14(world: int, form: str) -> None:
    run_ranks(world, frozen_later, form)


def frozen_backbone() -> None:
    _, model = twins(lambda: torch.nn.ModuleList([Layer() for _ in range(3)]))
    model[:2].requires_grad_(False)
    blocks = bmt.TransformerBlockList(list(model))
    optimizer = torch.optim.Adam(blocks.parameters(), lr=0.1)
    before = [p.detach().clone() for p in blocks.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        blocks(torch.randn(2, 6)).square().sum().backward()
        optimizer.step()
    for block in blocks[:2]:
        assert all(p.grad is None and p not in optimizer.state for p in block.parameters())
        assert all(storage.shards.gradient_shard is None for storage in block._storages)
    frozen = len(list(model[:2].parameters()))
    for i, (p, old) in enumerate(zip(blocks.parameters(), before, strict=True)):
        assert torch.equal(p, old) == (i < frozen or p.numel() == 0)


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_backbone_costs_nothing_bc15(world: int) -> None:
    run_ranks(world, frozen_backbone)


def hooks(form: str) -> None:
    plain, inner = twins(lambda: torch.nn.Linear(3, 5))
    seen: list[Any] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(grad.shape))
        return grad.clamp(-0.5, 0.5) * 2

    def done(param: torch.Tensor) -> None:
        seen.append(full_gradient(param).clone())  # type: ignore[union-attr]

    def register(module: Any) -> list[Any]:
        weight = module._parameters["weight"]
        return [weight.register_hook(double), weight.register_post_accumulate_grad_hook(done)]

    handles = register(inner) if form in ("bare", "before") else []
    model: Any = inner if form == "bare" else bmt.Block(inner, use_checkpoint=form != "kept")
    handles = handles or register(model)
    inputs = batches(4, 3)
    want = torch.zeros(5, 3)
    for rank in range(bmt.world_size()):
        plain.zero_grad()
        plain(inputs[rank]).sin().sum().backward()
        want += plain.weight.grad.clamp(-0.5, 0.5) * 2  # type: ignore[union-attr,operator]
    calls = 1 if form == "bare" else 2
    for _ in range(2):
        seen.clear()
        model.zero_grad()
        loss = model(inputs[bmt.rank()]).sin().sum()
        if calls == 2:
            loss = loss + model(inputs[bmt.rank()]).sin().sum()
        loss.backward()
        assert seen[:-1] == [(5, 3)] * calls
        torch.testing.assert_close(seen[-1], want * calls)
        torch.testing.assert_close(full_gradient(next(model.parameters())), want * calls)
    for handle in handles:
        handle.remove()
    seen.clear()
    model(inputs[0]).sum().backward()
    assert seen == []


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("form", ["bare", "before", "after", "kept"])
def test_hooks_see_the_full_gradient(world: int, form: str) -> None:
    run_ranks(world, hooks, form)


class OnRank0(torch.autograd.Function):
    """As kernels of experts whose rank has no tokens, it returns no gradient on the other ranks."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if bmt.rank() else gradient


def gradient_on_one_rank() -> None:
    weight = bmt.DistributedParameter(torch.ones(5))
    for number in (1.0, 2.0):
        OnRank0.apply(weight.gather()).sum().backward()
        assert torch.equal(full_gradient(weight), torch.full((5,), number))


def test_a_function_may_return_no_gradient_on_some_ranks() -> None:
    run_ranks(2, gradient_on_one_rank)


class Branches(bmt.DistributedModule):
    """Two weights, of which a forward uses those that it is told."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a, self.b = (bmt.DistributedParameter(torch.ones(size, size)) for _ in range(2))

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        return sum((x @ getattr(self, name) for name in used), x)


def gradients_of_branches(size: int, sets_to_none: bool) -> list[list[float]]:
    block = bmt.Block(Branches(size), use_checkpoint=False)
    found = []
    for used in ("ab", "ab", "ab"[bmt.rank()], "ab"[1 - bmt.rank()]):
        block.zero_grad(set_to_none=sets_to_none)
        block(torch.full((2, size), 1.0 + bmt.rank()), used).sum().backward()
        found.append([full_gradient(p).unique().tolist() for p in block.parameters()])
    return found


@pytest.mark.parametrize("size", [60, 700], ids=["small", "large"])
@pytest.mark.parametrize("sets_to_none", [True, False])
def test_parameters_that_a_rank_does_not_use_get_the_gradients_of_others(
    size: int, sets_to_none: bool
) -> None:
    both, own, others = [[6.0], [6.0]], [[2.0], [4.0]], [[4.0], [2.0]]
    assert run_ranks(2, gradients_of_branches, size, sets_to_none) == [[both, both, own, others]] * 2
