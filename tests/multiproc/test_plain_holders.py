"""Plain torch modules, outside Blocks, that hold distributed parameters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt


def fill(value: float) -> bmt.ParameterInitializer:
    return bmt.ParameterInitializer(torch.nn.init.constant_, value)


def holder(device: str = "cpu") -> torch.nn.Linear:
    """A torch.nn.Linear whose parameters are shards."""
    module = torch.nn.Linear(5, 3)
    module.weight = bmt.DistributedParameter(torch.empty(3, 5, device=device), init_method=fill(2.0))
    module.bias = bmt.DistributedParameter(torch.empty(3, device=device), init_method=fill(1.0))
    return module


class Root(bmt.DistributedModule):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.scale = bmt.DistributedParameter(torch.empty(7, device=device), init_method=fill(3.0))
        self.plain = torch.nn.Sequential(torch.nn.ReLU(), holder(device))
        self.blocks = bmt.TransformerBlockList([bmt.Block(holder(device)) for _ in range(2)])


SHAPES = {"weight": (3, 5), "bias": (3,)}


def check_whole(state: dict[str, torch.Tensor], prefix: str = "") -> None:
    for name, shape in SHAPES.items():
        assert type(state[prefix + name]) is torch.Tensor and tuple(state[prefix + name].shape) == shape


def whole_tensors() -> None:
    module = holder()
    bmt.init_parameters(module)
    for _ in range(2):  # once is enough, twice does no harm
        bmt.init_parameters(torch.nn.Sequential(module))
    check_whole(module.state_dict())
    full = {"weight": torch.arange(15.0).view(3, 5), "bias": torch.arange(3.0)}
    module.load_state_dict(full)
    assert torch.equal(module.weight.gather(), full["weight"])
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        module.load_state_dict({**full, "bias": torch.zeros(4)})
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(value, full[name]) for name, value in twin.state_dict().items())

    root = Root()  # nothing was initialised: asking the root is enough
    state = root.state_dict()
    assert list(state)[:3] == ["scale", "plain.1.weight", "plain.1.bias"]
    check_whole(state, "plain.1.")
    check_whole(state, "blocks.0.")
    root.load_state_dict({name: torch.full_like(value, 4.0) for name, value in state.items()})
    assert all((p.gather() == 4.0).all() for p in root.parameters())

    module = holder()
    bmt.init_parameters(module)
    wrapped = bmt.BMTrainModelWrapper(module)  # distributed from now on: one way of saving, not two
    wrapped.load_state_dict(full)
    assert all(torch.equal(value, full[name]) for name, value in wrapped.state_dict().items())


@pytest.mark.parametrize("world", [1, 2])
def test_plain_holders_save_and_load_whole_tensors(world):
    run_ranks(world, whole_tensors)


def unseen() -> None:
    """Its parameters are all that the library knows of the module, and of its container."""
    full = {"weight": torch.arange(15.0).view(3, 5), "bias": torch.arange(3.0)}
    module = torch.nn.Linear(5, 3)
    module.weight = bmt.DistributedParameter(full["weight"])
    module.register_parameter("bias", bmt.DistributedParameter(full["bias"]))
    listed = torch.nn.ParameterList([module.weight])
    for holding in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        state = holding.state_dict()
        assert all(torch.equal(state[name], full[name]) for name in full)
        holding.load_state_dict({name: value + 1 for name, value in full.items()})
        assert torch.equal(holding.weight.gather(), full["weight"] + 1)
    assert torch.equal(listed.state_dict()["0"], full["weight"] + 1)


@pytest.mark.parametrize("world", [1, 2])
def test_state_dicts_of_modules_that_the_library_has_not_met_are_whole(world):
    run_ranks(world, unseen)


def renamed() -> None:
    """A module whose own hooks, the one from before it was given shards, know the names of older files."""
    State = dict[str, torch.Tensor]
    module, shards = torch.nn.Linear(5, 3), holder()

    def rename(module: torch.nn.Module, state_dict: State, prefix: str, *_: object) -> None:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")

    def rename_back(module: torch.nn.Module, state_dict: State, prefix: str, *_: object) -> None:
        state_dict[prefix + "kernel"] = state_dict.pop(prefix + "weight").neg()

    module.register_state_dict_post_hook(rename_back)
    module.weight, module.bias = shards.weight, shards.bias
    module.register_load_state_dict_pre_hook(rename)
    root = torch.nn.Sequential(module)
    bmt.init_parameters(root)
    root.load_state_dict({"0.kernel": torch.full((3, 5), 4.0), "0.bias": torch.zeros(3)})
    assert torch.equal(module.weight.gather(), torch.full((3, 5), 4.0))
    assert torch.equal(root.state_dict()["0.kernel"], torch.full((3, 5), -4.0))


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_that_rename_entries_get_whole_tensors(world):
    run_ranks(world, renamed)


def emptied() -> None:
    root = Root(device="meta")
    before = list(root.parameters())
    assert all(p.is_meta for p in before)
    assert all(p.is_meta for p in root.half().float().parameters())  # a conversion makes no memory
    assert root.to_empty(device="cpu") is root
    for old, param in zip(before, root.parameters(), strict=True):
        assert param is old and type(param) is bmt.DistributedParameter and not param.is_meta
        assert param.numel() == param._end_partition - param._start_partition
    bmt.init_parameters(root)
    assert torch.equal(root.scale, torch.full((7,), 3.0))
    assert root.blocks[0](torch.ones(2, 5)).tolist() == [[11.0] * 3] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_to_empty_makes_shards_of_what_is_on_the_meta_device(world):
    run_ranks(world, emptied)


class Mixture(torch.nn.Module):
    """A learned mixture of layers, as of ELMo; ``parameter`` makes its parameters."""

    def keep(self, parameter: Callable[[torch.Tensor], torch.nn.Parameter]) -> None:
        self.shares = torch.nn.ParameterList([parameter(torch.full((1,), 0.5))])
        self.shares.append(parameter(torch.full((1,), 0.25)))
        self.maps = torch.nn.ParameterDict({"in": parameter(torch.linspace(-1, 1, 12).view(4, 3))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.shares
        return first * (x @ self.maps["in"]).tanh() + second


class DistributedMixture(bmt.DistributedModule, Mixture):
    pass


def listed() -> None:
    plain, model = Mixture(), DistributedMixture()
    plain.keep(torch.nn.Parameter)
    model.keep(bmt.DistributedParameter)
    x = torch.linspace(0, 1, 8).view(2, 4)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin.shares, torch.nn.ParameterList) and isinstance(
            twin.maps, torch.nn.ParameterDict
        )
        plain.zero_grad()
        (bmt.world_size() * plain(x).square().sum()).backward()
        twin(x).square().sum().backward()
        torch.testing.assert_close(twin(x), plain(x))
        assert list(twin.state_dict()) == list(plain.state_dict())
        for p, wanted in zip(twin.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.gather_grad(), wanted.grad)


@pytest.mark.parametrize("world", [1, 2])
def test_lists_and_dicts_of_parameters_read_as_full_tensors(world):
    run_ranks(world, listed)
