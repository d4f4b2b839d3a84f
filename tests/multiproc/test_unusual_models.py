"""Models that users of plain PyTorch write and that shards could get wrong: trained like plain ones, or refused."""

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from harness import run_ranks
from harness.twins import check_gradients, twins
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import parametrize, prune

import bmtrain as bmt
from bmtrain.parameter import shard_of


class Head(nn.Module):
    """An ordinary part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.table = nn.Embedding(5, 6, sparse=True)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.table(torch.tensor([0, 3, 3])).T


class Model(bmt.DistributedModule):
    """A distributed module of its user's that holds ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = bmt.DistributedParameter(torch.full((6,), 0.5))
        self.head = Head()

    def forward(self, x):
        return self.head(x * self.scale)


def test_ordinary_parts_of_a_distributed_module_are_wrapped_and_trained():
    run_ranks(2, check_ordinary_parts)


def check_ordinary_parts() -> None:
    torch.manual_seed(1)
    model = Model()
    plain = copy.deepcopy(model.head)
    scale = nn.Parameter(torch.full((6,), 0.5))
    bmt.BMTrainModelWrapper(model)
    assert all(isinstance(p, bmt.DistributedParameter) for p in model.parameters())
    assert all(type(layer) is bmt.Block for layer in model.head.layers)
    batches = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reference = torch.optim.SGD([*plain.parameters(), scale], lr=0.01)
    for _ in range(2):
        model(batches[bmt.rank()]).square().sum().backward()
        sum(plain(batch * scale).square().sum() for batch in batches).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for name, value in plain.state_dict(prefix="head.").items():
        torch.testing.assert_close(model.state_dict()[name], value)


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_built_in_inference_mode_runs_there_and_trains_later(world):
    run_ranks(world, check_built_in_inference_mode)


def check_built_in_inference_mode() -> None:
    with torch.inference_mode():
        model = bmt.BMTrainModelWrapper(Head())
        model(torch.ones(2, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]


class ComputesBias(nn.Module):
    """A layer that keeps the bias it computed last, in a small buffer and in a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("bias", torch.zeros(6), persistent=False)
        self.register_buffer("table", torch.zeros(20_000, 6), persistent=False)

    def forward(self, x):
        y = self.linear(x) + self.bias + self.table[: len(x)]
        if not self.training:
            self.bias, self.table = x.mean(0), x.mean() * torch.ones(20_000, 6)
        return y


@pytest.mark.parametrize("world", [1, 2])
def test_buffers_made_in_inference_mode_are_used_in_training(world):
    run_ranks(world, check_buffers_made_in_inference_mode)


def check_buffers_made_in_inference_mode() -> None:
    plain, layer = twins(ComputesBias)
    for part in (plain, block := bmt.Block(layer)):
        with torch.inference_mode():
            part.eval()(torch.arange(12.0).view(2, 6))
        part.train()
        part(torch.ones(2, 6)).square().sum().mul(1 if part is block else bmt.world_size()).backward()
    check_gradients(plain, layer)


class Threaded(nn.Module):
    """Computes a part of its forward in another thread, as a backward over a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden, parts = self.first(x), []
        thread = threading.Thread(target=lambda: parts.append(self.second(hidden).tanh()))
        thread.start()
        thread.join()
        return hidden + parts[0]


@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_a_forward_may_compute_in_another_thread(use_checkpoint):
    run_ranks(2, check_another_thread, use_checkpoint)


def check_another_thread(use_checkpoint: bool) -> None:
    plain = Threaded()
    block = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)), use_checkpoint=use_checkpoint)
    batch = torch.linspace(-1, 1, 12).view(2, 6)
    results = []
    for model in (plain, block):
        x = batch.clone().requires_grad_()
        model(x).square().sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)
    for name, parameter in plain.named_parameters():
        found = bmt.parameter.gather_flat(block.get_parameter(name), block.get_parameter(name).grad)
        torch.testing.assert_close(found, bmt.world_size() * parameter.grad.reshape(-1))


def test_what_shards_would_get_wrong_is_refused():
    run_ranks(2, check_refusals)


