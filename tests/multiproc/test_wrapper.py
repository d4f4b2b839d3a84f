"""Ordinary models, wrapped: same results, sharded parameters."""

from __future__ import annotations

import abc
import copy
import io
import pickle
import typing
from typing import Any, ClassVar

import pytest
import torch
from harness import run_ranks
from harness.twins import check_gradients
from torch import nn

import bmtrain as bmt
from bmtrain import wrapper
from bmtrain.integrations.sharding import shard_model

WORLDS = (1, 2, 4)


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2)])

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        other = x if memory is None else memory
        return x + self.norms[1](self.project(self.norms[0](other)))


class Layer(nn.Module):
    """With a list of its own, as an encoder-decoder has it."""

    def __init__(self, dim: int, num_parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Attention(dim) for _ in range(num_parts)])
        self.register_buffer("scale", torch.tensor(0.5))
        self.runs = 0

    def forward(self, x: torch.Tensor, *, memory: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.runs += 1
        for index, part in enumerate(self.parts):
            x = part(x, memory if index else None)
        return {"hidden": x * self.scale}


class EncoderDecoder(nn.Module):
    def __init__(self, vocab: int = 13, dim: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=0)
        self.encoder = nn.ModuleList([Layer(dim, 1) for _ in range(2)])
        self.decoder = nn.ModuleList([Layer(dim, 2) for _ in range(3)])
        self.pooler = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.head = nn.Linear(dim, vocab)
        self.head.weight = self.embedding.weight
        self.bias = nn.Parameter(torch.randn(vocab))
        self.head.bias = self.bias
        self.last = self.decoder[2]
        self.pooler[0].bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        memory = self.embedding(ids)
        x = memory.flip(0)
        for layer in self.encoder:
            memory = layer(memory)["hidden"]
        for layer in self.decoder[:2]:
            x = layer(x, memory=memory)["hidden"]
        x = self.last(x, memory=memory)["hidden"]
        return self.head(self.pooler(x)) + self.bias


def twins(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    plain = EncoderDecoder()
    return plain, copy.deepcopy(plain)


def ids_of(rank: int) -> torch.Tensor:
    return torch.randint(13, (3, 4), generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("world", WORLDS)
def test_bc65_bc66_a_wrapped_model_computes_what_the_model_does(world):
    run_ranks(world, check_equal_to_plain)


def check_equal_to_plain() -> None:
    plain, model = twins()
    assert bmt.BMTrainModelWrapper(model) is model
    assert torch.equal(model(ids_of(bmt.rank())), plain(ids_of(bmt.rank())))

    for layer in (*model.encoder, *model.decoder):
        layer.runs = layer._module.runs = 0
    model(ids_of(bmt.rank())).square().mean().backward()
    assert [layer._module.runs for layer in (*model.encoder, *model.decoder)] == [2] * 5
    for rank in range(bmt.world_size()):  # gradients of the ranks' losses add
        plain(ids_of(rank)).square().mean().backward()
    compared = 0
    for (name, expected), (other, param) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other
        if expected.grad is None:
            assert param.grad is None
            continue
        begin, end = param._start_partition, param._end_partition
        actual, slice_ = param.grad, expected.grad.flatten()[begin:end]
        assert torch.allclose(actual, slice_, rtol=1e-5, atol=1e-6 * float(expected.grad.abs().max())), name
        compared += 1
    assert compared == len(list(plain.parameters())) - 1  # one is frozen


def test_structure_of_a_wrapped_model():
    run_ranks(2, check_structure)


def check_structure() -> None:
    plain, model = twins()
    bmt.BMTrainModelWrapper(model)
    assert all(isinstance(p, bmt.DistributedParameter) for p in model.parameters())
    assert all(isinstance(m, bmt.DistributedModule) for m in model.modules() if type(m) is not bmt.Block)
    assert isinstance(model, EncoderDecoder)
    assert type(model).__name__ == "bmtrain.DistributedEncoderDecoder"
    assert type(model.head) is type(model.pooler[0])  # one class for each old class
    assert model.__class__.__name__ == "EncoderDecoder"  # what saved configurations name
    assert repr(model) == repr(plain)
    assert model._parameters["bias"] is model.head._parameters["bias"]
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    assert all(model.get_parameter(name) is param for name, param in model.named_parameters())
    with pytest.raises(AttributeError, match="absent"):
        model.get_parameter("head.absent")
    assert not model.pooler[0]._parameters["bias"].requires_grad
    assert isinstance(model.decoder, nn.ModuleList)
    assert all(type(layer) is bmt.Block and isinstance(layer, Layer) for layer in model.decoder)
    assert model.decoder[2] is model.last is model.decoder[1].next_module()
    assert not any(type(part) is bmt.Block for layer in model.decoder for part in layer.parts)
    assert isinstance(model.decoder[:2], nn.ModuleList)

    modules, parameters = list(model.modules()), list(model.parameters())
    assert wrapper.model_wrapper_dispatch(model) is model  # twice is once
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))

    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    model.load_state_dict(twins(seed=1)[0].state_dict())
    assert torch.equal(model.state_dict()["head.weight"], twins(seed=1)[0].state_dict()["embedding.weight"])


@pytest.mark.parametrize("world", (1, 2))
def test_a_wrapped_model_can_be_copied_and_pickled(world):
    run_ranks(world, check_copies)


def check_copies() -> None:
    plain, model = twins()
    bmt.BMTrainModelWrapper(model)
    model.embedding._parameters["weight"].note = "kept"
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = plain(ids_of(0))
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    for clone in copies:
        assert type(clone) is type(model)
        assert type(clone.decoder[0]) is bmt.Block
        assert clone.head._parameters["weight"] is clone.embedding._parameters["weight"]
        assert clone.embedding._parameters["weight"].note == "kept"
        assert torch.equal(clone(ids_of(0)), expected)
        for param in clone.parameters():
            param.data.zero_()
    assert torch.equal(model(ids_of(0)), expected)


@pytest.mark.parametrize("world", (1, 2))
def test_small_and_unusual_modules(world):
    run_ranks(world, check_small_modules)


class WordLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 7], div_value=2.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.inner(x), y).loss


