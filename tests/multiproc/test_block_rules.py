"""Blocks when something is unusual: errors, changes between the passes, caches, several backward passes, hooks."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.twins import Layer, batches, check_gradients, distribute, summed_reference, twins

import bmtrain as bmt

POLICIES = [{"use_checkpoint": r, "zero_level": level} for r in (True, False) for level in (2, 3)]


def are_shards(block: Any) -> bool:
    """Whether every parameter is a shard: 1-D, and nothing is gathered."""
    return not block._runtime.is_bound and all(p.dim() == 1 for p in block.parameters())


class Failing(Layer):
    error: type[BaseException] | None = None
    fail_at = 0

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self.error is not None and self.calls + 1 == self.fail_at:
            raise self.error
        return super().forward(x, *rest)


def errors(**policy: Any) -> None:
    plain, model = twins(lambda: torch.nn.ModuleList([Failing() for _ in range(3)]))
    blocks = bmt.TransformerBlockList([bmt.Block(layer, **policy) for layer in model])
    inputs = batches(2, 6)

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in module:
            x = layer(x)
        return x.square().sum()

    wanted = summed_reference(lambda rank: run(plain, inputs[rank]))
    x = inputs[bmt.rank()]
    run(blocks, x).backward()  # learns the order
    for error in (KeyError, KeyboardInterrupt):
        for grad in (True, False):
            blocks[1]._module.error, blocks[1]._module.fail_at = error, blocks[1]._module.calls + 1
            with pytest.raises(error), torch.set_grad_enabled(grad):
                run(blocks, x)
            assert all(are_shards(block) for block in blocks)
    if policy["use_checkpoint"]:
        blocks[1]._module.fail_at = blocks[1]._module.calls + 2
        loss = run(blocks, x)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        assert all(are_shards(block) for block in blocks)
    blocks[1]._module.error = None
    for _ in range(2):
        blocks.zero_grad(set_to_none=True)
        loss = run(blocks, x)
        loss.backward()
        assert loss.item() == pytest.approx(wanted[bmt.rank()], rel=1e-6)
        check_gradients(plain, blocks)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_errors_leave_shards_and_a_usable_block(world: int, policy: dict[str, Any]) -> None:
    run_ranks(world, errors, **policy)


def changed_between(**policy: Any) -> None:
    _, layer = twins(Layer)
    block = bmt.Block(layer, **policy)

    def attempt(change: Any) -> None:
        x = torch.randn(2, 6)
        y = torch.randn(2, 6, requires_grad=True)
        loss = block(x, y * 1).sum()
        with torch.no_grad():
            change(x, y)
        loss.backward()

    attempt(lambda x, y: None)
    with pytest.raises(RuntimeError, match="parameter was modified"):
        attempt(lambda x, y: next(block.parameters()).add_(1))
    if policy["use_checkpoint"]:
        with pytest.raises(RuntimeError, match=r"argument 0 \(shape \(2, 6\)\) was modified"):
            attempt(lambda x, y: x.add_(1))
    assert are_shards(block)
    attempt(lambda x, y: None)
    # what the forward itself changes
    inplace = bmt.Block(Inplace(), **policy)
    x = torch.ones(3)
    w = torch.ones(3, requires_grad=True)
    loss = inplace(x, w).sum()
    assert x.tolist() == [2.0] * 3
    if policy["use_checkpoint"]:
        with pytest.raises(RuntimeError, match="argument 0"):
            loss.backward()
    else:
        loss.backward()
        assert w.grad.tolist() == [2.0] * 3  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="inplace operation"):
        bmt.Block(SavedThenChanged(), **policy)(torch.ones(3), w).sum().backward()


class Inplace(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * w


class SavedThenChanged(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        out = y * w
        y += 1
        return (out * w) * w


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_changes_between_the_passes_raise(world: int, policy: dict[str, Any]) -> None:
    run_ranks(world, changed_between, **policy)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.bn = torch.nn.BatchNorm1d(6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            if int(self.steps) % 2 == 0:  # not in the first forward
                self.scale = self.scale * 1.5
        out: torch.Tensor = self.bn(self.linear(x)) * self.scale
        return out


def buffers(use_checkpoint: bool) -> None:
    plain, model = twins(Normed)
    block = bmt.Block(model, use_checkpoint=use_checkpoint)
    x = torch.randn(8, 6)
    for _ in range(4):
        plain.zero_grad()
        block.zero_grad()
        for module in (plain, block):
            (module(x) * torch.arange(6)).square().sum().backward()
        for (name, want), got in zip(plain.named_buffers(), block.buffers(), strict=True):
            torch.testing.assert_close(got, want, msg=name)
    if bmt.world_size() == 1:
        check_gradients(plain, block, tolerance=1e-5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_buffers_are_updated_once(world: int, use_checkpoint: bool) -> None:
    run_ranks(world, buffers, use_checkpoint)


class CountsUnseen(torch.nn.Module):
    """Writes to buffers without a version, first in a later forward; two modules share one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.other = torch.nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(6))
        self.other.register_buffer("seen", self.seen)
        self.times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        if self.times > 1:  # in both runs of all later forwards
            self.seen.data.mul_(1.5)
        out: torch.Tensor = self.other(self.linear(x) * self.other.seen)
        return out


