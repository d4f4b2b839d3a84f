"""What programs that come from plain torch or DistributedDataParallel do wrong without noticing: it is said."""

from __future__ import annotations

import copy
import functools
import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import Status, rank_outcomes, run_ranks
from harness.hit_experts import HitExperts
from harness.twins import twins
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import bmtrain as bmt
from bmtrain._base import deprecate
from bmtrain._engine.replaced import note_given
from bmtrain._ranks.context import require_gathering
from bmtrain.errors import CommunicationError

OPTIMIZERS = [torch.optim.SGD, bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer]


def train(model: torch.nn.Module, step: Callable[[], object]) -> None:
    model(torch.ones(2, 4)).sum().backward()
    step()


def optimizers_made_too_early() -> None:
    for kind in OPTIMIZERS:
        for is_managed in (False, True):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            optimizer = kind(model.parameters(), lr=0.1)
            manager = bmt.optim.OptimManager()
            manager.add_optimizer(optimizer)
            model = bmt.BMTrainModelWrapper(model)
            with pytest.raises(
                RuntimeError, match=r"4 of its 4 parameters.*after the model has been wrapped"
            ):
                train(model, manager.step if is_managed else optimizer.step)
            train(model, kind(model.parameters(), lr=0.1).step)


def optimizer_of_what_is_still_plain() -> None:
    """A plain module that shares a parameter with the wrapped one goes on training it."""
    wrapped, plain = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    plain.weight = wrapped.weight
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    bmt.BMTrainModelWrapper(wrapped)
    before = plain.weight.detach().clone()
    train(plain, optimizer.step)
    assert not torch.equal(plain.weight, before)


@pytest.mark.parametrize("check", [optimizers_made_too_early, optimizer_of_what_is_still_plain])
def test_an_optimizer_of_replaced_parameters_does_not_step_in_silence(check: Callable[[], None]) -> None:
    run_ranks(1, check)


class Listing(torch.nn.Module):
    """Reads parameters from a list, and from a closure in a layer that becomes a Block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.listed = [self.first.weight]
        weight = self.layers[0].weight
        self.layers[0].forward = lambda x: x @ weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x @ self.listed[0]) + self.first.bias


def computing_with_replaced() -> list[str]:
    model = bmt.BMTrainModelWrapper(Listing())
    other = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part in (other, model, model):
            train(part, torch.optim.SGD(part.parameters(), lr=0.1).step)
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def test_a_model_that_computes_with_replaced_parameters_is_told() -> None:
    first, second = run_ranks(2, computing_with_replaced)
    assert len(first) == 1 and "has replaced (2, the first" in first[0] and second == []


def warned_of(*groups: list[torch.nn.Parameter]) -> list[str]:
    """What adding an optimizer of these groups says, at the line that adds it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
        bmt.optim.OptimManager().add_optimizer(optimizer)
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def plain_and_empty() -> list[list[str]]:
    deprecate._seen.difference_update({"OptimManager.plain_parameters", "OptimManager.empty_group"})
    shards = list(bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4)).parameters())
    plain = list(torch.nn.Linear(4, 4).parameters())
    matrices = [p for p in shards if p.dim() >= 2]
    return [warned_of(*groups) for groups in ([shards], [plain], [plain], [matrices, shards])]


def test_what_an_optimizer_is_given_by_mistake_is_told_once() -> None:
    [alone] = run_ranks(1, plain_and_empty)
    first, second = run_ranks(2, plain_and_empty)
    assert list(map(len, alone)) == [0, 0, 0, 1] and list(map(len, first)) == [0, 1, 0, 1]
    assert "2 of its 2 parameters are plain" in first[1][0]
    assert "group 0 is empty" in alone[3][0] and alone[3] == first[3]
    assert second == [[], [], [], []]


def centred(gradient: torch.Tensor) -> torch.Tensor:
    return gradient - gradient.mean(tuple(range(1, gradient.dim())), keepdim=True)


class Own(torch.optim.Optimizer):
    """An optimizer of a script, of the kinds that it makes of ``change``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.change(p.grad), alpha=group["lr"])


class Centring(Own):
    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return centred(gradient)


class Normed(Own):
    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return sum([each / each.norm() for each in (gradient,)])


class NormedInShards(Normed):
    for_shards = True


class Asked(dict):
    """A configuration whose attributes are its items, which it makes when it is asked."""

    def __getattr__(self, name: str) -> Asked:
        return self.setdefault(name, Asked())


class Lazy:
    """A proxy of something that cannot be loaded."""

    @property
    def __class__(self) -> Any:
        raise ImportError("not installed")

    def __getattr__(self, name: str) -> Any:
        raise ImportError("not installed")


CONFIG, PROXY, METER = Asked(dim=4, sum=0), Lazy(), SimpleNamespace(mean=abs)


def made_in(**names: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function in a module of another package, or in none."""
    exec("def normed(gradient): return gradient / gradient.norm()", names)
    return names["normed"]


of_library, of_no_module = made_in(__name__="library.functions"), made_in()


