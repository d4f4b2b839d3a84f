"""Blocks: what a call gives, what it costs in forwards, and that gradients are those of plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.twins import Layer, batches, check_gradients, distribute, summed_reference, twins

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
