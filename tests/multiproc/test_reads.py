"""Parameters outside blocks within one forward: how many messages they take, and that the values and gradients are
those of plain torch whatever the forward does."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain._base import deprecate
from bmtrain._engine.engine import current_engine
from bmtrain._engine.outside import SMALL_BYTES
from bmtrain.global_var import context

DIM = 6


def whole(value: torch.Tensor) -> bmt.DistributedParameter:
    """A parameter that remembers its value: to gather hundreds takes long where ranks share a core."""
    param = bmt.DistributedParameter(value)
    param.at_first = value
    return param


class Linear(bmt.DistributedModule):
    def __init__(self, dim_out: int = DIM, dim_in: int = DIM) -> None:
        super().__init__()
        self.weight = whole(torch.randn(dim_out, dim_in) / dim_in**0.5)
        self.bias = whole(torch.randn(dim_out))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Chain(bmt.DistributedModule):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.links = torch.nn.ModuleList([Linear() for _ in range(length)])

    def forward(self, x, skipped=()):
        for index, link in enumerate(self.links):
            if index not in skipped:
                x = torch.tanh(link(x))
        return x


def messages_of(step) -> dict[str, tuple[int, int]]:
    group = context().world
    group.comm.reset_traffic()
    group.reduce_comm.reset_traffic()
    step()
    return {**dict(group.comm.traffic()), **dict(group.reduce_comm.traffic())}


def plain_gradients(model, forward) -> list[torch.Tensor | None]:
    """The gradients, summed over ranks, that ``forward`` gives the parameters as ordinary full tensors."""
    values = {name: p.at_first.clone().requires_grad_() for name, p in model.named_parameters()}
    forward(values).backward()
    world = bmt.world_size()
    return [None if v.grad is None else v.grad * world for v in values.values()]


def check_gradients(model, expected) -> None:
    for (name, param), wanted in zip(model.named_parameters(), expected, strict=True):
        if wanted is None:
            assert param.grad is None, name
        else:
            part = wanted.flatten()[param._start_partition : param._end_partition]
            torch.testing.assert_close(param.grad, part, msg=name)


def two_hundred() -> dict[str, tuple[int, int]]:
    model = Chain(100)
    x = torch.randn(3, DIM)
    traffic = messages_of(lambda: model(x).sum().backward())

    def plain(values):
        y = x
        for index in range(100):
            y = torch.tanh(
                torch.nn.functional.linear(y, values[f"links.{index}.weight"], values[f"links.{index}.bias"])
            )
        return y.sum()

    check_gradients(model, plain_gradients(model, plain))
    return traffic


@pytest.mark.parametrize("world", [2, 3])
def test_two_hundred_small_tensors_are_one_message_each_way(world):
    part = 100 * (-(-DIM * DIM // world) + -(-DIM // world))
    for traffic in run_ranks(world, two_hundred):
        assert traffic["all_gather"] == (1, 4 * (world - 1) * part)
        assert traffic["reduce_scatter"] == (1, 4 * (world - 1) * part)


class Tied(bmt.DistributedModule):
    """A large weight read as a table and as a projection, and a small one read by its parent as well."""

    def __init__(self) -> None:
        super().__init__()
        rows = SMALL_BYTES // (4 * DIM) + 1
        self.inner = Linear()
        self.table = whole(torch.randn(rows, DIM))
        self.reads = []

    def forward(self, ids):
        hidden = torch.nn.functional.embedding(ids, self.table)
        hidden = self.inner(hidden) + self.inner.bias
        self.reads = [self.table, self.table, self.inner.bias, self.inner.bias]
        return torch.nn.functional.linear(hidden, self.table).logsumexp(-1).sum()


def tied() -> list[tuple[int, int]]:
    model = Tied()
    calls = []
    for param in model.parameters():
        param.register_hook(lambda gradient: calls.append(tuple(gradient.shape)))
    ids = torch.tensor([1, 5, 5])
    model(ids)  # shows which large parameters are read again
    counts = []
    for _ in range(2):
        calls.clear()
        traffic = messages_of(lambda: model(ids).backward())
        counts.append((traffic["all_gather"][0], traffic["reduce_scatter"][0]))
        table, again, bias, bias_again = model.reads
        assert table is again and bias is bias_again
        assert sorted(calls) == sorted(tuple(p._original_shape) for p in model.parameters())
        model.reads = []
    model.zero_grad(set_to_none=True)
    model(ids).backward()

    def plain(values):
        hidden = torch.nn.functional.embedding(ids, values["table"])
        bias = values["inner.bias"]
        hidden = torch.nn.functional.linear(hidden, values["inner.weight"], bias) + bias
        return torch.nn.functional.linear(hidden, values["table"]).logsumexp(-1).sum()

    check_gradients(model, plain_gradients(model, plain))
    return counts


def test_a_parameter_read_again_is_the_same_tensor_reduced_once():
    # One message for weight and bias, one for the table.
    assert run_ranks(2, tied) == [[(2, 2)] * 2] * 2


class Adapted(bmt.DistributedModule):
    """A layer of a block into which low-rank weights are put later."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Linear()
        self.adapters = torch.nn.ModuleList()

    def forward(self, x):
        y = torch.tanh(self.base(x))
        for adapter in self.adapters:
            y = y + adapter(y)
        return y


