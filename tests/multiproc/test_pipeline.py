"""A pipeline of stages against the same layers in plain torch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from harness import RankError, rank_outcomes, run_ranks

import bmtrain as bmt
from bmtrain import _C
from bmtrain._base import deprecate
from bmtrain._engine.engine import current_engine
from bmtrain._engine.pipe_arguments import _compared
from bmtrain._model import storage
from bmtrain._shards.sharding import ShardSpec
from bmtrain.distributed import checkpoint
from bmtrain.global_var import context
from bmtrain.parameter import gather_flat

DIM, BATCH, LAYERS = 6, 4, 5


def layer_forward(self, x, mask, shared, flag=None):
    y = torch.tanh(x @ self.up.t() + shared) @ self.down.t()
    result = x + (y * mask if flag == "mask" else y)
    return result.transpose(0, -1).contiguous().transpose(0, -1)  # with other strides


class Layer(bmt.DistributedModule):
    """Uses a mask that goes with the batch, a bias that every row shares, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        normal = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.3)
        self.up = bmt.DistributedParameter(torch.empty(2 * DIM, DIM), init_method=normal)
        self.down = bmt.DistributedParameter(torch.empty(DIM, 2 * DIM), init_method=normal)

    forward = layer_forward


class PlainLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.empty(2 * DIM, DIM))
        self.down = torch.nn.Parameter(torch.empty(DIM, 2 * DIM))

    forward = layer_forward


def run_plain(layers, x, mask, shared):
    states = []
    for layer in layers:
        states.append(x)
        x = layer(x, mask, shared, flag="mask")
    return x, torch.stack(states)