class Elementwise(Own):
    """Names what has attributes of the names of a tensor's, and is none, in its step."""

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        if CONFIG.dim + METER.mean(1.0) + np.mean([1.0]) + CONFIG.sum + np.linalg.norm([0.0]) < 0:
            return of_library(PROXY)
        return gradient.sign() if CONFIG else of_no_module(gradient)


@functools.lru_cache
def of_functions(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / torch.linalg.norm(gradient) + torch.Tensor.sum(gradient) * 0


class ByFunctions(Own):
    """Calls functions of torch's modules, in a cached function, from a static one."""

    @staticmethod
    def change(gradient: torch.Tensor) -> torch.Tensor:
        return of_functions(gradient)


class Named(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def own_optimizers() -> list[str]:
    parameters = list(bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4)).parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for cls in (
            Own,
            Centring,
            Normed,
            NormedInShards,
            Elementwise,
            ByFunctions,
            Named,
            torch.optim.Rprop,
        ):
            deprecate._seen.discard(f"optimizer.{cls.__module__}.{cls.__qualname__}")
            for _ in range(2):
                bmt.optim.OptimManager().add_optimizer(cls(parameters, lr=0.1))
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message).split(", and")[0] for w in caught]


def test_an_optimizer_that_computes_over_whole_tensors_is_told_once() -> None:
    [alone] = run_ranks(1, own_optimizers)
    first, second = run_ranks(2, own_optimizers)
    assert alone == ["Centring: its step() uses dim"] and second == []
    whole = ("Centring: its step() uses dim, mean", "Normed: its step() uses norm")
    assert first == [*whole, "ByFunctions: its step() uses norm, sum"]