@pytest.mark.parametrize("world", (1, 3))
def test_ranks_may_have_targets_in_other_clusters(world):
    run_ranks(world, check_adaptive_softmax)


def check_adaptive_softmax() -> None:
    torch.manual_seed(0)
    ranks = bmt.world_size()
    x, y = torch.randn(4 * ranks, 4), torch.arange(4 * ranks) % 12
    for make in (WordLoss, lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 12, [3, 7], div_value=1.0)):
        plain = make()
        model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
        assert isinstance(model, type(plain))
        assert model.state_dict().keys() == plain.state_dict().keys()
        losses = []
        for each, part in ((plain, slice(None)), (model, slice(4 * bmt.rank(), 4 * bmt.rank() + 4))):
            loss = each(x[part], y[part])
            losses.append(loss if isinstance(loss, torch.Tensor) else loss.loss)
        losses[0].mul(ranks).backward()
        losses[1].backward()
        torch.testing.assert_close(bmt.sum_loss(losses[1]), losses[0].detach())
        check_gradients(plain, model, tolerance=1e-5, none_is_zero=True)


class Registered(nn.Linear):
    """Keeps its classes by name, as plug-ins do."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, name: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.known[name] = cls


class Named(Registered, name="named"):
    pass


class Plugin(abc.ABC, Registered, name="plugin"):
    """The same with its dict from this class, and a hook of its own."""

    def __init_subclass__(cls, *, name: str, **options: Any) -> None:
        super().__init_subclass__(name=name, **options)


class NamedPlugin(Plugin, name="named plugin"):
    pass


class Abstract(abc.ABC, nn.Module):
    """Its objects have their dict from this class, and not from Module."""

    @abc.abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Concrete(Abstract):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class Metric(nn.Linear):
    """Moves more than its parameters, by a method with other arguments than Module's, as metrics of torchmetrics."""

    def _apply(self, fn: typing.Any, exclude_state: typing.Sequence[str] = "") -> nn.Module:
        assert "total" not in exclude_state
        self.total = fn(torch.ones(1))
        return super()._apply(fn)


_Item = typing.TypeVar("_Item")


class Typed(typing.Generic[_Item], nn.Linear):
    pass