def inserted(use_checkpoint: bool) -> tuple[int, int]:
    blocks = bmt.TransformerBlockList([bmt.Block(Adapted(), use_checkpoint=use_checkpoint) for _ in range(3)])
    for block in blocks:
        block.adapters.extend([Linear(), Linear()])
    x = torch.randn(2, DIM)
    for _ in range(2):
        blocks(x).sum().backward()
    traffic = messages_of(lambda: blocks(x).sum().backward())
    return traffic["all_gather"][0] - 5, traffic["reduce_scatter"][0]


@pytest.mark.parametrize(("use_checkpoint", "gathers"), [(True, 6), (False, 3)])
def test_what_is_inserted_into_a_block_is_one_message_in_each_of_its_runs(use_checkpoint, gathers):
    assert run_ranks(2, inserted, use_checkpoint) == [(gathers, 3)] * 2


def all_kinds_of_forwards() -> list[float]:
    model = Chain(4)
    shards = dict(model.named_parameters())
    shards["links.1.weight"].requires_grad_(False)
    x = torch.randn(3, DIM)
    results = []
    # Modules are skipped; the last one's gradient stays None where it was.
    loss = model(x, skipped=(1, 3)).sum()
    loss.backward()
    assert shards["links.3.weight"].grad is None and shards["links.1.bias"].grad is None
    results.append(loss.item())
    # Without gradients, in a forward that wants them, and the other way round.
    with torch.no_grad():
        results.append(model(x).sum().item())
    with torch.inference_mode():
        results.append(model(x).sum().item())
    model.links[2].forward = lambda y: no_grad_then_grad(model.links[2], y)
    loss = model(x).sum()
    loss.backward()
    results.append(loss.item())
    del model.links[2].forward
    # An error in the middle leaves no scope open.
    model.links[2].forward = fails
    with pytest.raises(ZeroDivisionError):
        model(x)
    del model.links[2].forward
    assert current_engine(context()).reads.innermost is None
    # A step changes what the next forward reads, also within one forward.
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    results.append(model(x).sum().item())
    model.links[3].forward = lambda y: grows(model.links[3], y)
    results.append(model(x).sum().item())
    return results


def no_grad_then_grad(link, y):
    with torch.no_grad():
        weight = link.weight
        assert not weight.requires_grad
    assert torch.equal(weight, link.weight) and link.weight.requires_grad
    return torch.nn.functional.linear(y, link.weight, link.bias)


def fails(y):
    return y / 0 if y is None else 1 // 0


def grows(link, y):
    before = link.bias
    with torch.no_grad():
        link._parameters["bias"].add_(1.0)
    torch.testing.assert_close(link.bias, before + 1.0)
    return torch.nn.functional.linear(y, link.weight, link.bias)


def test_skipped_modules_modes_errors_and_steps():
    single = run_ranks(1, all_kinds_of_forwards)[0]
    for several in run_ranks(2, all_kinds_of_forwards):
        # The gradients of two equal ranks are twice one rank's, so the step goes further; all before it is equal.
        assert several[:4] == pytest.approx(single[:4], rel=1e-6)