def asked_for_dimensions() -> list[list[str]]:
    deprecate._seen.discard("parameter.dim")
    model = bmt.BMTrainModelWrapper(torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)]))
    bias, weight = model[0]._module._parameters["bias"], model[0]._module._parameters["weight"]
    said = []
    for ask in (
        lambda: [bias.dim(), model[0](torch.ones(2, 4)), repr(weight), torch.optim.AdamW([weight])],
        lambda: [p for p in model.parameters() if p.dim() > 1],
        lambda: [p for p in model.parameters() if p.ndim > 1],
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ask()
        assert all(w.filename == __file__ for w in caught)
        said.append([str(w.message) for w in caught])
    with bmt.whole(model):
        assert (weight.dim(), weight.ndim) == (2, 2)
    return said


def test_a_script_that_asks_shards_for_their_dimensions_is_warned_once() -> None:
    for first, *others in (run_ranks(1, asked_for_dimensions), run_ranks(2, asked_for_dimensions)):
        assert list(map(len, first)) == [0, 1, 0] and "len(p.full_shape)" in first[1][0]
        assert others in ([], [[[], [], []]])


def indexed_outside() -> list[list[str]]:
    deprecate._seen.discard("parameter.index")
    model = bmt.BMTrainModelWrapper(torch.nn.ModuleList([Rows()]))
    block = model[0]
    weight, bias = block.weight, block.bias
    mask = weight.detach() > 0
    said = []

    def write_row(tensor: torch.Tensor) -> None:
        tensor[:1] = 0

    for use in (
        lambda: [weight[mask], weight[...], weight[:], weight.data.view(-1)[:1], block(torch.ones(2, 4))],
        lambda: [t[m] for t in (weight, weight.data) for m in (mask.numpy(), mask.tolist(), True)],
        lambda: write_row(weight.data),
        lambda: [bias[:1], weight[1:2], weight.data[:2]],
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use()
        assert all(w.filename == __file__ for w in caught)
        said.append([str(w.message) for w in caught])
    with bmt.whole(model, write=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        write_row(weight)
        write_row(weight.data)
    assert weight.gather()[0].eq(0).all()
    return said


class Rows(torch.nn.Linear):
    """Indexes its parameters where they are full."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight[0] + self.bias[:1] + self.weight.data[:, 1]


def test_a_script_that_indexes_shards_is_warned_once() -> None:
    for first, *others in (run_ranks(1, indexed_outside), run_ranks(2, indexed_outside)):
        assert list(map(len, first)) == [0, 0, 1, 0] and "bmtrain.whole" in first[2][0]
        assert others in ([], [[[], [], [], []]])


def reduced_outside() -> list[list[str]]:
    deprecate._seen.discard("parameter.along")
    model = bmt.BMTrainModelWrapper(torch.nn.ModuleList([Scaled()]))
    block = model[0]
    weight, bias = block.weight, block.bias
    said = []

    def normalise(tensor: torch.Tensor) -> None:
        tensor.copy_(torch.nn.functional.normalize(tensor, dim=-1))

    for use in (
        lambda: [
            weight.norm(),
            weight.data.norm(2),
            weight.sum(dtype=torch.float64),
            block(torch.ones(2, 4)),
        ],
        lambda: [weight.data.mean(), weight.max(weight.detach() * 0)],
        lambda: normalise(weight.data),
        lambda: [weight.data.norm(2, dim=-1), weight.detach().mean(0), bias.sum(dim=(0,))],
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use()
        assert all(w.filename == __file__ for w in caught)
        said.append([str(w.message) for w in caught])
    with bmt.whole(model, write=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        normalise(weight.data)
    assert torch.allclose(weight.gather().norm(dim=1), torch.ones(4))
    return said


class Scaled(torch.nn.Linear):
    """Normalises its weight where it is full, as its script does between steps."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight / self.weight.norm(dim=1, keepdim=True)
        return torch.nn.functional.linear(x, weight * self.weight.data.std(1, keepdim=True), self.bias)


def test_a_script_that_reduces_shards_along_a_dimension_is_warned_once() -> None:
    for first, *others in (run_ranks(1, reduced_outside), run_ranks(2, reduced_outside)):
        assert list(map(len, first)) == [0, 0, 1, 0]
        assert "norm() along a dimension was used" in first[2][0] and "bmtrain.whole" in first[2][0]
        assert others in ([], [[[], [], [], []]])


class Holder(torch.nn.Module):
    """A plain module, which nobody asks before its parameters are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.gather()


def multiplied_outside() -> None:
    block = bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4)))
    weight, x = block.weight, torch.ones(2, 4)
    operations = [
        lambda w: w.t(),
        lambda w: w.T,
        lambda w: w.transpose(0, 1),
        lambda w: w.matmul(w),
        lambda w: w @ w,
        lambda w: x @ w,
        lambda w: torch.nn.functional.linear(x, w.t()),
    ]
    for operation in operations:
        for shard in (weight, weight.data)[: bmt.world_size()]:
            with pytest.raises(RuntimeError, match=r"matrix of shape \(4, 4\), .* gather\(\)"):
                operation(shard)
        assert block.bias.t() is not None  # is flat as a whole
        with bmt.whole(block):
            assert operation(weight).shape[-1] == 4
    (x @ weight.gather()).sum().backward()  # the remedy that the error names first
    assert torch.equal(weight.gather_grad(), 2.0 * bmt.world_size() * torch.ones(4, 4))


def test_a_shard_is_not_transposed_or_multiplied_as_a_vector() -> None:
    for world in (1, 2):
        run_ranks(world, multiplied_outside)


def flat_data_alone() -> list[list[str]]:
    """Products and transposes of the data on one rank, in a Block and outside, which are those of the flat vector."""
    modules = [bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4)), bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))]
    modules[1] = bmt.Block(modules[1])
    said = []
    for param in [next(module.parameters()) for module in modules]:
        deprecate._seen.discard("parameter.product")
        flat = param.detach().clone().as_subclass(torch.Tensor)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for data in (param.data, flat):
                assert torch.equal(data.t(), flat) and torch.equal(data.T, flat)
                assert torch.equal(data @ flat, flat.dot(flat)) and torch.equal(flat @ data, flat.dot(flat))
        caught = [w for w in caught if "matrix of shape (4, 4)" in str(w.message)]  # torch warns of T
        assert all(w.filename == __file__ for w in caught)
        said.append([str(w.message) for w in caught])
    return said


def test_flat_data_of_one_rank_are_multiplied_with_a_warning() -> None:
    assert [len(messages) for messages in run_ranks(1, flat_data_alone)[0]] == [1, 1]


class DifferentiatesItself(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda z: self.linear(z).square().sum())(x) + self.linear(x)


def differentiated_inside() -> list[str]:
    said = []
    for recompute in ("off", "whole", "selective"):
        model = bmt.BMTrainModelWrapper(DifferentiatesItself())
        block = bmt.Block(model, policy=bmt.BlockPolicy(recompute=recompute))
        try:
            block(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            said.append("; ".join(getattr(error, "__notes__", ["use_checkpoint=False"])))
    return said


def test_derivatives_of_torch_func_in_a_forward_name_the_setting_that_they_need() -> None:
    for said in run_ranks(2, differentiated_inside):
        assert len(said) == 2 and all("use_checkpoint=False" in text for text in said)


def replicated() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ModuleList([torch.nn.Linear(4, 4)]))
    model = bmt.BMTrainModelWrapper(model)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), model[1][0])
    for part in (model, model[1][0], plain, torch.nn.ModuleList([model[0]])):
        with pytest.raises(RuntimeError, match="leave it out"):
            torch.nn.parallel.DistributedDataParallel(part)
    holder = Holder()
    with pytest.raises(RuntimeError, match="DistributedParameter of a Holder.*leave it out"):
        torch.nn.parallel.DistributedDataParallel(holder)(torch.ones(4))
    around = torch.nn.Linear(4, 4)
    around.register_forward_pre_hook(lambda _, args: holder(*args))  # a model that is not replicated
    around(torch.ones(4)).sum().backward()
    torch.nn.parallel.DistributedDataParallel(around)(torch.ones(4)).sum().backward()


def test_data_parallel_around_shards_is_refused() -> None:
    run_ranks(2, replicated, fresh=True)


def averaged_by_hand() -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ModuleList([torch.nn.Linear(4, 4)]))
    model = bmt.BMTrainModelWrapper(model)
    model[1][0](model[0](torch.ones(2, 4))).sum().backward()
    for name, param in model.named_parameters():
        whole = param.gather_grad()
        for x in (param, param.data, param.detach(), param.grad, param.grad.data):
            for call in (
                dist.all_reduce,
                lambda x: dist.broadcast(x, 0),
                lambda x: dist.reduce(x, 0),
                bmt.distributed.all_reduce,
                lambda x: bmt.distributed.broadcast(x, 0),
            ):
                if bmt.world_size() == 1:
                    call(x)
                    continue
                with pytest.raises(RuntimeError, match=rf"shard of {name}.*Leave it out"):
                    call(x)
        assert torch.equal(param.gather_grad(), whole)
    for x in (torch.ones(3), torch.ones(()), whole, param.gather().detach()):
        dist.all_reduce(x)
        bmt.distributed.all_reduce(x)
    dist.all_reduce(param.grad, group=dist.new_group([0]))  # the script knows which ranks have the same parts


@pytest.mark.parametrize("world", [1, 2])
def test_shards_are_not_summed_with_others(world: int) -> None:
    run_ranks(world, averaged_by_hand, fresh=True)


def sharded_twice() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))
    for part in (model, torch.nn.Sequential(torch.nn.Linear(4, 4), bmt.Block(model))):
        with pytest.raises(RuntimeError, match="use one or the other"):
            fully_shard(part)


def test_shards_are_not_sharded_again() -> None:
    run_ranks(2, sharded_twice, fresh=True)


class Multiplies(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def traced() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    plain, model = twins(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    x = torch.ones(3, 4)
    for part in (
        model,
        bmt.Block(copy.deepcopy(model)),
        torch.nn.Sequential(bmt.Block(copy.deepcopy(model))),
    ):
        for trace in (
            partial(torch.jit.trace, check_trace=False),
            torch.export.export,
            lambda model, _: torch.jit.script(model),
            lambda model, inputs: make_fx(model)(*inputs),
            lambda model, inputs: make_fx(model, tracing_mode="symbolic")(*inputs),
            *([lambda model, _: torch.fx.symbolic_trace(model)] if type(part) is torch.nn.Sequential else []),
        ):
            with pytest.raises(
                RuntimeError, match=r"trace of torch.jit, torch.fx or torch.export.*model.state_dict\(\)"
            ):
                trace(part, (x,))
        assert torch.equal(part(x), plain(x))
    wrapped = bmt.BMTrainModelWrapper(
        copy.deepcopy(plain)
    )  # of modules of torch, which are called as they are
    assert torch.equal(torch.fx.symbolic_trace(wrapped)(x), plain(x))
    with pytest.raises(RuntimeError, match="torch.fx or torch.export"):  # it would keep the present weight
        torch.fx.symbolic_trace(bmt.BMTrainModelWrapper(Multiplies()))


def test_gathering_needs_no_private_flag_of_torch_fx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a later torch may lack."""
    monkeypatch.delattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag")
    require_gathering("a Block")


def test_traces_of_torch_name_the_model_that_they_need() -> None:
    run_ranks(1, traced)


def transformed() -> None:
    plain, x = torch.nn.Linear(4, 2), torch.ones(3, 4)
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    block = bmt.Block(copy.deepcopy(model))

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    shards = dict(model.named_parameters())
    full = {name: value.detach() for name, value in plain.named_parameters()}
    assert torch.equal(loss(shards), loss(full))
    assert torch.equal(torch.func.grad(loss)(full)["weight"], x.sum(0).expand(2, 4))
    with pytest.raises(ValueError, match=r"full tensor of shape \(2, 4\).*weight"):
        torch.func.grad(loss)(shards)
    with pytest.raises(ValueError, match="state_dict"):
        loss({name: value.detach() for name, value in shards.items()})
    for part in (model, block):
        for call in (torch.func.grad(lambda x, part=part: part(x).sum()), torch.vmap(part)):
            with pytest.raises(RuntimeError, match=r"transform of torch.func"):
                call(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"a tangent \(of dual_level\(\)\)"):
            block(dual)
        assert torch.equal(block(x), plain(x))
        with torch.no_grad():
            pairs = [torch.autograd.forward_ad.unpack_dual(part(dual)) for part in (plain, model, block)]
        assert all(torch.equal(pair.tangent, pairs[0].tangent) for pair in pairs)


def test_functional_calls_take_full_tensors_and_no_shards() -> None:
    for world in (1, 2):
        run_ranks(world, transformed)


def states_mixed_up() -> None:
    for kind in OPTIMIZERS[1:]:
        optimizer, manager = kind([torch.nn.Parameter(torch.ones(2))]), bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        with pytest.raises(ValueError, match="OptimManager.load_state_dict"):
            optimizer.load_state_dict(manager.state_dict())
        with pytest.raises(ValueError, match="of the optimizer"):
            manager.load_state_dict(optimizer.state_dict())
        with pytest.raises(ValueError, match="param_groups"):
            optimizer.load_state_dict({"state": {}})
        with pytest.raises(TypeError, match="dict"):
            optimizer.load_state_dict(None)


def test_the_state_of_a_manager_is_not_taken_for_that_of_an_optimizer() -> None:
    run_ranks(1, states_mixed_up)


def stepped_unsent() -> list[str]:
    deprecate._seen.discard("OptimManager.unsent_gradients")
    model = torch.nn.Sequential(
        bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))),
        bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4)),
    )
    other = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))
    managers = []
    for part in (*model, other):
        managers.append(bmt.optim.OptimManager())
        managers[-1].add_optimizer(torch.optim.SGD(part.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with bmt.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        managers[2].step()  # has sent all it has
        assert not caught
        for manager in (managers[0], managers[1], managers[0]):
            manager.step()
        deprecate._seen.discard("OptimManager.unsent_gradients")
        managers[1].step()
    assert all(w.filename == __file__ for w in caught)
    for manager in managers:
        manager.zero_grad()
    return [str(w.message) for w in caught]


def write_all(model: torch.nn.Module, way: str, stored: dict[str, torch.Tensor], path: str) -> None:
    """Gives all ranks the same weights."""
    if way == "load":
        if bmt.rank() == 0:
            torch.save(stored, path)
        bmt.load(model, path)
    elif way == "weights.load":
        bmt.weights.save(model, path)
        bmt.weights.load(model, path)
    elif way == "checkpoint.load":
        bmt.distributed.checkpoint.save(path, 1, model)
        bmt.distributed.checkpoint.load(path, model)
    elif way == "init_parameters":
        for param in model.parameters():
            param._init_method = torch.nn.init.uniform_
        bmt.init_parameters(model)
    elif way == "normal_":
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
    else:
        for name, param in model.named_parameters():
            part = stored[name].flatten()[param._start_partition : param._end_partition]
            if way == "shards":
                with torch.no_grad():
                    param.copy_(part)
            elif way == "data of shards":
                param.data.copy_(part)
            elif way == "p.load":
                param.load(stored[name])
            else:
                with bmt.whole(model, write=True):
                    param.copy_(stored[name])


#: What ranks write to a parameter before the first step, of which they have a part.
WRITES_OF_OWNERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "first elements": lambda p, part: p.data[:4].zero_() if p._start_partition == 0 else None,
    "non-empty parts": lambda p, part: p.copy_(part) if part.numel() else None,
    "data of one": lambda p, part: p.data.copy_(part) if p.full_shape == (8, 8) else None,
    "one": lambda p, part: p.copy_(part) if p.full_shape == (8, 8) else None,
}


def weights_of_owners(way: str, in_block: bool, seeds: int) -> list[str]:
    """Warnings of a run in which ranks write what they own, of equal weights or of as many different ones."""
    torch.manual_seed(bmt.rank() % seeds)
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))
    model = bmt.Block(model) if in_block else model
    with torch.no_grad():
        for p in model.parameters():
            stored = torch.arange(1.0, 1 + p.full_shape.numel())
            if way in WRITES_OF_OWNERS:
                WRITES_OF_OWNERS[way](p, stored[p._start_partition : p._end_partition])
    manager = bmt.optim.OptimManager(step_in_backward=way == "step_in_backward")
    manager.add_optimizer(bmt.optim.SGDOptimizer(model.parameters(), lr=1e-3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            manager.zero_grad()
            manager.backward(model(torch.full((2, 8), bmt.rank() + 1.0)).square().mean())
            manager.step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize(
    ("way", "seeds", "is_told"),
    [
        ("first elements", 1, False),
        ("non-empty parts", 3, False),
        ("data of one", 1, False),
        ("data of one", 3, True),  # the others are mixed
        ("one", 3, True),
        ("step_in_backward", 1, False),
        ("step_in_backward", 3, True),
    ],
)
def test_what_owners_write_is_no_difference_and_hides_none(
    way: str, seeds: int, is_told: bool, in_block: bool
) -> None:
    told, *others = run_ranks(3, weights_of_owners, way, in_block, seeds, fresh=True)
    assert [len(told), others] == [is_told, [[], []]] and all("checksums" in each for each in told)


def weights_of_some_ranks(where: str, path: str = "") -> list[str]:
    """Warnings of a run in which rank 0 alone loads weights, as for DistributedDataParallel, which broadcasts."""
    torch.manual_seed(bmt.rank() if path else 0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    stored = {name: value + 1 for name, value in model.state_dict().items()}
    if where == "before" and bmt.rank() == 0:
        model.load_state_dict(stored)
    model = bmt.BMTrainModelWrapper(model)
    if path:
        write_all(model, where, stored, path)
    if where == "initialised":
        bmt.init_parameters(model)
    if where == "everywhere" or (where in ("after", "initialised") and bmt.rank() == 0):
        model.load_state_dict(stored)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            manager.zero_grad()
            manager.backward(model(torch.full((2, 8), bmt.rank() + 1.0)).square().mean())
            manager.step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("where", ["before", "after", "initialised", "everywhere"])
def test_weights_that_one_rank_alone_loads_are_told_once(where: str) -> None:
    told, other = run_ranks(2, weights_of_some_ranks, where, fresh=True)
    assert [each for each in told if "rank 0 broadcasts none" in each] == told and other == []
    assert len(told) == (where != "everywhere")


@pytest.mark.parametrize(
    "way",
    [
        *("load", "weights.load", "checkpoint.load", "init_parameters", "normal_", "p.load", "whole"),
        *("shards", "data of shards"),
    ],
)
def test_weights_of_all_ranks_that_follow_others_are_not_told(way: str, tmp_path: Path) -> None:
    assert run_ranks(2, weights_of_some_ranks, way, str(tmp_path / "weights"), fresh=True) == [[], []]


class LargestAllocation(TorchDispatchMode):
    """The number of elements of the largest result that is no view."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func._schema.returns[0].alias_info:
            self.elements = max(self.elements, out.numel())
        return out


def test_weights_are_compared_without_a_copy_and_without_values_of_fakes() -> None:
    plain, other = torch.arange(5000.0).view(50, 100), torch.arange(5000.0).view(100, 50)
    given = [plain, plain.t().contiguous().t(), other.t(), other.t().contiguous(), plain[:1].expand(50, 100)]
    with FakeTensorMode():
        given.append(torch.ones(3))
    found = []
    for whole in given:
        param = SimpleNamespace(_given=1)
        with LargestAllocation() as largest:
            note_given(param, whole)
        assert largest.elements < 200
        found.append(param._given)
    assert found[0] == found[1] and found[2] == found[3] and found[5] == 0
    assert len(set(found)) == 4


def differing_ranks(kinds: str) -> list[str]:
    """Warnings of a run of which ranks have several differences, each from another step on."""
    torch.manual_seed(bmt.rank())
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 33):
            manager.zero_grad()
            manager.backward(model(torch.full((2, 8), bmt.rank() + 1.0)).square().mean())
            if bmt.rank() and "lr" in kinds and step > 4:
                optimizer.param_groups[0]["lr"] = 1e-3 / step
            if bmt.rank() and "gradient" in kinds and step > 8:
                optimizer.param_groups[0]["params"][1].grad = None
            manager.step()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


OF_KINDS = {"lr": "lr of group 0.*all_reduce", "gradient": r"number of gradients.* None .*requires_grad"}


@pytest.mark.parametrize("kinds", ["", "lr", "gradient", "lr gradient"])
def test_each_kind_of_difference_between_ranks_is_told_once(kinds: str) -> None:
    told, other = run_ranks(2, differing_ranks, kinds, fresh=True)
    expected = ["weights given.*broadcasts none", *(OF_KINDS[kind] for kind in kinds.split())]
    assert len(told) == len(expected) and other == []
    assert all(re.search(*pair) for pair in zip(expected, told, strict=True))


def experts_of_one_rank() -> tuple[list[str], bool]:
    """Warnings where one rank's experts get no tokens; and whether the others' are trained."""
    experts = bmt.BMTrainModelWrapper(HitExperts(torch.ones(2, 4, 4)))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(experts.parameters(), lr=1e-3))
    (weight,) = experts.parameters()
    assert weight._ep_mode
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            manager.zero_grad()
            x = torch.full((3, 4), bmt.rank() + 1.0)
            manager.backward(
                experts(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)).square().mean()
            )
            manager.step()
    return [str(warning.message) for warning in caught], bool((weight != 1).all())


def test_experts_without_tokens_are_no_difference_between_ranks() -> None:
    found = run_ranks(2, experts_of_one_rank, fresh=True, init={"ep_size": 2})
    assert found == [([], True), ([], False)]


def test_a_step_without_the_gradients_of_no_sync_is_told_once() -> None:
    told, others = run_ranks(2, stepped_unsent)
    assert len(told) == 2 and all("no_sync()" in message for message in told)
    assert not others


def in_a_child(call: Callable[[], object]) -> str:
    """What a forked child says about a call."""
    mine, childs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            told = "it returned"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(childs, told.encode())
        os._exit(0)
    os.close(childs)
    with os.fdopen(mine) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


def forked() -> None:
    block = bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4)))
    outside = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))
    x, comm = torch.ones(4), bmt.config["comm"]
    calls = [
        lambda: block(x),
        lambda: outside(x),
        block.state_dict,
        bmt.synchronize,
        lambda: bmt.sum_loss(x),
        lambda: bmt.nccl.allReduce(x, x, "sum", comm),
    ]
    for call in calls:
        told = in_a_child(call)
        if bmt.world_size() == 1:
            assert told == "it returned"
        else:
            assert told.startswith("RuntimeError") and f"forked from rank {bmt.rank()}" in told, told
    assert in_a_child(lambda: (bmt.rank(), bmt.world_size(), bmt.config["device"])) == "it returned"
    block(x).sum().backward()


def test_a_forked_process_is_no_rank() -> None:
    for world in (1, 2):
        run_ranks(world, forked, fresh=True)


def lost_peer() -> None:
    block = bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4)))
    block(torch.ones(2, 4))
    if bmt.rank() == 1:
        os._exit(1)
    with pytest.raises(CommunicationError, match="rank 1") as error:
        block(torch.ones(2, 4))
    assert error.value.__context__ is None  # one traceback, not another of what was cleaned up


def test_a_block_whose_peer_is_lost_raises_one_error() -> None:
    survivor, _ = rank_outcomes(2, lost_peer, fresh=True, timeout=60)
    assert survivor.status is Status.RETURNED, survivor


def routed_apart() -> None:
    """A mixture of experts whose ranks call different ones, of the same size."""
    experts = bmt.BMTrainModelWrapper(torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)]))
    with pytest.raises(CommunicationError, match=r"DistributedLinear#\d"):
        experts[bmt.rank()](torch.ones(2, 4))


def test_ranks_that_call_different_blocks_do_not_compute_in_silence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_ranks(2, routed_apart, fresh=True)
    assert "Experts" in capfd.readouterr().out


class Choice(bmt.DistributedModule):
    """Small parameters outside Blocks, which are gathered together; each rank trains another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (bmt.DistributedParameter(torch.ones(6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.first if bmt.rank() == 0 else self.second)


def train_apart() -> None:
    with pytest.raises(CommunicationError, match='parameters [01]"'):
        Choice()(torch.ones(6)).sum().backward()


def test_ranks_that_train_different_parameters_do_not_sum_in_silence() -> None:
    run_ranks(2, train_apart, fresh=True)


class GivesAll(torch.autograd.Function):
    """Gets parameters as reversible layers and solvers with adjoints do, whose gradients it finds itself."""

    @staticmethod
    def forward(ctx, loss, *parameters):
        ctx.parameters = parameters
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *map(torch.zeros_like, ctx.parameters)


def trained(mistake: str, scale: float | None = None, steps: int = 5) -> list[str]:
    """What a training with a mistake says."""
    keys = (
        "clip_grad_norm.nothing",
        "OptimManager.same_samples",
        "OptimManager.not_finite",
        "OptimManager.not_scaled",
        "shards_in_loss",
    )
    deprecate._seen.difference_update(keys)
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    manager = bmt.optim.OptimManager(loss_scale=scale)
    manager.add_optimizer(optimizer)
    own = 0 if mistake == "same samples" else bmt.rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            manager.zero_grad()
            x = torch.full((2, 4), float(1 + step + own))
            if mistake == "nan" or (mistake == "one nan" and step in (1, 2, 4)):
                x = x / 0
            loss = model(x).square().mean()
            if "penalty" in mistake:
                values = [p if mistake == "penalty" else p.gather() for p in model.parameters()]
                loss = loss + 1e-3 * sum(value.square().sum() for value in values)
            if mistake == "function of shards":
                loss = GivesAll.apply(loss, *model.parameters())
            if mistake == "constant once" and step == 1:
                loss = loss * 0
            if mistake == "bare backward":
                loss.backward()
            elif mistake == "bare backward of a scaled loss":
                manager.scale_loss(loss).backward()
            else:
                manager.backward(loss)
            if mistake == "one nan":
                manager.zero_grad()
            if mistake == "spent generator":
                parameters = model.parameters()
                torch.optim.SGD(parameters)
                assert manager.clip_grad_norm(parameters, 1e-3) == 0
            if mistake == "norm":
                next(model.parameters()).grad.fill_(torch.inf)
                manager.clip_grad_norm(optimizer.param_groups, 1.0)
            manager.step()
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("mistake", "options", "said"),
    [
        ("", {}, ""),
        ("constant once", {}, ""),
        ("penalty", {}, r"parameter \d+ of shape \(\d+,.*itself.*p\.gather\(\)"),
        ("whole penalty", {}, ""),
        ("function of shards", {}, ""),
        ("one nan", {}, ""),
        (
            "same samples",
            {},
            r"all 2 ranks were equal bit for bit.*bmtrain\.data\.loader.*by bmtrain\.world_size",
        ),
        ("spent generator", {}, r"got none.*read only once: pass optimizer\.param_groups"),
        ("nan", {}, r"the loss was inf or NaN in 3 steps in a row.*loss_scale"),
        ("norm", {}, r"the gradient norm was inf or NaN in 3 steps in a row"),
        ("nan", {"scale": 4.0}, ""),
        ("bare backward", {"scale": 4.0}, r"divided by the loss scale, but.*manager\.backward\(loss\)"),
        ("bare backward", {}, ""),
        ("bare backward of a scaled loss", {"scale": 4.0}, ""),
    ],
)
def test_a_loss_that_shows_a_mistake_is_told_once(mistake: str, options: dict[str, float], said: str) -> None:
    first, second = run_ranks(2, trained, mistake, **options)
    assert not second
    assert len(first) == bool(said)
    if said:
        assert re.search(said, first[0])


def test_ranks_that_compute_one_loss_may_have_the_same() -> None:
    assert run_ranks(2, trained, "same samples", init={"tp_size": 2}) == [[], []]


def penalised(kind: str) -> list[str]:
    """What a bare backward of a loss with a penalty says, whose gradients are those of plain torch."""
    deprecate._seen.discard("shards_in_loss")
    size = bmt.world_size()
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
    torch.nn.init.ones_(plain[1].bias)
    frozen = kind in ("unfrozen", "set to be trained")
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain).requires_grad_(not frozen))
    model[1] = bmt.Block(model[1], policy=bmt.BlockPolicy(level=0 if kind == "level 0" else 3))
    if kind == "unfrozen":
        model.requires_grad_()
    for param in model.parameters():
        param.requires_grad = True
        assert param.requires_grad and not param.detach().requires_grad
    data = torch.randn(4 * size, 4)
    part = slice(int(kind in ("block", "level 0")), 1 if kind == "outside" else 2)
    (plain(data).square().mean() + 0.1 * sum(p.square().sum() for p in plain[part].parameters())).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            loss = model(data.chunk(size)[bmt.rank()]).square().mean()
            if kind == "whole":
                ((loss + 0.1 * sum(p.gather().square().sum() for p in model.parameters())) / size).backward()
            else:
                (loss / size + 0.1 * sum(p.square().sum() for p in model[part].parameters())).backward()
    for want, param in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param.gather_grad(), want.grad)
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("world", "kind", "number"),
    [
        (1, "all", 0),
        *((2, kind, 1) for kind in ("all", "outside", "block", "level 0", "unfrozen", "set to be trained")),
        (3, "whole", 0),
    ],
)
def test_a_penalty_over_shards_with_a_bare_backward_is_told_once(world: int, kind: str, number: int) -> None:
    said, *others = run_ranks(world, penalised, kind)
    assert not any(others)
    assert len(said) == number
    assert all(re.search(r"uses .* itself.*p\.gather\(\).*loss / 2 \+ penalty", text) for text in said)