def written_unseen(recompute: str) -> None:
    plain, model = twins(CountsUnseen)
    block = bmt.Block(model, policy=bmt.BlockPolicy(recompute=recompute))
    x = torch.randn(8, 6)
    for _ in range(3):
        plain.zero_grad()
        block.zero_grad()
        for module in (plain, block):
            module(x).square().sum().backward()
        assert block._module.seen is block._module.other.seen
        torch.testing.assert_close(block._module.seen, plain.seen)
    check_gradients(plain, block, tolerance=1e-5)


@pytest.mark.parametrize("recompute", ["whole", "selective", "off"])
def test_buffers_may_be_written_without_a_version(recompute: str) -> None:
    run_ranks(1, written_unseen, recompute)


def flags_switched() -> None:
    plain, _ = twins(lambda: Layer(dropout=0.5))
    for switch in ("eval", "inner"):
        model = bmt.Block(distribute(copy.deepcopy(plain)))
        x = torch.randn(4, 6)
        plain.zero_grad()
        for module in (plain, model):
            torch.manual_seed(3)
            loss = module(x).square().sum()
            module.eval() if switch == "eval" else module.dropout.eval()
            loss.backward()
            assert module.dropout.training is False
            module.train()
        if bmt.world_size() == 1:
            check_gradients(plain, model)


def requires_grad_toggled() -> None:
    for recompute in (True, False):
        plain, inner = twins(Layer)
        model = bmt.Block(inner, use_checkpoint=recompute)
        inputs = batches(2, 6)
        summed_reference(lambda rank, f=plain, xs=inputs: f(xs[rank]).square().sum())  # type: ignore[misc]
        loss = model(inputs[bmt.rank()]).square().sum()
        model.up.requires_grad_(False)
        loss.backward()
        assert model.up.weight.grad is None
        model.up.requires_grad_(True)
        plain.up.zero_grad()
        got = [p for n, p in model.named_parameters() if not n.startswith("up")]
        check_gradients([p for n, p in plain.named_parameters() if not n.startswith("up")], got)
        # and the other way: frozen in forward, trained now: the forward's flags count
        model.zero_grad(set_to_none=True)
        model.up.requires_grad_(False)
        loss = model(inputs[bmt.rank()]).square().sum()
        model.up.requires_grad_(True)
        loss.backward()
        assert model.up.weight.grad is None and model.down.weight.grad is not None


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("body", [flags_switched, requires_grad_toggled])
def test_flags_switched_between_the_passes(world: int, body: Any) -> None:
    run_ranks(world, body)


class Holding(Layer):
    held: Any = None

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(x, *rest) * self.held


def foreign_history() -> None:
    w = torch.ones(6, requires_grad=True)
    for recompute in (True, False):
        block = bmt.Block(distribute(Holding()), use_checkpoint=recompute)
        block.held = w * 2
        with pytest.raises(RuntimeError, match="as an argument"):
            block(torch.ones(2, 6))
        assert are_shards(block)
        block._module.held = w  # a leaf: its gradient has a place to go
        block.held = w
        w.grad = None
        block(torch.ones(2, 6)).sum().backward()
        assert w.grad is not None


class Leaving(Layer):
    """Leaves a loss of its own in an attribute, made of its results or of its input alone."""

    of_input = False

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        y = super().forward(x, *rest)
        self.left = (x if self.of_input else y).pow(2).mean()
        return y


def left_behind() -> None:
    for recompute in (True, False):
        for of_input in (True, False):
            block = bmt.Block(distribute(Leaving()), use_checkpoint=recompute)
            block._module.of_input = of_input
            x = torch.randn(2, 6, requires_grad=True)
            y = block(x).sum()
            y.backward(retain_graph=True)
            before = [p.grad.clone() for p in block.parameters()]
            # Else a kernel's own words.
            clear = "return it as a further result" if recompute or of_input else None
            with pytest.raises(RuntimeError, match=clear):
                block.left.backward()
            assert are_shards(block) and all(map(torch.equal, before, (p.grad for p in block.parameters())))
            block.zero_grad()
            block(x).sum().backward()
            assert all(map(torch.equal, before, (p.grad for p in block.parameters())))