class Force(nn.Module):
    """Differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(6, 6)

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).tanh().sum(), x, create_graph=True)[0]


def check_refusals() -> None:
    with pytest.raises(TypeError, match="view_as_real"):
        bmt.DistributedParameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="requires_grad=False"):
        bmt.DistributedParameter(torch.ones(3).to(torch.float8_e4m3fn))
    bmt.DistributedParameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
    spectral = nn.Module()
    spectral.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="parameter Module.weight: expected a real dtype"):
        bmt.BMTrainModelWrapper(spectral)
    with pytest.raises(ValueError, match="max_norm"):
        bmt.BMTrainModelWrapper(nn.Embedding(4, 3, max_norm=1.0))
    with pytest.raises(ValueError, match="'weight' of shape unknown is a UninitializedParameter"):
        bmt.Block(nn.LazyLinear(3))
    with pytest.raises(RuntimeError, match="use_checkpoint=False"):
        bmt.Block(bmt.BMTrainModelWrapper(Force()))(torch.ones(2, 6))
    bmt.Block(bmt.BMTrainModelWrapper(Force()), use_checkpoint=False)(torch.ones(2, 6)).sum().backward()
    layer = bmt.Block(bmt.BMTrainModelWrapper(nn.Linear(6, 6)))
    shapes: list[torch.Size] = []
    register_multi_grad_hook(
        list(layer.parameters()), lambda gradient: shapes.append(gradient.shape), mode="any"
    )
    layer(torch.ones(2, 6)).sum().backward()
    assert len(shapes) == 1
    with pytest.raises(RuntimeError, match=r"parameters of a Block.*mode='any', or register_post_accumulate"):
        register_multi_grad_hook(list(layer.parameters()), print)
    merging = bmt.Block(
        bmt.BMTrainModelWrapper(nn.ParameterDict({"a": torch.ones(2, 4), "b": torch.ones(4, 2)}))
    )
    for merge in (lambda m: m["b"] @ m["a"], lambda m: m["b"].data @ m["a"].data):
        with pytest.raises(RuntimeError, match=r"a matrix of shape \(4, 2\), got.*bmtrain\.whole"):
            merge(merging._module)
        with bmt.whole(merging):
            assert merge(merging._module).shape == (4, 4)


def _prune(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


REPARAMETRIZATIONS = {  # tool: (applied, taken back)
    "prune": (_prune, lambda layer: prune.remove(layer, "weight")),
    "weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "parametrizations.weight_norm": (
        nn.utils.parametrizations.weight_norm,
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ),
    "parametrizations.spectral_norm": (
        nn.utils.parametrizations.spectral_norm,
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ),
}


def cached_parametrizations(use_checkpoint: bool) -> None:
    """A value that one call of a Block has cached is not another call's."""
    torch.manual_seed(0)
    plain = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    model = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)), use_checkpoint=use_checkpoint)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    for layer in (plain, model):
        with parametrize.cached():
            out = layer(torch.tanh(layer(x)))
            (out.square().sum() / (bmt.world_size() if layer is model else 1)).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.gather_grad(), expected.grad)
    with parametrize.cached():
        model(x)
        assert parametrize._cache_enabled == 1 and not parametrize._cache
    assert parametrize._cache_enabled == 0


class Recurrent(nn.Module):
    """Reads a parametrized weight several times."""

    def __init__(self, has_own_cache: bool) -> None:
        super().__init__()
        self.cell = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.has_own_cache = has_own_cache

    def forward(self, x):
        with parametrize.cached() if self.has_own_cache else nullcontext():
            for _ in range(3):
                x = torch.tanh(self.cell(x))
        return x


