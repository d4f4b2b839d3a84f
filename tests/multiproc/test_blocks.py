"""Blocks: what a call gives, what it costs in forwards, and that gradients are those of plain torch."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.twins import Layer, batches, check_gradients, check_values, distribute, summed_reference, twins

import bmtrain as bmt

WORLDS = [1, 2, 4]


class Returning(torch.nn.Module):
    """Gives its input back in some structure."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return {"tensor": x * 2, "one": (x,), "two": (x, x), "ten": [x] * 10}[self.form]


def structures() -> None:
    for grad in (False, True):
        x = torch.ones(2, requires_grad=grad)
        results = {form: bmt.Block(Returning(form))(x) for form in ("tensor", "one", "two", "ten")}
        assert isinstance(results["tensor"], torch.Tensor)
        assert [type(results[form]) for form in ("one", "two", "ten")] == [tuple] * 3
        assert [len(results[form]) for form in ("one", "two", "ten")] == [1, 2, 10]
        assert results["tensor"].requires_grad is grad
        if grad:
            (results["tensor"].sum() + sum(t.sum() for t in results["ten"])).backward()
            assert x.grad is not None
            assert x.grad.tolist() == [12.0, 12.0]


def test_structures_of_results_bc19() -> None:
    run_ranks(1, structures)


def frozen_and_trainable() -> None:
    _, first = twins(Layer)
    _, second = twins(Layer, seed=1)
    first.requires_grad_(False)
    frozen, trained = bmt.Block(first), bmt.Block(second)
    hidden = frozen(torch.ones(2, 6))
    assert not hidden.requires_grad
    trained(hidden).sum().backward()
    assert (first.calls, second.calls) == (1, 2)
    assert all(p.grad is None for p in frozen.parameters())
    assert all(p.grad is not None for p in trained.parameters())


def stack_half_frozen() -> None:
    for freeze_first in (True, False):
        layers = [twins(Layer, seed=i)[1] for i in range(10)]
        for layer in layers[:5]:
            layer.requires_grad_(not freeze_first)
        blocks = bmt.TransformerBlockList([bmt.Block(layer) for layer in layers])
        for layer in layers[:5]:
            layer.requires_grad_(False)
        blocks(torch.ones(2, 6), None).sum().backward()
        assert [layer.calls for layer in layers] == [1] * 5 + [2] * 5


def without_recompute() -> None:
    _, layer = twins(Layer)
    block = bmt.Block(layer, use_checkpoint=False)
    block(torch.ones(2, 6)).sum().backward()
    block(torch.ones(2, 6, requires_grad=True)).sum().backward()
    assert layer.calls == 2
    with torch.no_grad():
        block(torch.ones(2, 6))
    assert layer.calls == 3


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("body", [frozen_and_trainable, stack_half_frozen, without_recompute])
def test_forward_counts_bc20_bc21_bc22(world: int, body: Any) -> None:
    run_ranks(world, body)


class Biased(torch.nn.Module):
    """Layers that share a bias made by a trainable module."""

    def __init__(self, wrap: bool = False) -> None:
        super().__init__()
        self.bias = torch.nn.Linear(6, 6)
        self.layers: Any = torch.nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor, loop: bool = True) -> torch.Tensor:
        bias = self.bias(x.detach())
        if not loop:
            hidden: torch.Tensor = self.layers(x, mask, bias, None, None, None)
            return hidden
        for layer in self.layers:
            x = layer(x, mask, bias, None, None, None)
        return x


def shared_bias(**options: Any) -> list[float]:
    plain, model = twins(Biased)
    model.layers = bmt.TransformerBlockList([bmt.Block(layer, **options) for layer in model.layers])
    inputs = batches(3, 6)
    mask = torch.ones(6)
    wanted = summed_reference(lambda rank: plain(inputs[rank], mask).square().mean())
    bits = []
    for loop in (False, True):
        model.zero_grad(set_to_none=True)
        x = inputs[bmt.rank()]
        loss = model(x, mask, loop=loop).square().mean()
        loss.backward()
        assert loss.item() == pytest.approx(wanted[bmt.rank()], rel=1e-6)
        assert (x.grad, x.requires_grad, mask.requires_grad) == (None, False, False)
        check_gradients(plain, model)
        bits += [loss.item(), *(p.grad.double().sum().item() for p in model.parameters())]
    half = len(bits) // 2
    assert bits[:half] == bits[half:]
    return bits


@pytest.mark.parametrize("world", WORLDS)
def test_none_arguments_and_shared_bias_bc23_bc28(world: int) -> None:
    results = [
        run_ranks(world, shared_bias, use_checkpoint=recompute, zero_level=level)
        for recompute in (True, False)
        for level in (2, 3)
    ]
    assert all(result == results[0] for result in results)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(6, 18)

    def forward(self, x: torch.Tensor, *, past_key_value: Any = None, use_cache: bool = False) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        if past_key_value is not None:
            k, v = torch.cat([past_key_value[0], k], 1), torch.cat([past_key_value[1], v], 1)
        causal = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - q.size(1))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        return (x + out, (k, v)) if use_cache else x + out


def cached_generation() -> None:
    plain, _ = twins(lambda: torch.nn.ModuleList([Attention() for _ in range(2)]))
    blocks = [bmt.Block(distribute(copy.deepcopy(layer))) for layer in plain]
    tokens = torch.randn(1, 5, 6)

    def run(layers: Any, x: torch.Tensor, past: list[Any]) -> tuple[torch.Tensor, list[Any]]:
        caches = []
        for layer, one in zip(layers, past, strict=True):
            result = layer(x, past_key_value=one, use_cache=True)
            assert type(result) is tuple and type(result[1]) is tuple
            x, cache = result
            caches.append(cache)
        return x, caches

    for context in (torch.no_grad, torch.inference_mode):
        with context():
            whole = blocks[1](blocks[0](tokens))
            assert torch.equal(whole, plain[1](plain[0](tokens)))
            past: list[Any] = [None, None]
            steps = []
            for t in range(5):
                out, past = run(blocks, tokens[:, t : t + 1], past)
                steps.append(out)
            torch.testing.assert_close(torch.cat(steps, 1), whole)