def mixed_kinds() -> tuple[int, int]:
    torch.manual_seed(0)
    model = Chain(3)
    model.half_scale = bmt.DistributedParameter(torch.ones(DIM, dtype=torch.bfloat16))
    model.table = bmt.DistributedParameter(torch.arange(DIM), requires_grad=False)
    x = torch.randn(3, DIM)

    class Outer(bmt.DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x):
            inner = self.model
            return (inner(x)[:, inner.table] * inner.half_scale.float()).sum()

    outer = Outer()
    traffic = messages_of(lambda: outer(x).backward())
    assert model._parameters["half_scale"].grad.dtype == torch.bfloat16
    return traffic["all_gather"][0], traffic["reduce_scatter"][0]


def test_each_dtype_travels_by_itself():
    assert run_ranks(2, mixed_kinds) == [(3, 2)] * 2


class Layer(bmt.DistributedModule):
    """A layer that is a Block, and whose parts are called by others too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(), Linear()
        self.scale = whole(torch.tensor([2.0]))

    def forward(self, x, other=None):
        return (self.second(self.first(x).tanh()) if other is None else other(x)) * self.scale

    def encode(self, x):
        return self.first(x) * self.scale


class Shares(bmt.DistributedModule):
    """Reads and calls what is in its Blocks while these do not run, and lets one Block use a part of another."""

    def __init__(self, make) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([make(Layer()) for _ in range(2)])

    def forward(self, x):
        x = x + self.layers[0].encode(x)
        x = self.layers[1](self.layers[0](x) + x / self.layers[0].scale, self.layers[0].second)
        x = self.layers[1](x, lambda hidden: hidden @ self.layers[0].first.weight)
        return torch.tanh(self.layers[1].first(x.tanh()) @ self.layers[0].second.weight.T)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("recompute", [True, False])
def test_what_is_in_a_block_may_be_read_and_called_by_itself(world, recompute):
    run_ranks(world, check_called_alone, recompute)


def check_called_alone(recompute: bool) -> None:
    models = []
    for make in (lambda layer: bmt.Block(layer, use_checkpoint=recompute), lambda layer: layer):
        torch.manual_seed(4)
        models.append(Shares(make))  # without Blocks each parameter is gathered where it is read
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(bmt.rank()))
    forwards = (
        lambda model: model(x),
        lambda model: getattr(model.layers[0], "_module", model.layers[0])(x),
        lambda model: model.layers[1].second(x) + model(x),
    )
    for forward in forwards:
        results = [forward(model) for model in models]
        torch.testing.assert_close(results[0], results[1])
        for result in results:
            result.square().sum().backward()
        for ours, reference in zip(*(model.parameters() for model in models), strict=True):
            if reference.grad is not None:
                torch.testing.assert_close(
                    full_gradient(ours), full_gradient(reference), rtol=1e-4, atol=1e-5
                )
    scale = models[0].layers[0].scale  # read by no forward: the shard
    assert scale is models[0].layers[0]._module._parameters["scale"]
    with torch.no_grad():
        torch.testing.assert_close(models[0](x), models[1](x))


class Recomputing(Shares):
    """Recomputes, by a function of torch, parts that read parameters of Blocks."""

    def __init__(self, make, reentrant: bool) -> None:
        super().__init__(make)
        self.reentrant = reentrant

    def part(self, x, layer):
        return torch.tanh(layer(x * layer.scale) + x @ layer.second.weight.T)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.part, x, layer, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_in_a_block_may_be_read_where_a_function_is_recomputed(world, reentrant):
    run_ranks(world, check_recomputed, reentrant)


def check_recomputed(reentrant: bool) -> None:
    gradients = []
    for make in (bmt.Block, lambda layer: layer):
        torch.manual_seed(4)
        model = Recomputing(make, reentrant)
        x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(bmt.rank())).requires_grad_()
        model(x).square().sum().backward()
        gradients.append([x.grad, *map(full_gradient, model.parameters())])
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference)


def written_between_reads() -> list[float]:
    layer: Any = bmt.Block(Layer())
    values = []

    class Writes(bmt.DistributedModule):
        def forward(self) -> None:
            for param in (None, *layer.parameters()):
                if param is not None:
                    param.data.mul_(2)
                values.append(layer.scale.item())

    Writes()()
    return values


@pytest.mark.parametrize("world", [1, 2])
def test_a_read_of_a_block_sees_what_was_written_to_its_shards(world: int) -> None:
    for values in run_ranks(world, written_between_reads):
        assert values[0] == 2.0 and values[-1] == 4.0


def full_gradient(param: bmt.DistributedParameter) -> torch.Tensor:
    """Put together from the ranks' shards, which Blocks cut otherwise."""
    shards = bmt.store.allgather_objects((param._start_partition, param.grad.detach()))
    return torch.cat([shard for _, shard in sorted(shards, key=lambda pair: pair[0]) if shard.numel()])