def cached_within_calls(use_checkpoint: bool) -> None:
    """Each access is a power iteration, but under ``cached()`` only the first one of a call."""
    for is_enclosed, has_own_cache in ((True, False), (False, True), (True, True)):
        torch.manual_seed(0)
        plain = Recurrent(has_own_cache)
        model = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)), use_checkpoint=use_checkpoint)
        head = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        x = torch.linspace(-1, 1, 12).view(3, 4)
        for layer in (plain, model):
            with parametrize.cached() if is_enclosed else nullcontext():
                weight = head.weight
                out = layer(x)
                assert (head.weight is weight) == is_enclosed  # the caller's cache is there again
            (out.square().sum() / (bmt.world_size() if layer is model else 1)).backward()
            assert parametrize._cache_enabled == 0 and not parametrize._cache
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.gather_grad(), expected.grad)
        for buffer, expected in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected)


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_parametrizations_are_cached_within_a_call_as_torch_does(use_checkpoint: bool) -> None:
    run_ranks(2, cached_within_calls, use_checkpoint)


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_parametrizations_are_not_cached_over_calls_of_blocks(use_checkpoint: bool) -> None:
    run_ranks(2, cached_parametrizations, use_checkpoint)


def test_reparametrized_layers_train_and_are_refused_once_they_are_shards():
    run_ranks(2, check_reparametrizations)


def check_reparametrizations() -> None:
    for tool, (apply, remove) in REPARAMETRIZATIONS.items():
        with pytest.raises(RuntimeError, match="after BMTrainModelWrapper"):
            apply(bmt.BMTrainModelWrapper(nn.Linear(6, 6)))
        with pytest.raises(RuntimeError):  # in a Block some tools stumble over the shard before that
            apply(bmt.BMTrainModelWrapper(nn.ModuleList([nn.Linear(6, 6)]))[0]._module)

        model, plain = nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 6)
        for layer in (model[0], plain):
            torch.manual_seed(3)
            layer.reset_parameters()
            apply(layer)
        bmt.BMTrainModelWrapper(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        x = torch.ones(2, 6)
        for _ in range(2):  # both ranks have the same batch, for spectral_norm, which counts forwards
            (model[0](x).square().sum() / 2).backward()
            plain(x).square().sum().backward()
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        for mode in (True, False):
            torch.testing.assert_close(model[0].train(mode)(x), plain.train(mode)(x), msg=tool)
        if tool.startswith("param"):  # computed where it is read, which a shard would get wrong
            torch.testing.assert_close(model[0].weight, plain.weight, msg=tool)
            copied = copy.deepcopy(bmt.BMTrainModelWrapper(copy.deepcopy(plain)))
            torch.testing.assert_close(copied(x), plain(x), msg=tool)
        with pytest.raises(RuntimeError, match="after BMTrainModelWrapper"):
            remove(model[0]._module)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_is_copied_or_says_what_to_do(stages):
    run_ranks(2, check_copies_of_a_pipeline, stages, init={"pipe_size": stages})


def check_copies_of_a_pipeline(stages: int) -> None:
    layers = bmt.PipelineTransformerBlockList(
        bmt.BMTrainModelWrapper(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))))
    )
    if stages > 1:
        with pytest.raises(TypeError, match="state_dict"):
            copy.deepcopy(layers)
        return
    clone = copy.deepcopy(layers)
    x = torch.ones(2, 4)
    expected = layers(x)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.zero_()
    torch.testing.assert_close(clone(x), expected)


class SquaredForce(nn.Module):
    """The square of an energy's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0].square().sum()


def second_derivatives() -> None:
    torch.manual_seed(0)
    plain = SquaredForce()
    outside = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    within = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)), use_checkpoint=False)
    x = torch.randn(2, 4, requires_grad=True)
    plain(x).backward()
    outside(x).backward()
    within(x).backward()
    by_hand = {
        name: p.gather() for name, p in bmt.BMTrainModelWrapper(copy.deepcopy(plain)).named_parameters()
    }
    inner = torch.autograd.grad(torch.func.functional_call(plain, by_hand, (x,)), list(by_hand.values())[:3])
    for number, (wanted, *ours) in enumerate(
        zip(plain.parameters(), outside.parameters(), within.parameters(), strict=True)
    ):
        if wanted.grad is None:
            continue  # the last bias does not change the force
        for p in ours:
            torch.testing.assert_close(p.grad, bmt.world_size() * shard_of(p, wanted.grad))
        torch.testing.assert_close(inner[number], wanted.grad)


@pytest.mark.parametrize("world", [1, 2])
def test_second_derivatives_where_the_pages_say_that_they_are_right(world):
    run_ranks(world, second_derivatives)