def keyword_only() -> None:
    class Inner(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, /, y: Any = 1, *rest: Any, scale: torch.Tensor, **more: Any
        ) -> Any:
            return x * scale, (y, rest, more)

    x, scale = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    out, others = bmt.Block(Inner())(x, "y", 7, None, scale=scale, mask=None, flag=True)
    assert others == ("y", (7, None), {"mask": None, "flag": True})
    out.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0] and scale.grad.item() == 2.0  # type: ignore[union-attr]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("body", [cached_generation, keyword_only])
def test_cache_and_keywords_bc24_bc25(world: int, body: Any) -> None:
    run_ranks(world, body)


class Mixing(torch.nn.Module):
    def forward(self, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return a * d + b, b * c, c + e.sin(), a  # one result more than hidden states


def three_hidden() -> None:
    def grads(run: Any) -> list[torch.Tensor]:
        inputs = [
            torch.randn(3, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(5)
        ]
        results = run(*inputs)
        sum((r * (i + 1)).sum() for i, r in enumerate(results)).backward()
        return [*(r.detach() for r in results), *(i.grad for i in inputs)]  # type: ignore[misc]

    def plain(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        for _ in range(2):
            a, b, c, _ = Mixing()(a, b, c, d, e)
        return a, b, c

    wanted = grads(plain)
    for forms in ([Mixing(), Mixing()], [bmt.Block(Mixing(), use_checkpoint=False) for _ in range(2)]):
        got = grads(bmt.TransformerBlockList(forms, num_hidden=3))
        assert len(got) == 8 and all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def no_parameters() -> None:
    block = bmt.Block(torch.nn.GELU())
    x = torch.randn(4, requires_grad=True)
    block(x).sum().backward()
    want = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)[0]
    assert torch.equal(x.grad, want)  # type: ignore[arg-type]
    assert not block(torch.ones(2)).requires_grad


def test_three_hidden_states_bc26() -> None:
    run_ranks(1, three_hidden)


@pytest.mark.parametrize("world", [1, 2])
def test_block_without_parameters_bc37(world: int) -> None:
    run_ranks(world, no_parameters)


def dropout() -> None:
    plain, _ = twins(lambda: Layer(dropout=0.5))
    inputs = batches(3, 6)

    def step(module: torch.nn.Module, x: torch.Tensor) -> tuple[float, torch.Tensor]:
        loss = module(x).square().sum()
        loss.backward()
        return loss.item(), torch.rand(1)

    for recompute in (True, False):
        model = bmt.Block(distribute(copy.deepcopy(plain)), use_checkpoint=recompute)
        plain.zero_grad()
        for rank in range(bmt.world_size()):
            torch.manual_seed(5)
            first = step(plain, inputs[rank])
            second = step(plain, inputs[rank])
            if rank == bmt.rank():
                want = first, second
        torch.manual_seed(5)
        got = step(model, inputs[bmt.rank()]), step(model, inputs[bmt.rank()])
        for (loss, draw), (wanted_loss, wanted_draw) in zip(got, want, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-6) and torch.equal(draw, wanted_draw)
        assert got[0][0] != got[1][0]
        check_gradients(plain, model)
        with torch.no_grad():
            assert torch.equal(model.eval()(inputs[0]), plain.eval()(inputs[0]))
        plain.train()


@pytest.mark.parametrize("world", [1, 2])
def test_dropout_bc27(world: int) -> None:
    run_ranks(world, dropout)


def hidden_states(uses: str) -> None:
    plain, _ = twins(lambda: torch.nn.ModuleList([Layer() for _ in range(3)]))
    model = bmt.TransformerBlockList([distribute(copy.deepcopy(layer)) for layer in plain])
    inputs = batches(2, 6)

    def loss_of(out: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        assert stack.shape == (3, 2, 6)
        middle = (stack * torch.arange(1.0, 4.0).view(3, 1, 1)).square().sum()
        return {"output": out.square().sum(), "middle": middle, "both": middle + out.sin().sum()}[uses]

    def run_plain(x: torch.Tensor) -> torch.Tensor:
        states = []
        for layer in plain:
            states.append(x)
            x = layer(x)
        return loss_of(x, torch.stack(states))

    xs = [x.requires_grad_() for x in inputs]
    wanted = summed_reference(lambda rank: run_plain(xs[rank]))
    x = xs[bmt.rank()].detach().requires_grad_()
    loss = loss_of(*model(x, return_hidden_states=True))
    loss.backward()
    assert loss.item() == pytest.approx(wanted[bmt.rank()], rel=1e-6)
    torch.testing.assert_close(x.grad, xs[bmt.rank()].grad)
    # the last block's backward never ran if only the middle states were used
    trained = slice(0, 2) if uses == "middle" else slice(0, 3)
    check_gradients(
        [p for m in plain[trained] for p in m.parameters()],
        [p for m in model[trained] for p in m.parameters()],
    )
    assert (next(model[2].parameters()).grad is None) == (uses == "middle")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("uses", ["output", "middle", "both"])
def test_hidden_states_bc29(world: int, uses: str) -> None:
    run_ranks(world, hidden_states, uses)


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


def scripted_functions() -> None:
    for dtype in (torch.int32, torch.int64):
        plain, inner = twins(Scripted)
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