class Keeping(torch.nn.Linear):
    """Computes with the transposed weight, which its first forward, or every one, has read."""

    def __init__(self, keeps: bool) -> None:
        super().__init__(DIM, DIM)
        self.keeps = keeps
        self.kept = []

    def forward(self, x):
        self.kept = self.kept if self.keeps and self.kept else [self.weight.t()]
        return x @ self.kept[0] + self.bias


def kept_for_a_later_step(where: str) -> list[list[str]]:
    deprecate._seen.discard("gather.kept")
    model = bmt.BMTrainModelWrapper(Keeping(where == "forward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight
    said = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = model(torch.ones(2, DIM)).sum()
            if where == "script":
                loss = loss + weight.square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append([str(w.message) for w in caught if "earlier step" in str(w.message)])
    return said


class KeepsBias(torch.nn.Module):
    """Reads two small parameters, which are gathered together, and computes with an earlier copy of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = (torch.nn.Parameter(torch.ones(DIM)) for _ in range(2))

    def forward(self, x):
        return x * self.scale + self.bias


def kept_bias() -> list[str]:
    deprecate._seen.discard("gather.kept")
    model = bmt.BMTrainModelWrapper(KeepsBias())
    bias = dict(model.named_parameters())["bias"]
    kept = []
    model.register_forward_hook(lambda module, args, out: kept.append(module.bias))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, DIM)).sum().backward(retain_graph=True)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        kept[0].sum().backward()
    assert [str(w.message).count(f"read from {bias._label},") for w in caught] == [1] * (bmt.rank() == 0)
    assert torch.equal(bias.gather_grad(), torch.full((DIM,), 3.0 * bmt.world_size()))


def test_the_parameter_whose_earlier_copy_is_used_is_named() -> None:
    run_ranks(2, kept_bias)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("where", ["forward", "script", "nowhere"])
def test_a_tensor_that_is_kept_for_a_later_step_is_told_once(where, world):
    first, *others = run_ranks(world, kept_for_a_later_step, where)
    assert list(map(len, first)) == ([0, 0, 0] if where == "nowhere" else [0, 1, 0])
    assert all(said == [[], [], []] for said in others)


class Noting(torch.nn.Module):
    """Reads what was noted on its parameters, as Megatron's and Mamba's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.weight.factor, self.weight._no_reinit = 2.0, True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert getattr(self.weight, "_no_reinit", False) and not hasattr(self.weight, "other")
        return x * self.weight * self.weight.factor  # type: ignore[operator]


def noted() -> None:
    model: Any = bmt.BMTrainModelWrapper(Noting())
    assert model(torch.ones(3)).tolist() == bmt.Block(model)(torch.ones(3)).tolist() == [2.0] * 3
    model = bmt.BMTrainModelWrapper(Noting())
    param = dict(model.named_parameters())["weight"]
    param.later = "noted"
    read = model.weight
    read.sum().backward()
    own = set(vars(param)) - {"factor", "_no_reinit", "later"}
    assert (
        (read.factor, read.later) == (2.0, "noted") and own and not any(hasattr(read, name) for name in own)
    )
    assert not hasattr(copy.deepcopy(read.detach() * 1), "factor")
    model.weight.by_read = read.by_read = "noted"
    assert param.by_read == model.weight.by_read == "noted"
    del model, param
    read.by_read = "of the copy alone"
    assert read.by_read == "of the copy alone"


@pytest.mark.parametrize("world", [1, 2])
def test_a_gathered_copy_has_what_was_noted_on_its_parameter(world: int) -> None:
    run_ranks(world, noted)