def check(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


def stage_gradient(param) -> torch.Tensor:
    """The gradient of a parameter of this rank's stage, gathered over the stage."""
    spec = param._spec
    return (
        ShardSpec(spec.shape, spec.group, spec.layout, spec.index)
        .gather(param.grad, param._label)
        .view(spec.shape)
    )


def parity(return_hidden_states: bool, policy: dict[str, Any] | None = None) -> int:
    torch.manual_seed(1)
    chosen = bmt.BlockPolicy(**(policy or {}))
    pipeline = bmt.PipelineTransformerBlockList(
        [bmt.Block(Layer(), mode="PIPE", policy=chosen) for _ in range(LAYERS)]
    )
    bmt.init_parameters(pipeline)
    plain = torch.nn.ModuleList([PlainLayer() for _ in range(LAYERS)])
    plain.load_state_dict(pipeline.state_dict())
    torch.manual_seed(1)
    assert torch.equal(plain[0].up, torch.nn.init.normal_(torch.empty(2 * DIM, DIM), std=0.3))

    world, rank = bmt.world_size(), bmt.rank()
    x_all, mask_all, weights = (torch.randn(world, BATCH, 3, DIM) for _ in range(3))
    state_weights = torch.randn(world, LAYERS, BATCH, 3, DIM)
    shared = torch.randn(2 * DIM)

    def loss_of(out, states, r):
        loss = (out * weights[r]).sum()
        return loss + (states * state_weights[r]).sum() if return_hidden_states else loss

    expected_inputs = [t.clone().requires_grad_() for t in (x_all, mask_all, shared)]
    for r in range(world):
        loss_of(
            *run_plain(plain, expected_inputs[0][r], expected_inputs[1][r], expected_inputs[2]), r
        ).backward()

    inputs = [t.clone().requires_grad_() for t in (x_all[rank], mask_all[rank], shared)]
    result = pipeline(*inputs, flag="mask", return_hidden_states=return_hidden_states)
    out, states = result if return_hidden_states else (result, None)
    expected_out, expected_states = run_plain(plain, x_all[rank], mask_all[rank], shared)
    check(out, expected_out)
    if states is not None:
        check(states, expected_states)
    loss_of(out, states, rank).backward()

    check(inputs[0].grad, expected_inputs[0].grad[rank])
    check(inputs[1].grad, expected_inputs[1].grad[rank])
    total = inputs[2].grad.clone()
    context().world.comm.all_reduce(total, _C.ReduceOp.SUM).wait()
    check(total, expected_inputs[2].grad)
    for index, block in enumerate(pipeline):
        for param, reference in zip(block.parameters(), plain[index].parameters(), strict=True):
            if pipeline.get_stage_by_layer_id(index) == pipeline.stage_id:
                check(stage_gradient(param), reference.grad)
            else:
                assert param.numel() == 0
                assert param.grad is None
    return current_engine(context()).pool.stats()["buffers_in_use"]


@pytest.mark.parametrize("return_hidden_states", [False, True], ids=["output", "hidden-states"])
@pytest.mark.parametrize(
    ("world", "init"),
    [
        (1, {}),
        (1, {"pipe_size": 1}),
        (2, {"pipe_size": 1}),
        (2, {"pipe_size": 2}),
        (2, {"pipe_size": 2, "num_micro_batches": 8}),
        (2, {"pipe_size": 2, "num_micro_batches": 1}),
        (4, {"pipe_size": 2, "num_micro_batches": 4}),
        (4, {"pipe_size": 4}),
    ],
    ids=str,
)
def test_outputs_and_gradients_equal_those_of_plain_layers(world, init, return_hidden_states):
    assert run_ranks(world, parity, return_hidden_states, init=init) == [0] * world


def unlike_arguments() -> None:
    pipeline = bmt.PipelineTransformerBlockList([bmt.Block(Layer(), mode="PIPE") for _ in range(LAYERS)])
    bmt.init_parameters(pipeline)
    plain = torch.nn.ModuleList([PlainLayer() for _ in range(LAYERS)])
    plain.load_state_dict(pipeline.state_dict())
    torch.manual_seed(1)
    x = torch.randn(BATCH, 3, DIM)
    mask, shared = torch.rand(1, 3, DIM), torch.rand(2 * DIM)  # as many dimensions as x, and fewer
    own = mask + bmt.rank(), shared + bmt.rank()
    given = [tensor.clone() for tensor in own]
    check(pipeline(x, *given, flag="mask"), run_plain(plain, x, mask, shared)[0])
    assert all(torch.equal(tensor, before) for tensor, before in zip(given, own, strict=True))
    assert not x.requires_grad


def test_arguments_that_do_not_go_with_the_batch_are_the_first_stages_and_stay_as_they_are():
    run_ranks(2, unlike_arguments, init={"pipe_size": 2})


@pytest.mark.parametrize(
    ("world", "policy"),
    [
        (4, {"level": 0}),
        (4, {"level": 1, "recompute": "off"}),
        (4, {"level": 2, "recompute": "selective"}),
        (8, {"zero_size": 2}),
    ],
    ids=str,
)
def test_stages_of_other_policies(world, policy):
    for in_use in run_ranks(world, parity, False, policy, init={"pipe_size": 2}):
        assert (in_use > 0) == (policy.get("level") == 1)  # which keeps what it gathered


def use_outside() -> None:
    """Every rank uses the layers of all stages, each with a batch of its own: the gradients of all add."""
    torch.manual_seed(1)
    pipeline = bmt.PipelineTransformerBlockList([bmt.Block(Layer(), mode="PIPE") for _ in range(LAYERS)])
    bmt.init_parameters(pipeline)
    plain = torch.nn.ModuleList([PlainLayer() for _ in range(LAYERS)])
    plain.load_state_dict(pipeline.state_dict())
    x_all, shared = torch.randn(bmt.world_size(), BATCH, DIM), torch.zeros(2 * DIM)

    def loss_of(layers, x, value_of):
        return sum(layer(x, None, shared).sum() + value_of(layer.up).square().sum() for layer in layers)

    loss_of([block._module for block in pipeline], x_all[bmt.rank()], lambda param: param.gather()).backward()
    sum(loss_of(plain, x, lambda param: param) for x in x_all).backward()
    for index, block in enumerate(pipeline):
        if pipeline.get_stage_by_layer_id(index) == pipeline.stage_id:
            for param, reference in zip(block.parameters(), plain[index].parameters(), strict=True):
                check(stage_gradient(param), reference.grad)


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_of_parameters_gathered_on_all_stages_add(world):
    run_ranks(world, use_outside, init={"pipe_size": 2})


def blocks_after_the_pipeline(num_layers: int) -> None:
    torch.manual_seed(1)
    pipeline = bmt.PipelineTransformerBlockList([Layer() for _ in range(num_layers)])
    head = bmt.Block(bmt.nn.Linear(DIM, 3))
    bmt.init_parameters([pipeline, head])
    plain = torch.nn.ModuleList([PlainLayer() for _ in range(num_layers)])
    plain.load_state_dict(pipeline.state_dict())
    plain_head = torch.nn.Linear(DIM, 3)
    plain_head.load_state_dict(head.state_dict())
    x_all, shared = torch.randn(bmt.world_size(), BATCH, DIM), torch.zeros(2 * DIM)
    for _ in range(2):
        head(pipeline(x_all[bmt.rank()], None, shared)).square().sum().backward()
    for _ in range(2):
        sum(plain_head(run_plain(plain, x, 1, shared)[0]).square().sum() for x in x_all).backward()
    check(gather_flat(head.weight, head.weight.grad).view(3, DIM), plain_head.weight.grad)


@pytest.mark.parametrize("num_layers", [1, 3, 4])
def test_a_block_of_all_ranks_follows_stages_of_any_lengths(num_layers):
    run_ranks(2, blocks_after_the_pipeline, num_layers, init={"pipe_size": 2})


def late_adapter() -> None:
    pipeline = bmt.PipelineTransformerBlockList([Layer() for _ in range(3)])
    pipeline[1]._module.adapter = bmt.nn.Linear(DIM, DIM, bias=False)
    with pytest.raises(RuntimeError, match="parameter '1.adapter.weight' was put into a layer"):
        pipeline(torch.zeros(2, DIM), None, torch.zeros(2 * DIM))


def test_a_parameter_that_one_stage_alone_would_gather_is_refused():
    run_ranks(2, late_adapter, init={"pipe_size": 2})


def evaluation() -> None:
    pipeline = bmt.PipelineTransformerBlockList([Layer() for _ in range(LAYERS)])
    bmt.init_parameters(pipeline)
    plain = torch.nn.ModuleList([PlainLayer() for _ in range(LAYERS)])
    plain.load_state_dict(pipeline.state_dict())
    x, mask, shared = torch.randn(BATCH, DIM), torch.rand(BATCH, DIM), torch.randn(2 * DIM)
    with torch.no_grad():
        for _ in range(2):
            out = pipeline(x, mask, shared, flag="mask")
            check(out, run_plain(plain, x, mask, shared)[0])
    assert not out.requires_grad
    assert current_engine(context()).pool.stats()["buffers_in_use"] == 0


def test_evaluation_in_a_pipeline():
    run_ranks(2, evaluation, init={"pipe_size": 2})


def gradients_of_inputs() -> None:
    pipeline = bmt.PipelineTransformerBlockList([Layer() for _ in range(2)])
    bmt.init_parameters(pipeline)
    x = torch.randn(BATCH, DIM, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"through a pipeline.*use backward\(\)"):
        torch.autograd.grad(pipeline(x, x, torch.zeros(2 * DIM), flag="mask").sum(), x)
    assert all(p.grad is None for p in pipeline.parameters())
    pipeline(x, x, torch.zeros(2 * DIM), flag="mask").sum().backward()
    assert x.grad is not None
    leaf = torch.ones(DIM, requires_grad=True)
    for layer in pipeline:
        plainly = layer._module.forward
        layer._module.forward = lambda *args, plainly=plainly, **kwargs: plainly(*args, **kwargs) * leaf
    loss = (pipeline(x, x, torch.zeros(2 * DIM), flag="mask") * leaf).sum()  # inside and outside
    with pytest.raises(RuntimeError, match="other than as an argument"):
        torch.autograd.grad(loss, leaf)
    scale = torch.ones((), requires_grad=True)  # outside alone, after a loss that has run its backward
    loss = pipeline.loss(
        x, x, torch.zeros(2 * DIM), flag="mask", head=torch.nn.MSELoss(), labels=(torch.zeros_like(x),)
    )
    assert torch.equal(torch.autograd.grad(loss * scale, scale)[0], loss)


def test_gradients_of_inputs_alone_are_refused_in_a_pipeline():
    run_ranks(2, gradients_of_inputs, init={"pipe_size": 2})


class Refusing:
    """Raises when the first gradients have come."""

    def reduced(self, block: Any) -> None:
        raise ValueError("no update")


def another_call_after_an_error() -> None:
    pipeline = bmt.PipelineTransformerBlockList([Layer() for _ in range(6)])
    bmt.init_parameters(pipeline)
    x, listeners = torch.randn(BATCH, DIM), current_engine(context()).gradients.listeners

    def losses(number: int) -> list[torch.Tensor]:
        return [pipeline(x, x, torch.zeros(2 * DIM), flag="mask").sum() for _ in range(number)]

    def gradients() -> list[torch.Tensor]:
        return [p.grad.clone() for p in pipeline.parameters() if p.grad is not None]

    losses(1)[0].backward()
    expected = gradients()
    pipeline.zero_grad()
    failing, other = losses(2)
    listeners.add(refusing := Refusing())
    with pytest.raises(ValueError, match="no update"):
        failing.backward()
    listeners.discard(refusing)
    pipeline.zero_grad()
    other.backward()
    assert len(expected) == 6
    assert all(map(torch.equal, gradients(), expected))


def test_a_backward_follows_one_that_failed_while_gradients_were_sent():
    """The layers that had not sent theirs by then send none of them later."""
    run_ranks(2, another_call_after_an_error, init={"pipe_size": 2})


def life_of_a_call() -> None:
    pipeline = bmt.PipelineTransformerBlockList([Layer() for _ in range(2)])
    bmt.init_parameters(pipeline)
    inside = []
    for layer in pipeline:
        layer._module.register_forward_hook(lambda _, __, out: inside.append(weakref.ref(out)))
    x = torch.randn(BATCH, DIM, requires_grad=True)
    gc.disable()
    out = pipeline(x, x, torch.zeros(2 * DIM), flag="mask")
    assert len(inside) == 4
    for keeps in (True, True, False):
        out.sum().backward(retain_graph=keeps)
    with pytest.raises(RuntimeError, match="through the pipeline a second time"):
        out.sum().backward()
    thrice, x.grad = x.grad, None
    pipeline(x, x, torch.zeros(2 * DIM), flag="mask").sum().backward()
    check(thrice, 3 * x.grad)
    out = pipeline(x, x, torch.zeros(2 * DIM), flag="mask")
    del out
    assert len(inside) > 8
    assert not any(ref() is not None for ref in inside)


def test_a_call_is_freed_without_a_collector_and_runs_backward_while_it_is_retained():
    run_ranks(2, life_of_a_call, init={"pipe_size": 2, "num_micro_batches": 4})


def activations_of_an_evaluation() -> tuple[int, int]:
    """The most results of layers that were there at one time, and their number."""
    pipeline = bmt.PipelineTransformerBlockList([Layer() for _ in range(8)])
    bmt.init_parameters(pipeline)
    results: list[Any] = []
    alive = []

    def note(layer, args, out) -> None:
        results.append(weakref.ref(out))
        alive.append(sum(ref() is not None for ref in results))

    for layer in pipeline:
        layer.register_forward_hook(note)
    x = torch.randn(BATCH, DIM)
    with torch.no_grad():
        pipeline(x, x, torch.zeros(2 * DIM), flag="mask")
    return max(alive), len(results)


def test_an_evaluation_holds_the_activations_of_a_few_layers():
    for most, number in run_ranks(
        2, activations_of_an_evaluation, init={"pipe_size": 2, "num_micro_batches": 8}
    ):
        assert number == 32
        assert most <= 3  # the input and the result of a layer, and what is sent


def stage_traffic() -> dict:
    pipeline = bmt.PipelineTransformerBlockList([Layer() for _ in range(4)])
    bmt.init_parameters(pipeline)
    group = context().groups["pp_zero"]
    x = torch.randn(BATCH, DIM)
    for _ in range(2):
        group.comm.reset_traffic()
        group.reduce_comm.reset_traffic()
        pipeline(x, x, torch.zeros(2 * DIM)).sum().backward()
    return {**group.comm.traffic(), **group.reduce_comm.traffic()}


def test_blocks_of_a_stage_are_gathered_once_and_reduced_once_a_step():
    for traffic in run_ranks(4, stage_traffic, init={"pipe_size": 2, "num_micro_batches": 8}):
        assert traffic["all_gather"][0] == 2  # two layers a stage
        assert traffic["all_to_all"][0] == 2


def mistakes() -> None:
    with pytest.raises(NotImplementedError, match="num_hidden"):
        bmt.PipelineTransformerBlockList([Layer()], num_hidden=2)
    if not bmt.config["pipe_enabled"]:
        for error in (ValueError, AssertionError):
            with pytest.raises(error, match="PIPE"):
                bmt.PipelineTransformerBlockList([bmt.Block(Layer())])
        return
    with pytest.warns(DeprecationWarning, match="PIPE") if bmt.rank() == 0 else nullcontext():
        pipeline = bmt.PipelineTransformerBlockList([bmt.Block(Layer()), bmt.Block(Layer())])
    with pytest.raises(ValueError, match="micro-batches"):
        pipeline(torch.zeros(1, DIM), None, torch.zeros(2 * DIM))
    assert [pipeline.get_part_len_by_stage_id(s) for s in range(2)] == [1, 1]
    assert [pipeline.get_stage_by_layer_id(i) for i in range(2)] == [0, 1]
    assert pipeline.idle_share == pytest.approx(1 / 6)
    assert len(pipeline) == 2
    assert pipeline[-1] is pipeline["1"]


@pytest.mark.parametrize(
    ("world", "init"), [(1, {}), (2, {"pipe_size": 2, "num_micro_batches": 5})], ids=["off", "two-stages"]
)
def test_mistakes_are_named(world, init):
    run_ranks(world, mistakes, init=init)


def called_alone() -> list[str]:
    pipeline = bmt.PipelineTransformerBlockList([Layer() for _ in range(3)])
    bmt.init_parameters(pipeline)
    told = []
    for block in pipeline:
        try:
            block(torch.zeros(1, DIM), None, torch.zeros(2 * DIM))
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    pipeline(torch.zeros(5, DIM), None, torch.zeros(2 * DIM)).sum().backward()
    return told


def test_a_block_of_another_stage_is_not_called_alone() -> None:
    first, last = run_ranks(2, called_alone, init={"pipe_size": 2})
    assert first[:2] == ["", ""] and "runs on stage 1 of the pipeline" in first[2]
    assert last[2] == "" and all("runs on stage 0 of the pipeline" in told for told in last[:2])


def old_pickle() -> None:
    pipeline = bmt.PipelineTransformerBlockList([torch.nn.Tanh() for _ in range(3)])
    state = {
        name: value
        for name, value in pipeline.__getstate__().items()
        if name not in ("schedule", "chunks", "_actions", "_ends", "_memory")
    }
    loaded = bmt.PipelineTransformerBlockList.__new__(bmt.PipelineTransformerBlockList)
    loaded.__setstate__(state)
    assert loaded.get_range_by_stage_id(0) == range(3)
    assert loaded.idle_share == 0


def test_a_list_that_was_pickled_without_a_schedule():
    run_ranks(1, old_pickle)


def numbers_of_steps(kind: Any, folder: str) -> list[list[float]]:
    """After each of two saves, of which the second follows a load; as gathered, and as another model loads it."""
    found = []
    for number in (1, 2):
        layers = bmt.PipelineTransformerBlockList(
            [bmt.Block(bmt.nn.Linear(DIM, DIM), mode="PIPE") for _ in range(2)]
        )
        bmt.init_parameters(layers)
        optimizer = kind(layers.parameters(), lr=1e-3)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        if number > 1:
            checkpoint.load(folder, layers, manager)
        manager.backward(layers(torch.ones(BATCH, DIM)).sum())
        manager.step()
        checkpoint.save(folder, number, layers, manager)
        checkpoint.load(folder, layers, manager)
        state = manager.state_dict(gather_opt=True)["optimizers"][0]["state"]
        found.append([float(state[index]["step"]) for index in range(4)])
    return found


@pytest.mark.parametrize("kind", [bmt.optim.AdamOptimizer, torch.optim.Adam])
def test_steps_after_a_load_count_on_all_stages(kind, tmp_path):
    assert (
        run_ranks(2, numbers_of_steps, kind, str(tmp_path), init={"pipe_size": 2})
        == [[[1.0] * 4, [2.0] * 4]] * 2
    )


class Nested(bmt.DistributedModule):
    """A layer whose arguments are in containers: two of each row, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = bmt.nn.Linear(6, 6)

    def forward(self, x, pair, *, more):
        return x + torch.tanh(self.linear(x * pair[0])) * pair[1] + more["scale"] * more["rows"]


class NestedHead(bmt.DistributedModule):
    def forward(self, x, labels):
        return ((x - labels["wanted"]).square().mean(1) * labels["weights"]).mean()


def nested_arguments(has_loss_inside: bool) -> None:
    torch.manual_seed(4)
    layers = bmt.PipelineTransformerBlockList([bmt.Block(Nested(), mode="PIPE") for _ in range(2)])
    head = NestedHead()
    bmt.init_parameters(layers)
    full = [param.gather().detach().requires_grad_() for param in layers.parameters()]
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(8, 6, generator=generator) for _ in range(5)]
    weights, scale = torch.rand(8, generator=generator), torch.tensor(0.5)
    rows = slice(4 * bmt.rank(), 4 * bmt.rank() + 4)
    hidden, first, second, third, wanted = (value[rows].clone().requires_grad_() for value in whole)
    labels = {"wanted": wanted.detach(), "weights": weights[rows]}
    arguments = ((first, second),), {"more": {"rows": third, "scale": scale}}
    if has_loss_inside:
        loss = layers.loss(hidden, *arguments[0], head=head, labels=(labels,), **arguments[1])
    else:
        loss = head(layers(hidden, *arguments[0], **arguments[1]), labels)
    bmt.optim.OptimManager().backward(loss)

    x, one, two, three = (value.clone().requires_grad_() for value in whole[:4])
    out = x
    for weight, bias in zip(full[::2], full[1::2], strict=True):
        out = out + torch.tanh(torch.nn.functional.linear(out * one, weight, bias)) * two + scale * three
    ((out - whole[4]).square().mean(1) * weights).mean().backward()
    for param, reference in zip(layers.parameters(), full, strict=True):
        torch.testing.assert_close(param.gather_grad(), reference.grad)
    for own, reference in zip((hidden, first, second, third), (x, one, two, three), strict=True):
        torch.testing.assert_close(own.grad, reference.grad[rows])
    assert (arguments[0][0][0] is first) and arguments[1]["more"]["rows"] is third


@pytest.mark.parametrize("has_loss_inside", [False, True])
@pytest.mark.parametrize("num_micro_batches", [2, 4])
def test_tensors_in_containers_are_split_as_others(has_loss_inside, num_micro_batches):
    init = {"pipe_size": 2, "num_micro_batches": num_micro_batches}
    run_ranks(2, nested_arguments, has_loss_inside, init=init)


@dataclasses.dataclass(frozen=True)
class Pair:
    k: object
    b: object
    scale: float = 1.0


class Holder:
    """An object with a tensor, such as a key-value cache."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Paired(bmt.DistributedModule):
    """A layer with two tensors of each row, in one container or as two arguments."""

    def forward(self, x, *, pair=None, **named):
        named = named or (pair if isinstance(pair, dict) else vars(pair))
        return x * named["k"] + named["b"]


def other_orders(kind: str) -> None:
    """Each rank makes its container in another order."""
    layers = bmt.PipelineTransformerBlockList([bmt.Block(Paired(), mode="PIPE") for _ in range(2)])
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(8, 6, generator=generator) for _ in range(3)]
    rows = slice(4 * bmt.rank(), 4 * bmt.rank() + 4)
    hidden, k, b = (value[rows].clone().requires_grad_() for value in whole)
    parts = dict([("k", k), ("b", b)][:: 1 - 2 * bmt.rank()])
    if kind == "mixed keys":
        parts = dict([*parts.items(), (None, torch.ones(1)), (3, torch.ones(2))][:: 1 - 2 * bmt.rank()])
    made = {"keywords": lambda: parts, "dataclass": lambda: {"pair": Pair(**parts)}}
    arguments = made.get(kind, lambda: {"pair": parts})()
    out = layers(hidden, **arguments)
    bmt.optim.OptimManager().backward(out.square().mean())

    x, one, two = (value.clone().requires_grad_() for value in whole)
    wanted = (x * one + two) * one + two
    wanted.square().mean().backward()
    torch.testing.assert_close(out, wanted[rows])
    for own, reference in zip((hidden, k, b), (x, one, two), strict=True):
        torch.testing.assert_close(own.grad, reference.grad[rows])
    if kind == "dataclass":
        assert arguments["pair"].k is k


