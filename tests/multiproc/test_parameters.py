"""Distributed parameters: shards, reading, gradients, hooks, copies, initialisation."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.twins import (
    Layer,
    distribute,
    twins,
)

import bmtrain as bmt
from bmtrain.parameter import full_value, gather_flat, load_full_value, shard_of

WORLDS = [1, 2, 4]
SHAPES = [(), (1,), (3,), (4,), (2, 3), (5, 7), (4, 1, 4), (0,), (0, 3)]


def shards(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    numel = torch.Size(shape).numel()
    full = torch.arange(numel).reshape(shape).to(dtype)
    p = bmt.DistributedParameter(full, requires_grad=dtype.is_floating_point)
    assert isinstance(p, torch.nn.Parameter) and p.dtype is dtype and p.dim() == 1
    chunk = -(-numel // bmt.world_size())
    begin = min(bmt.rank() * chunk, numel)
    assert (p._start_partition, p._end_partition) == (begin, min(begin + chunk, numel))
    assert repr(p).startswith(f"DistributedParameter(shape={tuple(shape)}, local=tensor(")
    assert p._original_shape == torch.Size(shape) and not p._in_block and p.group is None
    assert (p.full_shape, p.full_numel) == (full.shape, full.numel())
    for read in (p.gather, p.gather_all):
        assert torch.equal(read(), full)
    assert torch.equal(full_value(p), full)
    assert torch.equal(shard_of(p, full), p.detach())
    assert torch.equal(gather_flat(p, p.detach().double() * 2), full.reshape(-1).double() * 2)
    load_full_value(p, full + 1)
    assert torch.equal(p.gather(), full + 1)
    factory = p.new_zeros(3)
    assert type(factory) is torch.Tensor and factory.dtype is dtype
    assert type(p + 1) is torch.Tensor
    return {"local": (p - 1).tolist()}


@pytest.mark.parametrize("world", WORLDS)
def test_shards_put_together_are_the_data_bc8(world: int) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            parts = run_ranks(world, shards, shape, dtype)
            assert [x for part in parts for x in part["local"]] == list(range(torch.Size(shape).numel()))


def gradients_of_some_ranks() -> None:
    p = bmt.DistributedParameter(torch.zeros(5, 3))
    assert p.gather_grad() is None
    if bmt.rank() == 0:
        p.grad = torch.ones_like(p.detach())
    gradient = p.gather_grad()
    begin = -(-15 // bmt.world_size())
    assert gradient is not None and torch.equal(gradient.flatten(), (torch.arange(15) < begin).float())
    p.grad = None
    for full in (torch.randn(5, 3), torch.randn(5, 3, dtype=torch.float64)):
        p.load_grad(full)
        assert torch.equal(p.gather_grad(), full.float())


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_some_ranks(world: int) -> None:
    run_ranks(world, gradients_of_some_ranks)


def unusual_data() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for data in (base.T, base[:, 1:3], torch.nn.Parameter(base), base.requires_grad_() * 2, base.half()):
        p = bmt.DistributedParameter(data)
        assert torch.equal(p.gather(), data) and p.is_leaf and p.dtype is data.dtype
    p = bmt.DistributedParameter(base)
    p.note = "kept"
    p.requires_grad = False
    assert p.note == "kept" and not p.requires_grad and p.requires_grad_().requires_grad
    with pytest.raises(TypeError, match="data"):
        bmt.DistributedParameter([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tp_split_dim"):
        bmt.DistributedParameter(base, tp_mode=True, tp_split_dim=2)
    state = torch.get_rng_state()
    bmt.DistributedParameter(torch.zeros(5))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world", [1, 2])
def test_unusual_data(world: int) -> None:
    run_ranks(world, unusual_data)


class Weights(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        normal = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.5)
        self.a = bmt.DistributedParameter(torch.zeros(5, 3), init_method=normal)
        self.plain = torch.nn.Parameter(torch.ones(2))
        self.b = bmt.DistributedParameter(
            torch.zeros(7), init_method=bmt.ParameterInitializer(torch.nn.init.uniform_)
        )
        self.c = bmt.DistributedParameter(torch.full((2,), 9.0))
        self.register_parameter("none", None)


class Two(bmt.DistributedModule):
    def __init__(self, form: str) -> None:
        super().__init__()
        modules: list[Any] = [Weights(), Weights()]
        for module in modules:
            del module.plain
        if form == "block":
            modules = [bmt.Block(m) for m in modules]
        self.layers: Any = (
            bmt.TransformerBlockList(modules) if form == "list" else torch.nn.ModuleList(modules)
        )
        self.tied = modules[0]._module.a if form == "block" else modules[0]._parameters["a"]


def initialised(form: str) -> list[Any]:
    model = Two(form)
    torch.manual_seed(11)
    bmt.init_parameters(model)
    values = [full_value(p) for p in model.parameters()]
    torch.manual_seed(11)
    want = []
    for _ in range(2):
        a, b = torch.empty(5, 3), torch.empty(7)
        torch.nn.init.normal_(a, std=0.5)
        if form != "tied":
            torch.nn.init.uniform_(b)
        want += [a, b, torch.full((2,), 9.0)]
    order = sorted(range(6), key=lambda i: (values[i].shape.numel(), values[i].sum().item()))
    expected = sorted(range(6), key=lambda i: (want[i].shape.numel(), want[i].sum().item()))
    assert all(torch.equal(values[i], want[j]) for i, j in zip(order, expected, strict=True))
    return [v.tolist() for v in values] + [torch.rand(1).item()]


@pytest.mark.parametrize("form", ["bare", "block", "list"])
def test_initial_values_bc9(form: str) -> None:
    results = [result for world in WORLDS for result in run_ranks(world, initialised, form)]
    assert all(result == results[0] for result in results)


def initialised_argument_forms() -> None:
    block = bmt.Block(distribute(torch.nn.Linear(2, 2)))
    for p in block.parameters():
        p._init_method = torch.nn.init.ones_
    for form in (block, [block], iter([torch.nn.Sequential(block)])):
        torch.nn.init.zeros_(next(block.parameters()))
        bmt.init_parameters(form)  # type: ignore[arg-type]
        assert all(bool((p == 1).all()) for p in block.parameters())
    groups = dict(bmt.grouped_parameters(block))
    assert list(groups) == [None] and len(groups[None]) == 2
    block.init_parameters()
    assert [len(ps) for _, ps in block.grouped_parameters()] == [2]


def test_initialiser_accepts_models_lists_and_iterables() -> None:
    run_ranks(2, initialised_argument_forms)


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Parameter(torch.randn(6, 5).half())
        self.brain = torch.nn.Parameter(torch.randn(5, 7).bfloat16())
        self.single = torch.nn.Parameter(torch.randn(7))
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.table = torch.nn.Parameter(torch.arange(6), requires_grad=False)
        self.nothing = torch.nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x[:, self.table].half() @ self.small).bfloat16() @ self.brain
        out: torch.Tensor = (
            hidden.float() * self.single * self.scalar + self.empty.sum() + self.nothing.sum().float()
        )
        return out


def mixed_dtypes() -> None:
    plain, inner = twins(Mixed)
    model = bmt.Block(inner)
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), lr=1e-5) for m in (model, plain))
    x = torch.randn(3, 6)
    scale = 1 / bmt.world_size()
    for _ in range(3):
        for module, opt, factor in ((plain, plain_optimizer, 1.0), (model, optimizer, scale)):
            opt.zero_grad()
            (module(x).square().sum() * factor).backward()
            opt.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        value = full_value(q)
        assert value.dtype is p.dtype and value.shape == p.shape
        torch.testing.assert_close(value, p.detach())
    assert [p.grad is None for p in model.parameters()] == [p is model.table for p in model.parameters()]
    kinds = set(model._storage_info)
    assert kinds == {"float16_grad", "bfloat16_grad", "float32_grad", "int64_nograd", "float64_grad"}
    state = model.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in state.items()} == {
        k: (v.shape, v.dtype) for k, v in plain.state_dict().items()
    }
    other = bmt.Block(twins(Mixed, seed=3)[1])
    other.load_state_dict(state)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("world", WORLDS)
def test_mixed_dtypes_empty_scalar_and_integer_parameters_bc16(world: int) -> None:
    run_ranks(world, mixed_dtypes)


class Padded(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(5, 3))
        for row in range(5):
            self.weight.data[row].fill_(0)
            self.weight.data[row].zero_()


@pytest.mark.parametrize("world", WORLDS)
def test_writes_at_construction_bc17(world: int) -> None:
    run_ranks(world, construct)


def construct() -> None:
    Padded()


class Tied(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        inner: Any = distribute(Layer())
        self.block = bmt.Block(inner)
        self.head = distribute(torch.nn.Linear(6, 13))
        self.head.weight = inner.up._parameters["weight"]
        self.blocks = bmt.TransformerBlockList([distribute(Layer())] * 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.block(x))
        out: torch.Tensor = self.head(hidden).square().sum()
        return out


def copies(how: str) -> None:
    torch.manual_seed(4)
    model = Tied()
    x = torch.randn(2, 6)
    model(x).backward()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
        shards = copy.deepcopy(list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(shards, model.parameters(), strict=True))
        assert shards[0]._original_shape == next(model.parameters())._original_shape
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert twin.head._parameters["weight"] is twin.block.up._parameters["weight"]
    assert twin.blocks[0]._runtime is twin.blocks[1]._runtime is not model.blocks[0]._runtime
    assert twin.blocks[1].pre_module() is twin.blocks[0] and type(twin.block) is bmt.Block
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p is not q and torch.equal(p, q) and q._block is not None) or p._block is None
        assert q.grad is None  # as in torch
    old = [p.detach().clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    twin.zero_grad(set_to_none=True)
    losses = [m(x) for m in (model, twin)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    with torch.no_grad():
        for q in twin.parameters():
            q.add_(1)
    assert all(torch.equal(p, o) for p, o in zip(model.parameters(), old, strict=True))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_bc18(world: int, how: str) -> None:
    run_ranks(world, copies, how)


def bounds_after(how: str) -> None:
    torch.manual_seed(4)
    block: Any = bmt.Block(distribute(torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Linear(13, 6))))
    optimizer = bmt.optim.AdamOptimizer(block.parameters())
    values = [full_value(p) for p in block.parameters()]
    bounds = [p._spec.local_part for p in block.parameters()]
    block[0].requires_grad_(False)
    block(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    again = {
        "deepcopy": lambda: copy.deepcopy(block),
        "pickle": lambda: pickle.loads(pickle.dumps(block)),
        "dtypes": lambda: block.double().float(),
    }[how]()
    assert [p._spec.local_part for p in again.parameters()] == bounds
    assert [p.requires_grad for p in again.parameters()] == [False, False, True, True]
    optimizer.step()
    with torch.no_grad():  # a moving average
        for p, q in zip(again.parameters(), block.parameters(), strict=True):
            p.lerp_(q, 0.5)
    assert torch.equal(full_value(next(again.parameters())), values[0])
    assert all(
        torch.equal(full_value(p), full_value(q))
        for p, q in zip(again[0].parameters(), block[0].parameters(), strict=True)
    )
    fresh = bmt.Block(block)  # one built anew has the kinds of today
    assert set(fresh._storage_params) == {"float32_grad", "float32_nograd"}


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "dtypes"])
def test_a_block_copied_or_built_again_after_freezing_has_the_same_shards(how: str) -> None:
    run_ranks(2, bounds_after, how)


def pickled_sizes() -> None:
    p = bmt.DistributedParameter(torch.zeros(4096), init_method=bmt.ParameterInitializer(torch.nn.init.ones_))
    inner: Any = distribute(torch.nn.Linear(64, 64))
    block = bmt.Block(inner)
    for param in (p, *block.parameters()):
        data = pickle.dumps(param)
        assert len(data) < param.numel() * 4 + 2500
        again = pickle.loads(data)
        assert torch.equal(again, param) and again._original_shape == param._original_shape
        assert torch.equal(again.gather(), full_value(param))
    inner_copy = copy.deepcopy(block._module)
    assert torch.equal(inner_copy.weight, full_value(block.weight))
    assert inner_copy.weight.shape == (64, 64)


@pytest.mark.parametrize("world", [1, 2])
def test_pickled_shard_holds_its_own_bytes_bc18(world: int) -> None:
    run_ranks(world, pickled_sizes)


def conversions() -> None:
    for how in ("half", "bfloat16", "double"):
        torch.manual_seed(0)
        model = Tied()
        values = [full_value(p) for p in model.parameters()]
        model(torch.randn(2, 6)).backward()
        getattr(model, how)()
        dtype = getattr(torch, {"half": "float16"}.get(how, how))
        for p, v in zip(model.parameters(), values, strict=True):
            assert p.dtype is dtype and torch.equal(full_value(p), v.to(dtype))
        model.zero_grad()
        model(torch.randn(2, 6, dtype=dtype)).backward()
        assert all(p.grad.dtype is dtype for p in model.parameters())
    model = Tied()
    storages = [p.data_ptr() for p in model.parameters()]
    assert model.to(bmt.config["device"]) is model and model.to("cpu") is model and model.float() is model
    assert [p.data_ptr() for p in model.parameters()] == storages
    model.head.half()  # shares a weight with the Block, which is left behind
    with pytest.raises(RuntimeError, match="convert the whole"):
        model(torch.randn(2, 6))


@pytest.mark.parametrize("world", [1, 2])
def test_conversions_are_whole_or_refused(world: int) -> None:
    run_ranks(world, conversions)


def assignment() -> None:
    first: Any = distribute(torch.nn.Linear(3, 4))
    second: Any = distribute(torch.nn.Linear(3, 4))
    second.weight = first.weight  # what reading gave stands for the parameter
    assert second._parameters["weight"] is first._parameters["weight"]
    second.bias = bmt.DistributedParameter(torch.ones(4))
    assert torch.equal(second.bias, torch.ones(4)) and second.bias.requires_grad
    second.bias = None
    assert second.bias is None
    holder = torch.nn.Module()  # a plain module does not gather
    holder.p = bmt.DistributedParameter(torch.zeros(8))
    assert holder.p.numel() == 8 // bmt.world_size()
    # a loss on a shard and on the full parameter together
    block = bmt.Block(distribute(torch.nn.Linear(3, 4)))
    x = torch.ones(2, 3)
    loss = block(x).sum() + sum((p**2).sum() for p in block.parameters())
    loss.backward()
    for p in block.parameters():
        rows = 2.0 * bmt.world_size()
        torch.testing.assert_close(p.grad, torch.full_like(p, rows) + 2 * p.detach())


@pytest.mark.parametrize("world", [1, 2])
def test_assignment_and_direct_use(world: int) -> None:
    run_ranks(world, assignment)
