"""Models built on the meta device: no memory before their shards are made, and the same models after."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.layer import DistributedModule

WORLDS = [1, 2, 4]
PARAMETERS = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.1)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> bmt.DistributedParameter:
    return bmt.DistributedParameter(torch.empty(shape, dtype=dtype), init_method=PARAMETERS)


class Layer(DistributedModule):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = parameter(dim, dim + 1)
        self.back = parameter(dim + 1, dim, dtype=torch.bfloat16)
        self.bias = parameter(dim)
        self.bias.data[0] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ self.weight).tanh() @ self.back.float() + self.bias


class Model(DistributedModule):
    def __init__(self, dim: int = 5, blocks: bool = True) -> None:
        super().__init__()
        self.embedding = DistributedModule()
        self.embedding.weight = parameter(7, dim)
        self.head = DistributedModule()
        self.head.weight = self.embedding.weight
        self.scale = parameter()
        with torch.no_grad():
            torch.nn.init.ones_(self.scale)
        self.scale.data[...] = torch.tensor(2.0)
        layers = [Layer(dim) for _ in range(2)]
        self.layers = torch.nn.ModuleList([bmt.Block(layer) for layer in layers] if blocks else layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.embedding(x, self.embedding.weight) * self.scale
        for layer in self.layers:
            x = layer(x)
        return x @ self.head.weight.T


def built(device: str, **options: Any) -> Model:
    with torch.device(device):
        return Model(**options)


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert list(left) == list(right)
    for key, value in left.items():
        assert value.dtype is right[key].dtype and torch.equal(value, right[key]), key


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(bmt.rank())
    for _ in range(3):
        tokens = torch.randint(7, (2, 3), generator=generator)
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


def trains_alike(optimizer_class: Any, blocks: bool) -> None:
    states = []
    for device in ("cpu", "meta"):
        model = built(device, blocks=blocks)
        optimizer = optimizer_class(model.parameters(), lr=0.01)
        before = [id(p) for p in model.parameters()]
        torch.manual_seed(3)
        bmt.init_parameters(model)
        assert [id(p) for p in model.parameters()] == before
        assert not any(p.is_meta for p in model.parameters())
        states.append(model.state_dict())
        train(model, optimizer)
        states.append(model.state_dict())
    for one, other in zip(states[:2], states[2:], strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(states[0]["layers.0.weight"], states[1]["layers.0.weight"])


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_initialised_and_trained_as_if_built_on_the_device(world: int, blocks: bool) -> None:
    for optimizer_class in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer, torch.optim.AdamW):
        run_ranks(world, trains_alike, optimizer_class, blocks)


def loads(path: Path) -> None:
    torch.manual_seed(5)
    source = built("cpu")
    bmt.init_parameters(source)
    bmt.save(source, path)
    from_file, from_dict = built("meta"), built("meta", blocks=False)
    optimizer = bmt.optim.AdamOptimizer(from_file.parameters(), lr=0.01)
    bmt.load(from_file, path)
    from_dict.load_state_dict(source.state_dict())
    same_state(from_file, source)
    same_state(from_dict, source)
    train(source, bmt.optim.AdamOptimizer(source.parameters(), lr=0.01))
    train(from_file, optimizer)
    same_state(from_file, source)


@pytest.mark.parametrize("world", WORLDS)
def test_loaded_as_if_built_on_the_device(world: int, tmp_path: Path) -> None:
    run_ranks(world, loads, tmp_path / "model.pt")


def bytes_of_tensors() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def takes_no_memory() -> None:
    before = bytes_of_tensors()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        model = built("meta", dim=128)
        wrapped = bmt.BMTrainModelWrapper(native("meta"))
        state = model.state_dict()
    allocated = [event.cpu_memory_usage for event in profile.function_events]
    assert max(allocated, default=0) <= 64, "more than a scalar"  # what Model() writes to its scale
    assert bytes_of_tensors() == before
    for block in model.layers:
        assert all(s.shards.shard.untyped_storage().nbytes() == 0 for s in block._storages)
    assert all(value.is_meta for value in state.values())
    assert state["layers.0.weight"].shape == (128, 129) and state["layers.0.back"].dtype is torch.bfloat16
    assert {k: v.shape for k, v in wrapped.state_dict().items()} == {
        k: v.shape for k, v in native("cpu").state_dict().items()
    }


def native(device: str) -> torch.nn.Module:
    with torch.device(device):
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 6),
            torch.nn.BatchNorm1d(6),
            torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(6, 6)])[0]),
        )


@pytest.mark.parametrize("world", WORLDS)
def test_takes_no_memory_until_it_has_values(world: int) -> None:
    run_ranks(world, takes_no_memory)


def wrapped_models(path: Path) -> None:
    model = bmt.BMTrainModelWrapper(native("meta"))
    twin = native("cpu")
    bmt.init_parameters(model)  # there are no initialisers
    assert all(p.is_meta for p in model.parameters())
    if bmt.rank() == 0:
        torch.save(twin.state_dict(), path)
    assert bmt.load(model, path) == ([], [])
    same_state(model, twin)
    assert torch.equal(model(torch.ones(3, 4)), twin(torch.ones(3, 4)))


@pytest.mark.parametrize("world", WORLDS)
def test_wrapped_models_on_the_meta_device(world: int, tmp_path: Path) -> None:
    run_ranks(world, wrapped_models, tmp_path / "model.pt")


def partly(path: Path) -> None:
    model = built("meta")
    layer = model.layers[0]
    full = {"layers.0.weight": torch.ones(5, 6), "scale": torch.tensor(3.0)}
    missing, _ = model.load_state_dict(full, strict=False)
    assert "layers.0.bias" in missing and layer._module.bias.is_meta and not layer._module.weight.is_meta
    state = model.state_dict()
    assert torch.equal(state["layers.0.weight"], full["layers.0.weight"]) and state["layers.0.bias"].is_meta
    assert model.scale.item() == 3.0
    for use, name in (
        (lambda: layer(torch.ones(2, 5)), "'back'|'bias'"),
        (lambda: torch.ones(2, 5) @ model.head.weight.T, "weight"),
        (lambda: model.embedding._parameters["weight"].gather(), r"\(7, 5\)"),
        (lambda: layer._storage_params, "back|bias"),
        (lambda: bmt.save(model, path), "embedding.weight"),
    ):
        with pytest.raises(RuntimeError, match=f"(?s){name}.*on the meta device.*init_parameters.*load"):
            use()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"layers.0.bias": torch.ones(6)}, strict=False)
    with pytest.raises(RuntimeError, match="meta device"):
        model.load_state_dict({"layers.0.bias": torch.ones(5, device="meta")}, strict=False)
    assert layer._module.bias.is_meta
    layer.load_state_dict({"back": torch.ones(6, 5), "bias": torch.ones(5)}, strict=False)
    assert torch.equal(layer.state_dict()["weight"], torch.ones(5, 6))
    layer(torch.ones(2, 5)).sum().backward()
    assert layer._module.weight.grad is not None


@pytest.mark.parametrize("world", WORLDS)
def test_what_has_no_values_stays_and_tells_who_uses_it(world: int, tmp_path: Path) -> None:
    run_ranks(world, partly, tmp_path / "model.pt")


def before_init() -> None:
    with torch.device("meta"):
        layer = Layer(4)
        tp = bmt.DistributedParameter(torch.empty(2, 3), init_method=PARAMETERS, tp_mode=True, tp_split_dim=0)
    layer = copy.deepcopy(layer)
    layer.slice = tp
    assert layer.weight.shape == (4, 5) and layer._parameters["weight"].numel() == 20
    with pytest.raises(RuntimeError, match="init_distributed"):
        bmt.DistributedParameter(torch.empty(3))
    tp_size = min(int(os.environ["WORLD_SIZE"]), 2)
    bmt.init_distributed(tp_size=tp_size)
    torch.manual_seed(2)
    block = bmt.Block(layer)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(block)))
    bmt.init_parameters(block)
    torch.manual_seed(2)
    bmt.init_parameters(copied)
    same_state(block, copied)
    torch.manual_seed(2)
    expected = torch.empty(4, 5).normal_(std=0.1)
    assert torch.equal(block.state_dict()["weight"], expected)
    assert block.state_dict()["slice"].shape == (2 * tp_size, 3)


@pytest.mark.parametrize("world", WORLDS)
def test_parameters_may_come_before_init_distributed(world: int) -> None:
    run_ranks(world, before_init, init=False, fresh=True)


def other_ways() -> None:
    layer = Layer(4).bfloat16()
    del layer
    with torch.device("meta"):
        block = bmt.Block(Layer(4))
    seen: list[Any] = []
    block._module.weight.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    block._module.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    block.half()
    assert block._module.weight.is_meta and block._module.weight.dtype is torch.float16
    block.float()
    again = bmt.Block(block)
    bmt.init_parameters(again)
    again(torch.ones(2, 4)).sum().backward()
    assert seen == [(4, 5), True]


@pytest.mark.parametrize("world", WORLDS)
def test_hooks_conversions_and_rebuilding_before_there_are_values(world: int) -> None:
    run_ranks(world, other_ways)


def sent_to_meta() -> None:
    model = built("cpu")
    bmt.init_parameters(model)
    before = model.state_dict()
    for part in (model, model.layers[0], model.layers[0]._module):
        with pytest.raises(ValueError, match=r"device: .*sharded.*got meta"):
            part.to("meta")
        with pytest.raises(ValueError, match=r"device: .*sharded.*got meta"):
            part.to_empty(device="meta")
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    train(model, bmt.optim.AdamOptimizer(model.parameters(), lr=0.01))


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_sharded_is_not_sent_to_meta(world: int) -> None:
    run_ranks(world, sent_to_meta)


def pipelined() -> None:
    states = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            layers = bmt.PipelineTransformerBlockList([bmt.Block(Layer(4)) for _ in range(4)])
        torch.manual_seed(1)
        bmt.init_parameters(layers)
        states.append(layers.state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_pipelines_are_initialised_alike() -> None:
    run_ranks(4, pipelined, init={"pipe_size": 2})