@pytest.mark.parametrize("kind", ["dict", "mixed keys", "keywords", "dataclass"])
def test_tensors_in_containers_belong_together_by_name(kind):
    run_ranks(2, other_orders, kind, init={"pipe_size": 2, "num_micro_batches": 2})


def held_tensors() -> None:
    layers = bmt.PipelineTransformerBlockList([bmt.Block(Paired(), mode="PIPE") for _ in range(2)])
    x = torch.ones(4, 6)
    pair = {"k": x, "b": x}
    told = "expected tensors in tuples, lists, dicts and dataclasses, got a Holder that holds tensors"
    with pytest.raises(TypeError, match=f"^pair: {told}"):
        layers(x, pair={**pair, "more": [Holder(x)]})
    with pytest.raises(TypeError, match=f"^args.0.: {told}"):
        layers(x, Holder(x), pair=pair)
    with pytest.raises(TypeError, match=f"^labels.1.: {told}"):
        layers.loss(x, pair=pair, head=NestedHead(), labels=(x, (Holder(x),)))
    layers(x, pair={**pair, "more": Holder(3.0), "module": bmt.nn.Linear(2, 2)})


def test_an_object_that_holds_tensors_is_refused():
    run_ranks(2, held_tensors, init={"pipe_size": 2, "num_micro_batches": 2})


