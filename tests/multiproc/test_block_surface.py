"""Standing in for the inner module: attributes, modules put into and taken out of Blocks, passes in unusual order."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.twins import Layer, batches, check_gradients, check_values, distribute, summed_reference, twins

import bmtrain as bmt
from bmtrain.parameter import full_value


class LowRank(torch.nn.Module):
    """A frozen linear layer and a trainable low-rank change to it."""

    def __init__(self, base: Any, dims: tuple[int, int], rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(rank, dims[0]))
        self.up = torch.nn.Parameter(torch.randn(dims[1], rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


def adapt(layer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    layer.requires_grad_(False)
    for name, dims in (("up", (6, 13)), ("down", (13, 6))):
        wrapped: Any = LowRank(torch.nn.Identity(), dims)
        if isinstance(layer, bmt.DistributedModule):
            wrapped = distribute(wrapped)
        wrapped.base = getattr(layer, name)
        setattr(layer, name, wrapped)


def adapters(use_checkpoint: bool) -> None:
    plain, _ = twins(lambda: torch.nn.ModuleList([Layer() for _ in range(2)]))
    blocks = bmt.TransformerBlockList(
        [bmt.Block(distribute(copy.deepcopy(m)), use_checkpoint=use_checkpoint) for m in plain]
    )
    for i in range(2):
        adapt(plain[i], i)
        adapt(blocks[i], i)
    assert blocks[0].up is blocks[0]._module.up
    backbone = [p.detach().clone() for p in blocks.parameters() if not p.requires_grad]
    trained = [p for p in blocks.parameters() if p.requires_grad]
    plain_trained = [p for p in plain.parameters() if p.requires_grad]
    assert len(trained) == len(plain_trained) == 8
    optimizers = [torch.optim.Adam(params, lr=0.01) for params in (plain_trained, trained)]
    inputs = batches(3, 6)

    def loss_of(module: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in module:
            x = layer(x)
        return x.square().mean()

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted = summed_reference(lambda rank: loss_of(plain, inputs[rank]))
        loss = loss_of(blocks, inputs[bmt.rank()])
        assert loss.item() == pytest.approx(wanted[bmt.rank()], rel=1e-5)
        loss.backward()
        check_gradients(plain_trained, trained, tolerance=1e-4)
        for optimizer in optimizers:
            optimizer.step()

    step()
    step()
    frozen = [p for p in blocks.parameters() if not p.requires_grad]
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(frozen, backbone, strict=True))
    saved = {
        k: v
        for k, v in blocks.state_dict().items()
        if ".base." not in k and k.split(".")[1] in ("up", "down")
    }
    assert len(saved) == 8 and saved["0.up.down"].shape == (2, 6)
    assert {k: v.shape for k, v in blocks.state_dict().items()} == {
        k: v.shape for k, v in plain.state_dict().items()
    }
    with torch.no_grad():
        for p in trained:
            p.zero_()
    missing, unexpected = blocks.load_state_dict(saved, strict=False)
    assert not unexpected and len(missing) == len(plain.state_dict()) - 8
    step()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_adapters_in_built_blocks_bc34(world: int, use_checkpoint: bool) -> None:
    run_ranks(world, adapters, use_checkpoint)


class Lazy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.extra: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.extra is None:
            torch.manual_seed(7)
            made: Any = torch.nn.Linear(6, 6)
            self.extra = distribute(made) if isinstance(self, bmt.DistributedModule) else made
        out: torch.Tensor = self.extra(self.linear(x).sin())
        return out


def built_on_first_call() -> None:
    plain, inner = twins(Lazy)
    block = bmt.Block(inner)
    inputs = batches(3, 6)
    for _ in range(2):
        summed_reference(lambda rank: plain(inputs[rank]).square().sum())
        block(inputs[bmt.rank()]).square().sum().backward()
    check_gradients(plain, block, tolerance=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_modules_built_in_a_running_forward(world: int) -> None:
    run_ranks(world, built_on_first_call)


class Flagged(torch.nn.Module):
    use_cache = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.flag = "inner"
        self._private = 1
        self.register_buffer("_scale", torch.ones(2), persistent=False)

    @property
    def size(self) -> int:
        return 2

    def method(self) -> str:
        return self.flag


def attributes() -> None:
    inner: Any = distribute(Flagged())
    block = bmt.Block(inner)
    block.use_cache = True
    assert inner.use_cache is True and block.use_cache is True
    block.flag = "outer"
    assert (inner.flag, block.flag, block.method()) == ("outer", "outer", "outer")
    block.own = 5
    assert block.own == inner.own == 5  # the forward may ask for it
    inner.own, inner.flag, inner._private = 6, "changed by the forward", 7
    assert (block.own, block.flag, block._private) == (6, inner.flag, 7)
    del block.own
    assert not hasattr(inner, "own")
    block._private, block._of_a_library = 2, 3
    assert (block._private, inner._private) == (2, 2)
    assert block._of_a_library == 3 and not hasattr(inner, "_of_a_library")
    block._scale = torch.full((2,), 0.5)
    assert torch.equal(inner._buffers["_scale"], block._scale)
    block.flag = "outer"
    assert block.size == 2 and block.linear is inner.linear
    block.linear = replaced = distribute(torch.nn.Linear(2, 2))
    assert inner.linear is replaced and block.linear is replaced
    with pytest.raises(AttributeError):
        _ = block.missing
    assert [n for n, _ in block.named_modules()] == ["", "linear"] and next(iter(block.modules())) is block
    assert [n for n, _ in block.named_parameters()] == ["linear.weight", "linear.bias"]
    assert [n for n, _ in block.named_children()] == ["linear"]
    parent = torch.nn.Sequential(block)
    assert list(parent.state_dict()) == ["0.linear.weight", "0.linear.bias"]
    calls = []
    block.register_forward_hook(lambda *args: calls.append("block"))
    inner.register_forward_hook(lambda *args: calls.append("inner"))
    inner.forward = lambda x: inner.linear(x)
    block(torch.ones(1, 2)).sum().backward()
    assert calls == ["inner", "block", "inner"]  # hooks of inner modules see the second run as well
    block.forward(torch.ones(1, 2)).sum().backward()
    info = block._param_info
    assert {"name", "kw_name", "offset", "size", "shape", "parameter"} <= set(info[0])
    for bad in ({"zero_level": 4}, {"mode": "OTHER"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            bmt.Block(distribute(torch.nn.Linear(2, 2)), **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'weight'.*DistributedParameter"):
        bmt.Block(torch.nn.Linear(2, 2))
    shared: Any = distribute(torch.nn.Linear(2, 2))
    first = bmt.Block(torch.nn.Sequential(shared))
    with pytest.raises(ValueError, match="belongs to another Block"):
        bmt.Block(torch.nn.ModuleList([shared]))
    outer = bmt.Block(torch.nn.Sequential(first))  # dissolves it
    assert type(outer._module[0]) is torch.nn.Sequential
    outer(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("world", [1, 2])
def test_attributes_of_the_inner_module_bc35(world: int) -> None:
    run_ranks(world, attributes)


def taken_out() -> None:
    plain, _ = twins(lambda: torch.nn.ModuleList([Layer() for _ in range(2)]))
    blocks = [bmt.Block(distribute(copy.deepcopy(m))) for m in plain]
    x = torch.randn(2, 6)
    with torch.no_grad():
        want = blocks[1](blocks[0](x))
    for block in blocks:
        for p in block.parameters():
            p.data = full_value(p)
    modules = [block._module for block in blocks]
    for keep in (True, False):  # with the Blocks alive, and without
        with torch.no_grad():
            assert torch.equal(modules[1](modules[0](x)), want)
        assert modules[0].up.weight.shape == (13, 6)
        if keep:
            del blocks, block
    again = bmt.TransformerBlockList(modules)  # and back into Blocks
    assert all(p.dim() == 1 for p in again.parameters())
    check_values(plain, again)
    again(x).sum().backward()
    with torch.no_grad():
        assert torch.equal(again(x), want)
        for p in again.parameters():  # a full value, a new shard: the Block takes either over
            p.data = full_value(p) * 2
        doubled = again(x)
        for p in again.parameters():
            p.data = p.detach() / 2
        torch.testing.assert_close(again(x), want)
        assert not torch.equal(doubled, want)


@pytest.mark.parametrize("world", [1, 2])
def test_modules_taken_out_bc36(world: int) -> None:
    run_ranks(world, taken_out)


def unusual_orders(use_checkpoint: bool) -> None:
    plain, _ = twins(lambda: torch.nn.ModuleList([Layer() for _ in range(3)]))
    blocks = bmt.TransformerBlockList(
        [bmt.Block(distribute(copy.deepcopy(m)), use_checkpoint=use_checkpoint) for m in plain]
    )
    inputs = batches(2, 6)

    def shared(m: Any, x: torch.Tensor) -> torch.Tensor:  # one layer several times, others left out
        return m[1](m[1](m[0](x))).square().sum() + m[0](x * 2).sin().sum()

    def interleaved(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = m[2](m[0](x))
        out = m[0](x)
        with torch.no_grad():
            m[1](out)
        return (m[2](out) - target * 0.5).square().sum()

    def nested(m: Any, x: torch.Tensor) -> torch.Tensor:
        inner = torch.utils.checkpoint.checkpoint(lambda h: m[1](m[0](h)), x, use_reentrant=False)
        return m[2](inner).square().sum()

    def reentrant(m: Any, x: torch.Tensor) -> torch.Tensor:
        inner = torch.utils.checkpoint.checkpoint(lambda h: m[1](h), m[0](x), use_reentrant=True)
        return m[2](inner).square().sum()

    def inplace(m: Any, x: torch.Tensor) -> torch.Tensor:
        out = m[0](x)
        out += 1
        out.mul_(2)
        return m[1](out).square().sum()

    def afterwards(m: Any, x: torch.Tensor) -> torch.Tensor:  # two losses of one graph
        hidden = m[0](x)
        m[1](hidden).sum().backward(retain_graph=True)
        m[1](hidden).sum().backward(retain_graph=True)
        return m[2](hidden).square().sum()

    def backward_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = m[1](m[0](x)).square().sum()
        loss.backward(retain_graph=True)
        return loss

    for run in (shared, interleaved, nested, reentrant, inplace, afterwards, backward_twice):
        for _ in range(2):
            plain.zero_grad()
            blocks.zero_grad(set_to_none=True)
            wanted = summed_reference(lambda rank, run=run: run(plain, inputs[rank]))  # type: ignore[misc]
            loss = run(blocks, inputs[bmt.rank()])
            loss.backward()
            assert loss.item() == pytest.approx(wanted[bmt.rank()], rel=1e-6), run.__name__
            for want, got in zip(plain, blocks, strict=True):
                if next(want.parameters()).grad is not None:
                    check_gradients(want, got, tolerance=1e-5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_passes_in_unusual_order(world: int, use_checkpoint: bool) -> None:
    run_ranks(world, unusual_orders, use_checkpoint)


class Checkpointing(Layer):
    reentrant = False

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(
            super().forward, super().forward(x), use_reentrant=self.reentrant
        )
        return out


def inner_checkpoints() -> None:
    for reentrant in (False, True):
        plain, inner = twins(lambda: Checkpointing(dropout=0.3))
        inner.reentrant = plain.reentrant = reentrant  # type: ignore[assignment]
        for recompute in (True, False):
            block = bmt.Block(copy.deepcopy(inner), use_checkpoint=recompute)
            x = torch.randn(2, 6, requires_grad=True)
            plain.zero_grad()
            for module in (plain, block):
                torch.manual_seed(9)
                module(x).square().sum().backward()
            if bmt.world_size() == 1:
                check_gradients(plain, block, tolerance=1e-5)


def autocast() -> None:
    for recompute in (True, False):
        plain, inner = twins(Layer)
        block = bmt.Block(inner, use_checkpoint=recompute)
        x = torch.randn(2, 6)
        for _ in range(2):
            outs = []
            for module in (plain, block):
                module.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    outs.append(module(x) + module(x))
                outs[-1].float().square().sum().backward()
            assert outs[0].dtype is outs[1].dtype and torch.equal(*outs)
        assert not torch.is_autocast_enabled("cpu")
        if bmt.world_size() == 1:
            check_gradients(plain, block, tolerance=2e-2)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("body", [inner_checkpoints, autocast])
def test_inside_other_machinery(world: int, body: Any) -> None:
    run_ranks(world, body)


def compiled() -> None:
    plain, inner = twins(Layer)
    block = bmt.Block(inner)
    block._module.forward = torch.compile(inner.forward, backend="aot_eager")  # type: ignore[method-assign]
    x = torch.randn(2, 6)
    for _ in range(2):
        plain.zero_grad()
        block.zero_grad()
        plain(x).square().sum().backward()
        block(x).square().sum().backward()
    check_gradients(plain, block, tolerance=1e-5)


@pytest.mark.slow
def test_compiled_inner_module() -> None:
    run_ranks(1, compiled, timeout=240)


def a_saved_model_is_plain() -> None:
    block = bmt.Block(distribute(Layer()))
    buffer = io.BytesIO()
    torch.save(block.state_dict(), buffer)
    buffer.seek(0)
    Layer().load_state_dict(torch.load(buffer, weights_only=True), strict=True)


def test_state_dict_is_that_of_the_inner_module() -> None:
    run_ranks(2, a_saved_model_is_plain)


def a_container() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    block = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)))
    assert len(block) == 3 and block and block[0] is block._module[0] and list(block[1:]) == list(block)[1:]
    block[1], plain[1] = torch.nn.ReLU(), torch.nn.ReLU()
    del block[2], plain[2]
    assert torch.equal(block(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    alone = bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4)))
    assert alone
    for use in (lambda: alone[0], lambda: len(alone), lambda: list(alone)):
        with pytest.raises(TypeError, match="Linear"):
            use()


def test_a_block_around_a_container_is_one() -> None:
    run_ranks(1, a_container)


def flat_gradients() -> dict[str, int]:
    """Of a Block of which one parameter is frozen, where memory that nobody has written to is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        block = bmt.Block(bmt.nn.Linear(5, 7))
        bmt.init_parameters(block)
        next(block.parameters()).requires_grad_(False)
        block(torch.ones(2, 5)).sum().backward()
        flat = {kind: param.grad for kind, param in block._storage_params.items()}
        return {kind: int(grad.count_nonzero()) for kind, grad in flat.items() if grad is not None}
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("world", "sizes"), [(1, [7]), (2, [0, 7])])
def test_flat_gradients_are_zero_where_nothing_trains(world: int, sizes: list[int]) -> None:
    assert [found["float32_grad"] for found in run_ranks(world, flat_gradients)] == sizes