def refused() -> None:
    for recompute in (True, False):
        block = bmt.Block(distribute(Layer()), use_checkpoint=recompute)
        x = torch.randn(2, 6, requires_grad=True)
        with pytest.raises(RuntimeError, match="twice"):
            torch.autograd.grad(block(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            block(x).sum().backward(create_graph=True)
        loss = block(x).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert are_shards(block)
        block(x).sum().backward()


def by_grad(loss: torch.Tensor, x: torch.Tensor, keep: bool) -> torch.Tensor:
    return torch.autograd.grad(loss, x, retain_graph=keep)[0]


def by_inputs(loss: torch.Tensor, x: torch.Tensor, keep: bool) -> torch.Tensor:
    x.grad = None
    loss.backward(inputs=[x], retain_graph=keep)
    assert x.grad is not None
    return x.grad


def gradients_of_inputs(policy: dict[str, Any]) -> None:
    """Attacks, guidance and saliency: gradients of inputs alone, between and inside steps of training."""
    plain, model = twins(lambda: torch.nn.ModuleList([Layer(dropout=0.3) for _ in range(3)]))
    blocks = bmt.TransformerBlockList([bmt.Block(each, policy=bmt.BlockPolicy(**policy)) for each in model])
    inputs = batches(2, 6)

    def loss_of(layers: Any, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(4)
        for layer in layers:
            x = layer(x)
        return x.square().sum()

    for way in (by_grad, by_inputs):
        for frozen in (False, True):
            for layers in (plain, blocks):
                layers.zero_grad(set_to_none=True)
                layers.requires_grad_(not frozen)
            x, y = (inputs[bmt.rank()].clone().requires_grad_() for _ in range(2))
            losses = loss_of(plain, x), loss_of(blocks, y)
            for _ in range(2):
                assert torch.equal(way(losses[0], x, True), way(losses[1], y, True))
            assert all(p.grad is None for p in blocks.parameters()) and are_shards(blocks[1])
            if not frozen:
                summed_reference(lambda rank: loss_of(plain, inputs[rank]))  # its gradients are in plain
                with bmt.no_sync():
                    way(loss_of(blocks, y), y, False)
                losses[1].backward()
                check_gradients(plain, blocks)
                with bmt.no_sync():
                    loss_of(blocks, y).backward()  # waits, while the gradients of inputs pass by
                    way(loss_of(blocks, y), y, False)
                loss_of(blocks, y).backward()
                for p in plain.parameters():
                    p.grad *= 3
                check_gradients(plain, blocks)
    with pytest.raises(RuntimeError, match=r"got parameter .* of a Block.*requires_grad_"):
        torch.autograd.grad(loss_of(blocks, y), [y, *blocks.parameters()], allow_unused=True)
    assert all(map(are_shards, blocks))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "policy",
    [
        {"recompute": "whole"},
        {"recompute": "off"},
        {"recompute": "selective"},
        {"recompute": "off", "level": 2},
    ],
)
def test_gradients_of_inputs_alone_are_those_of_torch(world: int, policy: dict[str, Any]) -> None:
    run_ranks(world, gradients_of_inputs, policy)


def inputs_after_a_whole_backward() -> None:
    """A graph that a backward has changed for its products must not add them to gradients again."""
    block = bmt.Block(distribute(Layer()), use_checkpoint=False)
    x = torch.randn(2, 6, requires_grad=True)
    loss = block(x).sum()
    with bmt.no_sync():
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"cannot follow backward\(retain_graph=True\)"):
            torch.autograd.grad(loss, x)
    block(x).sum().backward()
    assert are_shards(block)


class Gathering(Layer):
    """Reads a parameter of another module by itself."""

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(x, *rest) * self.held[0].gather()


def inputs_read_elsewhere() -> None:
    """Leaves that a Block's forward reads from an attribute, of which torch would lose the part in the Block."""
    w = torch.ones(6, requires_grad=True)
    p = bmt.DistributedParameter(torch.ones(6))
    x = torch.randn(2, 6, requires_grad=True)
    for recompute in (True, False):
        holding, gathering = (
            bmt.Block(distribute(kind()), use_checkpoint=recompute) for kind in (Holding, Gathering)
        )
        holding._module.held, gathering._module.held = w, [p]
        around = bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Sequential(holding)), use_checkpoint=False)
        for block, leaf in ((holding, w), (gathering, p), (around, w)):
            for loss in (block(x).sum(), (block(x * 1).sum() * (w if leaf is w else p.gather())).sum()):
                for inputs in ([x, leaf], [leaf], [torch.autograd.graph.get_gradient_edge(leaf)]):
                    with pytest.raises(
                        RuntimeError, match=r"of a Block \(.*other than as an argument; pass it"
                    ):
                        torch.autograd.grad(loss, inputs, allow_unused=True)
                with pytest.raises(RuntimeError, match="other than as an argument"):
                    loss.backward(inputs=[leaf])
                assert leaf.grad is None and torch.autograd.grad(loss, x)[0] is not None
            assert are_shards(holding)
        # Elsewhere it is like any other.
        (got,) = torch.autograd.grad((Layer()(torch.ones(2, 6)) * p.gather()).sum() + p.gather().sum(), p)
        assert got.shape == p.shape
        loss = bmt.Block(distribute(Layer()), use_checkpoint=recompute)(x * w).sum() * w.sum()
        assert torch.autograd.grad(loss, w)[0].shape == w.shape