def gradients_of_inputs() -> None:
    """Trains one of two models, as scripts with two optimizers do."""
    model = bmt.BMTrainModelWrapper(torch.nn.ModuleList([torch.nn.Linear(4, 4)]))
    plain = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    for inputs in (
        list(model.parameters()),
        model.parameters(),
        next(model.parameters()),
        [x, *model.parameters()],
        dict(model.named_parameters()),
    ):
        with pytest.raises(
            RuntimeError, match=r"got parameter \d+ of shape \(4, 4\) of a Block.*requires_grad_"
        ):
            model[0](x).sum().backward(inputs=inputs)
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad\(\) .* of a Block"):
        torch.autograd.grad(model[0](x).sum(), [x, *model.parameters()], allow_unused=True)
    shard = next(model.parameters())
    assert torch.equal(
        torch.autograd.grad(shard.square().sum(), shard)[0], 2 * shard
    )  # without a Block's forward
    model[0].adapter = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))
    plainly, model[0]._module.forward = model[0]._module.forward, lambda x: plainly(model[0].adapter(x))
    adapter = model[0].adapter._parameters["weight"]
    with pytest.raises(RuntimeError, match="of a Block"):
        model[0](x).sum().backward(inputs=[adapter])
    model[0](x).sum().backward()
    assert adapter.grad is not None
    for given in (x, [x], [x, plain.weight]):
        plain.weight.grad = x.grad = None
        plain(x).sum().backward(inputs=given)
        assert x.grad is not None
        assert (plain.weight.grad is not None) == (len(given) == 2 and given is not x)
    plain.weight.grad = None
    torch.autograd.backward(plain(x).sum(), None, None, False, None, [plain.weight])
    assert plain.weight.grad is not None


def test_gradients_of_inputs_in_blocks_are_refused() -> None:
    run_ranks(1, gradients_of_inputs)


class GradientNorm(torch.nn.Module):
    """The norm of a network's gradient, taken where the Block that holds the network runs."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)[0].square().sum()


def gradient_norms() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    plain, x = GradientNorm(copy.deepcopy(inner)), torch.ones(2, 4)
    outside = GradientNorm(bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(inner)), use_checkpoint=False))
    with pytest.raises(
        RuntimeError, match="create_graph, grad.. in the forward of a use_checkpoint=False Block"
    ):
        outside(x)
    inside = bmt.Block(bmt.BMTrainModelWrapper(GradientNorm(inner)), use_checkpoint=False)
    for model in (plain, inside):
        model(x).backward()
    for p, q in zip(plain.parameters(), inside.parameters(), strict=True):
        full = torch.zeros_like(p) if p.grad is None else p.grad * bmt.world_size()
        torch.testing.assert_close(q.gather_grad(), full)


def test_a_gradient_penalty_inside_a_block_is_that_of_torch() -> None:
    run_ranks(2, gradient_norms)