def check_small_modules() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6)
    holder = nn.Module()
    holder.p = nn.Parameter(torch.randn(3))
    for plain in (
        nn.Linear(6, 3),
        nn.Sequential(nn.Linear(6, 2), nn.ReLU(), nn.Linear(2, 6)),
        nn.Tanh(),
        Clipping(6, 3),
        nn.BatchNorm1d(5),
        nn.LSTM(6, 3, num_layers=2),
        nn.MultiheadAttention(6, 2),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), 2),
        Named(6, 6),
        Plugin(6, 6),
        NamedPlugin(6, 6),
        Concrete(),
        Typed[int](6, 6),
        nn.ModuleList([Concrete()]),
        Metric(6, 6),
        nn.ModuleList([Metric(6, 6)]),
    ):
        model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
        assert isinstance(model, type(plain))
        assert list(pickle.loads(pickle.dumps(model)).state_dict()) == list(plain.state_dict())
        assert model.double().float() is model
        if isinstance(plain, nn.ModuleList):
            plain, model = plain[0], model[0]
        args = (x, x, x) if isinstance(plain, nn.MultiheadAttention) else (x,)
        actual, expected = model(*args), plain(*args)
        first = actual[0] if isinstance(actual, tuple) else actual
        assert torch.equal(first, expected[0] if isinstance(expected, tuple) else expected), type(plain)
        if list(plain.parameters()):
            first.square().sum().backward()
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert torch.equal(bmt.BMTrainModelWrapper(copy.deepcopy(holder)).p, holder.p)
    assert Registered.known == {"named": Named, "plugin": Plugin, "named plugin": NamedPlugin}
    assert "__init_subclass__" in vars(Plugin) and "__init_subclass__" not in vars(NamedPlugin)


class WeightDrop(nn.Module):
    """Drops recurrent weights, as AWD-LSTM does: computed tensors take the places of parameters of the network."""

    def __init__(self, network: nn.RNNBase) -> None:
        super().__init__()
        self.raw = nn.Parameter(network.weight_hh_l0.data)
        del network.weight_hh_l0
        network.weight_hh_l0 = self.raw.detach()
        self.network = network
        self.mask = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.network.weight_hh_l0 = self.raw * self.mask
        return self.network(x)[0]


def check_dropped_weights(as_blocks: bool) -> None:
    layers = [WeightDrop(kind(4, 4)) for kind in (nn.LSTM, nn.GRU, nn.RNN)]
    plain = nn.Sequential(*layers)
    copied = copy.deepcopy(layers)
    wrapped = bmt.BMTrainModelWrapper(nn.ModuleList(copied) if as_blocks else nn.Sequential(*copied))
    for _ in range(2):
        mask = (torch.rand(4) < 0.5).float()
        outputs = []
        for model in (plain, wrapped):
            x = torch.linspace(-1, 1, 24).view(2, 3, 4)
            for layer in model:
                layer.mask = mask
                x = layer(x)
            x.sum().backward()
            outputs.append(x)
        assert torch.equal(*outputs)
    scale = bmt.world_size()  # each rank adds its gradients
    for p, q in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(q.gather_grad(), p.grad * scale)


@pytest.mark.parametrize("as_blocks", [False, True])
def test_recurrent_networks_with_computed_weights(as_blocks: bool) -> None:
    run_ranks(2, check_dropped_weights, as_blocks)


def test_containers_in_lists_and_modules_that_are_distributed_already():
    run_ranks(2, check_containers)


class Owned(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(3))
        self.plain = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight


def check_containers() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Module()
    model.lists = nn.ModuleList([nn.ModuleList([nn.Linear(3, 3)]), nn.ModuleList([shared, nn.Linear(3, 3)])])
    model.again = nn.ModuleList([shared])
    model.owned = Owned()
    model.blocks = bmt.TransformerBlockList([bmt.Block(Counted())])
    owned, blocks = model.owned, model.blocks
    block = blocks[0]
    bmt.BMTrainModelWrapper(model)
    assert [[type(item) is bmt.Block for item in inner] for inner in model.lists] == [[True], [True, True]]
    assert model.owned is owned
    assert type(owned) is Owned
    assert type(owned.plain) is nn.Parameter  # what is distributed already is left as it is
    assert type(model.blocks) is bmt.TransformerBlockList
    assert model.blocks[0] is block
    x = torch.randn(2, 3)
    assert torch.equal(model.lists[1][0](x), model.again[0](x))
    (model.lists[1][0](x) + model.again[0](x)).sum().backward()
    assert model.lists[1][0]._parameters["weight"] is model.again[0]._parameters["weight"]