class Several(Layer):
    """Returns its result or a view of it together with another, which is computed of it or apart."""

    held, is_view = False, False

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        whole = super().forward(torch.cat([x, x]), *rest)
        y = whole[:2] if self.is_view else whole[:2].clone()
        return y, (y if self.held else x).square(), whole


def inputs_used_for_other_results() -> None:
    x = torch.randn(2, 6, requires_grad=True)
    for recompute, one_of_other, is_view in itertools.product((True, False), repeat=3):
        block = bmt.Block(distribute(Several()), use_checkpoint=recompute)
        block._module.held, block._module.is_view = one_of_other, is_view
        y, z, _ = block(x)
        for alone, given in ((y.exp().sum(), y), (z.exp().sum(), z)):  # all of its gradient is seen outside
            assert torch.equal(torch.autograd.grad(alone, given, retain_graph=True)[0], given.exp())
        for loss in ((y.exp() * z).sum(), (block(y * 1)[0] + z).sum(), z.sum()):
            if one_of_other:
                with pytest.raises(
                    RuntimeError, match=r"got a tensor of shape \(2, 6\) as a result of a Block"
                ):
                    torch.autograd.grad(loss, y, retain_graph=True, allow_unused=True)
            else:
                torch.autograd.grad(loss, y, retain_graph=True, allow_unused=True)
            assert torch.autograd.grad(loss, z, retain_graph=True)[0] is not None


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "body",
    [
        foreign_history,
        left_behind,
        refused,
        inputs_after_a_whole_backward,
        inputs_read_elsewhere,
        inputs_used_for_other_results,
    ],
)
def test_what_cannot_be_right_raises(world: int, body: Any) -> None:
    run_ranks(world, body)


def dropped() -> None:
    for step in (False, True):
        block = bmt.Block(distribute(Layer()))
        block.up.weight.register_hook(lambda grad: grad)
        out = block(torch.ones(2, 6)).sum()
        if step:
            out.backward()
        parts = [block, block._runtime, block._storages[0].shards, *block.parameters()]
        alive = [weakref.ref(part) for part in parts]
        del block, out, parts
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive)


@pytest.mark.parametrize("world", [1, 2])
def test_a_dropped_block_leaves_nothing_behind(world: int) -> None:
    run_ranks(world, dropped)


def backward_after_the_block() -> None:
    for recompute in (True, False):
        plain, layer = twins(Layer)
        x = torch.ones(2, 6)
        for _ in range(bmt.world_size()):
            plain(x).sum().backward()
        loss = bmt.Block(layer, use_checkpoint=recompute)(x).sum()
        gc.collect()
        loss.backward()
        check_gradients(plain, layer)


@pytest.mark.parametrize("world", [1, 2])
def test_backward_may_come_after_the_block_is_gone(world: int) -> None:
    run_ranks(world, backward_after_the_block)


def momentum() -> None:
    plain, model = twins(lambda: torch.nn.ModuleList([Layer() for _ in range(4)]))
    blocks = [bmt.Block(layer) for layer in model]
    x = torch.randn(2, 6)

    def step(layers: Any) -> torch.Tensor:
        # The target follows between the two forwards, as in momentum contrast.
        query = layers[1](layers[0](x))
        with torch.no_grad():
            for source, target in zip(layers[:2], layers[2:], strict=True):
                for p, q in zip(source.parameters(), target.parameters(), strict=True):
                    q.data.mul_(0.5).add_(p.data)
            key = layers[3](layers[2](x))
        loss: torch.Tensor = (query * key).sum()
        loss.backward()
        return key

    for _ in range(4):
        torch.testing.assert_close(step(blocks), step(list(plain)))


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_changed_between_passes_are_not_gathered_early(world: int) -> None:
    run_ranks(world, momentum)
