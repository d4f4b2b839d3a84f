"""A Block and the module in it: classes, replaced forwards, other parents, scripted functions, one module twice."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.twins import Layer, batches, check_gradients, check_values, distribute, summed_reference, twins

import bmtrain as bmt


def one_module_twice() -> None:
    plain, layer = twins(Layer)
    blocks = bmt.TransformerBlockList([layer, layer])
    assert blocks[0] is not blocks[1] and blocks["1"] is blocks[-1]
    inputs = batches(2, 6)
    summed_reference(lambda rank: plain(plain(inputs[rank])).square().sum())
    blocks(inputs[bmt.rank()]).square().sum().backward()
    check_gradients(plain, blocks)
    block = bmt.Block(distribute(Layer()))
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="twice"):
            bmt.TransformerBlockList([block, block])


@pytest.mark.parametrize("world", [1, 2])
def test_one_module_twice_bc30(world: int) -> None:
    run_ranks(world, one_module_twice)


def replaced_forwards() -> None:
    plain, layer = twins(Layer)
    other = distribute(copy.deepcopy(plain))
    block = bmt.Block(layer)
    blocks = bmt.TransformerBlockList([block])
    x = torch.randn(2, 6)

    def doubled(self: Any, x: torch.Tensor, *, extra: float = 0.0) -> torch.Tensor:
        out: torch.Tensor = torch.nn.functional.linear(x, self.up.weight) + extra
        return out

    block._module.forward = types.MethodType(doubled, block._module)  # type: ignore[method-assign]
    out = block(x, extra=1.0)
    torch.testing.assert_close(out, x @ plain.up.weight.T + 1)
    out.sum().backward()
    assert block.up.weight.grad.abs().sum() > 0 or block.up.weight.numel() == 0
    del block._module.forward
    assert torch.equal(block(x), plain(x))

    counts = []

    def own(self: Any, x: torch.Tensor) -> torch.Tensor:
        counts.append(tuple(self.up.weight.shape))
        return x @ self.up.weight.T

    block.forward = types.MethodType(own, block)
    block(x).sum().backward()
    assert counts == [(13, 6)] * 2  # gathered, and run again in backward
    block.forward = lambda x: block._module(x) * 2
    assert torch.equal(blocks(x), plain(x) * 2)
    del block.forward
    blocks._modules["0"] = bmt.Block(other)
    assert torch.equal(blocks(x), plain(x))
    blocks._modules["0"] = torch.nn.Identity()
    assert torch.equal(blocks(x), x)
    blocks.forward = lambda x: x + 1
    assert torch.equal(blocks(x), x + 1)


@pytest.mark.parametrize("world", [1, 2])
def test_replaced_forwards_bc31(world: int) -> None:
    run_ranks(world, replaced_forwards)


def classes() -> None:
    inner = distribute(Layer())
    block = bmt.Block(inner)
    assert isinstance(block, bmt.CheckpointBlock) and bmt.CheckpointBlock is bmt.Block
    assert type(block) is bmt.Block and type(block) is bmt.block_layer.CheckpointBlock
    assert isinstance(block, Layer) and isinstance(block, bmt.DistributedModule)
    assert repr(block) == repr(inner)
    assert block.train() is block and block.eval() is block and not inner.norm.training
    assert block.requires_grad_(False) is block and not inner.up.weight.requires_grad


def test_classes_bc32() -> None:
    run_ranks(1, classes)


def new_parents() -> None:
    plain, _ = twins(lambda: torch.nn.ModuleList([Layer() for _ in range(3)]))
    blocks = [bmt.Block(distribute(copy.deepcopy(layer))) for layer in plain]
    old = bmt.TransformerBlockList(blocks)
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    old(torch.ones(2, 6)).sum().backward()
    gradients = [p.grad.clone() for p in old.parameters()]
    keys = list(old.state_dict())
    new = bmt.TransformerBlockList(list(old)[1:])
    assert new[0].pre_module() is None and new[0].next_module() is new[1] and new[1].pre_module() is new[0]
    assert list(new.state_dict()) == keys[: len(list(new.state_dict()))]
    check_values(plain[1:], new)
    for got, want in zip(new.parameters(), gradients[-len(list(new.parameters())) :], strict=True):
        assert torch.equal(got.grad, want)
    before = [p.clone() for p in new.parameters()]
    optimizer.step()
    assert any(not torch.equal(p, b) for p, b in zip(new.parameters(), before, strict=True))
    new(torch.ones(2, 6)).sum().backward()


@pytest.mark.parametrize("world", [1, 2])
def test_new_parents_bc33(world: int) -> None:
    run_ranks(world, new_parents)


@torch.jit.script
def scripted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return torch.tanh(y) * torch.sigmoid(y) + torch.exp(-y * y)


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6))
        self.table = torch.nn.Parameter(torch.randn(5, 6))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = scripted(x, self.weight)
        return scripted(out, self.weight) + torch.nn.functional.embedding(ids, self.table)


class ScriptedAtTheEnd(Scripted):
    """The second run ends inside of the scripted function, which saves the last tensor."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return scripted(x + torch.nn.functional.embedding(ids, self.table), self.weight)