class Clipping(nn.Linear):
    """With an attribute of the name that an embedding has."""

    max_norm = 1.0


class Counted(bmt.DistributedModule):
    def forward(self, x):
        return x


def test_one_node_and_bad_arguments():
    run_ranks(1, check_one_node)


def check_one_node() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.own = nn.Parameter(torch.ones(2))
    assert wrapper.make_distributed(model) is model
    assert isinstance(model, bmt.DistributedModule)
    assert type(model[0]) is nn.Linear
    assert isinstance(model._parameters["own"], bmt.DistributedParameter)
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got list"):
        bmt.BMTrainModelWrapper([])
    for embedding in (nn.Embedding(4, 2, max_norm=1.0), nn.EmbeddingBag(4, 2, max_norm=1.0)):
        with pytest.raises(
            ValueError, match=f"{type(embedding).__name__}: max_norm=1.0 writes to the weight"
        ):
            bmt.BMTrainModelWrapper(embedding)
    with pytest.raises(TypeError, match="scripted"):
        bmt.BMTrainModelWrapper(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))


def test_wrapping_needs_init():
    run_ranks(1, check_needs_init, init=False)


def check_needs_init() -> None:
    with pytest.raises(RuntimeError, match="not initialized"):
        bmt.BMTrainModelWrapper(nn.Linear(1, 1))


BUFFERS = {
    "plain": lambda rank: torch.full((3, 4), float(rank)),
    "expanded": lambda rank: torch.full((1, 4), float(rank)).expand(3, 4),
    "NaN": lambda rank: torch.tensor([torch.nan, rank]),
    "expanded NaN": lambda rank: torch.tensor([torch.nan, rank]).expand(3, 2),
    "a number": lambda rank: torch.tensor(float(rank)),
    "of one number": lambda rank: torch.tensor(float(rank)).expand(2, 2),
    "empty": lambda rank: torch.empty(0, 3).expand(2, 0, 3),
}


def buffers_of_rank_0() -> None:
    model = nn.Linear(2, 2)
    for name, make in BUFFERS.items():
        model.register_buffer(name, make(bmt.rank()))
    strides = {name: buffer.stride() for name, buffer in model.named_buffers()}
    shard_model(model)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, BUFFERS[name](0), rtol=0, atol=0, equal_nan=True)
        assert buffer.stride() == strides[name]


def test_buffers_that_share_elements_get_the_values_of_rank_0() -> None:
    run_ranks(2, buffers_of_rank_0)


class Masked(nn.Module):
    """A layer that masks its weight's gradient by a hook of its own, as sparse layers do, in and outside of Blocks."""

    def __init__(self, freezes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 4)
        self.accumulated: list[int] = []
        for number, layer in enumerate((*self.layers, self.head)):
            layer.weight.register_hook(lambda gradient: gradient.tril())
            layer.weight.register_post_accumulate_grad_hook(
                lambda _, number=number: self.accumulated.append(number)
            )
            layer.weight.requires_grad_(not freezes)
        self.handle = self.head.bias.register_hook(torch.zeros_like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def hooks_from_before(freezes: bool) -> None:
    torch.manual_seed(0)
    plain = Masked(freezes)
    torch.manual_seed(0)
    model: Any = bmt.BMTrainModelWrapper(Masked(freezes))
    x = torch.randn(3, 4)
    for step in range(2):
        for each in (plain, model):
            for param in each.parameters():
                param.requires_grad_()  # the frozen ones too
            each.zero_grad()
            each.accumulated.clear()
            each(x).square().sum().backward()
        assert sorted(model.accumulated) == sorted(plain.accumulated) == [0, 1, 2]
        for (name, expected), param in zip(plain.named_parameters(), model.parameters(), strict=True):
            full = param.gather_grad()
            assert torch.equal(full, bmt.world_size() * expected.grad), (step, name)
        assert param.gather_grad().any() == step  # of the head's bias
        plain.handle.remove()
        model.handle.remove()


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("world", WORLDS[:2])
def test_hooks_of_parameters_from_before_the_wrapping_stay(world: int, freezes: bool) -> None:
    run_ranks(world, hooks_from_before, freezes)