CONVERSIONS = {
    "half": lambda m: m.half(),
    "to": lambda m: m.to(torch.bfloat16),
    "half and back": lambda m: m.half().float(),
}


def converted(conversion: str, places: dict[str, str], num_layers: int) -> None:
    """A pipeline of other numbers of layers on its stages, converted after it was built, trains and is stored."""
    torch.manual_seed(0)
    plain = [torch.nn.Linear(DIM, DIM) for _ in range(num_layers)]
    blocks = [
        bmt.Block(
            bmt.BMTrainModelWrapper(copy.deepcopy(layer)), mode="PIPE", policy=bmt.BlockPolicy(**places)
        )
        for layer in plain
    ]
    model = torch.nn.Sequential(*plain)
    layers = CONVERSIONS[conversion](bmt.PipelineTransformerBlockList(blocks))
    CONVERSIONS[conversion](model)
    x = torch.linspace(-1, 1, 2 * DIM, dtype=model[0].weight.dtype).view(2, DIM)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layers, model)]
    for _ in range(2):
        bmt.optim.OptimManager().backward(layers(x).float().square().sum())
        model(x).float().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, value), expected in zip(
        layers.state_dict().items(), model.cpu().state_dict().values(), strict=True
    ):
        assert value.dtype == expected.dtype
        torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2, msg=name)