class Guarded(Scripted):
    """Falls back to another computation on any exception, one of which ends the second run."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = x + torch.nn.functional.embedding(ids, self.table)
        try:
            return torch.tanh(x @ self.weight)
        except:  # noqa: E722 (as scripts have it)
            return x @ self.weight.square()


class Reworded(Scripted):
    """Raises another exception for each that it catches."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = x + torch.nn.functional.embedding(ids, self.table)
        try:
            return torch.tanh(x @ self.weight)
        except BaseException as error:
            raise ValueError("forward") from error


FORWARDS = [
    (torch.int32, Scripted),
    (torch.int64, Scripted),
    (torch.int64, ScriptedAtTheEnd),
    (torch.int64, Guarded),
    (torch.int64, Reworded),
]


def scripted_functions() -> None:
    for dtype, model_class in FORWARDS:
        plain, inner = twins(model_class)
        model = bmt.Block(inner)
        inputs = batches(4, 6)
        ids = torch.tensor([0, 4, 4, 2], dtype=dtype)
        for step in range(5):  # the executor specialises after a few runs
            xs = [x.detach().requires_grad_() for x in inputs]
            plain.zero_grad()
            model.zero_grad(set_to_none=True)
            summed_reference(lambda rank, f=plain, a=ids, xs=xs: f(xs[rank], a).square().sum())
            x = inputs[bmt.rank()].detach().requires_grad_()
            model(x, ids).square().sum().backward()
            check_gradients(plain, model, tolerance=1e-5)
            torch.testing.assert_close(x.grad, xs[bmt.rank()].grad, msg=f"step {step}")


@pytest.mark.parametrize("world", [1, 2])
def test_scripted_functions_and_ids_bc38(world: int) -> None:
    run_ranks(world, scripted_functions)


def failing_hook() -> None:
    runs = []

    def fail_again(*_: object) -> None:
        runs.append(1)
        if len(runs) > 1:
            raise RuntimeError("in the second run")

    inner = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Identity()))
    inner[1].register_forward_hook(fail_again)  # behind all that is saved
    loss = bmt.Block(inner)(torch.ones(2, 4)).sum()
    with pytest.raises(RuntimeError, match="in the second run"):
        loss.backward()


def test_an_error_of_a_hook_in_the_second_run_is_raised() -> None:
    run_ranks(1, failing_hook)


def callers_tensors() -> None:
    for recompute in (True, False):
        block = bmt.Block(twins(Layer)[1], use_checkpoint=recompute)
        x = torch.randn(2, 6)
        y = torch.randn(2, 6, requires_grad=True)
        z = y * 2
        before = [t.clone() for t in (x, y, z)]
        nodes = [t.grad_fn for t in (x, y, z)]
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                out = block(x, y, z)
            if out.requires_grad:
                out.sum().backward()
            assert [t.requires_grad for t in (x, y, z)] == [False, True, True]
            assert [t.grad_fn for t in (x, y, z)] == nodes
            assert all(torch.equal(a, b) for a, b in zip((x, y, z), before, strict=True))
        assert x.grad is None


def test_callers_tensors_bc39() -> None:
    run_ranks(1, callers_tensors)