ON_DISK = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("places", [{}, ON_DISK], ids=["in memory", "on disk"])
@pytest.mark.parametrize(("world", "num_layers"), [(2, 3), (4, 2)])
def test_a_pipeline_is_converted(tmp_path, world, num_layers, places, conversion):
    init = {"pipe_size": 2, **({"tier_directories": [str(tmp_path)]} if places else {})}
    run_ranks(world, converted, conversion, places, num_layers, init=init)


def conversion_fails(num_built: int) -> None:
    """Its first buffers are built; state dicts have the converted values all the same, on all stages."""
    plain = torch.nn.Linear(DIM, DIM)
    plain.bias.requires_grad_(False)  # in a buffer of its own
    blocks = [bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)), mode="PIPE") for _ in range(2)]
    layers = bmt.PipelineTransformerBlockList(blocks)
    remaining, host_lane_of = [None] * num_built, storage.host_lane_of

    def has_room(*args: Any) -> Any:
        if not remaining:
            raise OSError("no room")
        remaining.pop()
        return host_lane_of(*args)

    storage.host_lane_of = has_room
    try:
        for stage, block in enumerate(blocks):
            is_owner = stage == layers.stage_id
            with pytest.raises(OSError, match="no room") if is_owner else nullcontext():
                block.half()
    finally:
        storage.host_lane_of = host_lane_of
    plain.half()
    for name, value in layers.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name.rpartition(".")[2]]), name


@pytest.mark.parametrize("num_built", [0, 1])
def test_a_conversion_that_fails_leaves_layers_to_their_stages(num_built: int) -> None:
    run_ranks(4, conversion_fails, num_built, init={"pipe_size": 2}, timeout=30)


class Named(NamedTuple):
    hidden: torch.Tensor
    more: torch.Tensor


class Returning(bmt.DistributedModule):
    """A layer that returns its hidden state in some object."""

    def __init__(self, wrap: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x + 1)


HidingResults = {
    "dict": lambda x: {"hidden": x},
    "dataclass": lambda x: Pair(x, x),
    "NoneType": lambda x: None,
    "a tuple of NoneType": lambda x: (None, x),
    "a tuple of dict": lambda x: ({}, x),
    "tuple": lambda x: (),
}


def results_in_objects(kind: str, has_loss_inside: bool) -> None:
    layers = bmt.PipelineTransformerBlockList(
        [bmt.Block(Returning(HidingResults[kind]), mode="PIPE") for _ in range(2)]
    )
    x = torch.ones(2, DIM)
    if has_loss_inside:
        layers.loss(x, head=NestedHead(), labels=(x,))
    else:
        layers(x)


@pytest.mark.parametrize("has_loss_inside", [False, True])
@pytest.mark.parametrize("kind", HidingResults)
def test_a_layer_that_returns_no_hidden_state_is_named(kind, has_loss_inside):
    told = rf"Returning#\d+: expected its forward to return the hidden state.*, got {kind.replace('dataclass', 'Pair')}"
    with pytest.raises(RankError, match=told):
        init = {"pipe_size": 2, "num_micro_batches": 2}
        run_ranks(2, results_in_objects, kind, has_loss_inside, init=init, grace=0.1)


def results_in_tuples() -> None:
    kinds = (lambda x: x, lambda x: (x, {}), lambda x: [x, None], lambda x: Named(x, x))
    layers = bmt.PipelineTransformerBlockList([bmt.Block(Returning(kind), mode="PIPE") for kind in kinds])
    assert torch.equal(layers(torch.zeros(2, DIM)), torch.full((2, DIM), 4.0))


def test_a_hidden_state_may_begin_a_tuple():
    run_ranks(2, results_in_tuples, init={"pipe_size": 2, "num_micro_batches": 2})


class Masked(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = bmt.nn.Linear(DIM, DIM)

    def forward(self, x, mask=None, *, lengths=None):
        mask = lengths[:, None] > torch.arange(3) if mask is None else mask
        return x + torch.tanh(self.linear(x)) * mask[..., None]


def masks(given: str, is_equal: bool, batch_related: list[int | str]) -> tuple[bool, list[str]]:
    """Whether results are those of one process, and the warnings."""
    deprecate._seen.clear()
    _compared.clear()
    torch.manual_seed(3)
    layers = bmt.PipelineTransformerBlockList([bmt.Block(Masked(), mode="PIPE") for _ in range(2)])
    bmt.init_parameters(layers)
    x = torch.randn(4, 3, DIM)
    lengths = torch.arange(4) % 3 + (0 if is_equal else bmt.rank())
    mask = lengths[:, None] > torch.arange(3)
    args, kwargs = ((mask,), {}) if given == "mask" else ((), {"lengths": lengths})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out = layers(x, *args, **kwargs, batch_related=batch_related)
    expected = x
    for block in layers:
        full = block.linear.weight.gather(), block.linear.bias.gather()
        expected = expected + torch.tanh(torch.nn.functional.linear(expected, *full)) * mask[..., None]
    return torch.allclose(out, expected, atol=1e-6), [str(warning.message) for warning in caught]


def shared_values(values: list[float]) -> int:
    """Number of warnings of an argument that is equal on all ranks."""
    deprecate._seen.clear()
    _compared.clear()
    layers = bmt.PipelineTransformerBlockList([bmt.Block(Masked(), mode="PIPE") for _ in range(2)])
    bmt.init_parameters(layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layers(torch.zeros(4, 3, DIM), lengths=torch.tensor(values))
    return len(caught)


@pytest.mark.parametrize("values", [[math.nan, 1.0, 2.0, 3.0], [math.inf, -math.inf, 0.0, -0.0]])
def test_values_that_all_ranks_have_are_no_mistake(values):
    assert run_ranks(2, shared_values, values, init={"pipe_size": 2}) == [0, 0]


@pytest.mark.parametrize(
    ("given", "is_equal", "batch_related", "says"),
    [
        ("mask", False, [], r"^args\[0\]: a tensor of shape \(4, 3\).*batch_related=\[0\]"),
        ("lengths", False, [], r"^lengths: a tensor of shape \(4,\).*batch_related=\['lengths'\]"),
        ("mask", True, [], ""),
        ("mask", False, [0], ""),
        ("lengths", False, ["lengths"], ""),
    ],
    ids=str,
)
def test_a_mask_of_each_rank_that_is_not_split_is_told_once(given, is_equal, batch_related, says):
    first, second = run_ranks(2, masks, given, is_equal, batch_related, init={"pipe_size": 2})
    assert first[0]
    assert second == (not says, [])
    assert len(first[1]) == bool(says)
    assert not says or re.search(says, first[1][0])


def listed_mistakes() -> None:
    layers = bmt.PipelineTransformerBlockList([Masked() for _ in range(2)])
    for wrong in ([1], ["mask"], [-1]):
        with pytest.raises(ValueError, match=r"batch_related: expected indices below 1.*\['lengths'\], got"):
            layers(torch.zeros(4, 3, DIM), torch.ones(4, 3), lengths=None, batch_related=wrong)


def test_batch_related_names_arguments():
    run_ranks(2, listed_mistakes, init={"pipe_size": 2})


def unequal_batches(has_labels: bool) -> None:
    layers = bmt.PipelineTransformerBlockList([torch.nn.Tanh() for _ in range(2)])
    x = torch.zeros(2 + 2 * bmt.rank(), DIM)
    if has_labels:
        layers.loss(x, head=torch.nn.MSELoss(), labels=x)
    layers(x)


@pytest.mark.parametrize("has_labels", [False, True])
def test_batches_of_other_sizes_are_named(has_labels):
    options = {"fresh": True, "grace": 5, "environment": {"BMTRAIN_CPU_TRANSPORT": "shm"}}
    for outcome in rank_outcomes(2, unequal_batches, has_labels, init={"pipe_size": 2}, **options):
        assert "The ranks of a pipeline pass batches of one size" in str(outcome)
