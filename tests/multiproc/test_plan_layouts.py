"""The plan of stages, sequence ranks and tensor-parallel ranks has the bytes and buffers that the runtime counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.traffic import by_operation

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain.global_var import context
from bmtrain.plan import MACHINES, TrainingPolicy, describe_module, estimate
from bmtrain.wrapper import BMTrainModelWrapper, model_wrapper_dispatch

DIM, VOCABULARY, EXPERTS, LAYERS = 64, 101, 8, 8


class Layer(torch.nn.Module):
    """A product and, if wanted, experts of which each gets as many tokens."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(DIM, DIM)
        self.experts = bmt.nn.Experts(DIM, 2 * DIM, EXPERTS) if has_experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x).relu()
        if self.experts is None:
            return x
        rows = x.flatten(0, 1)
        index = (torch.arange(2 * len(rows)) % EXPERTS).view(-1, 2)
        return x + self.experts(rows, index, torch.ones(index.shape)).view_as(x)


class Head(torch.nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(super().forward(x).flatten(0, 1), labels.flatten())


class Undivided(torch.nn.Module):
    """The model as it is described."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, DIM)
        self.layers = torch.nn.ModuleList([Layer(has_experts) for _ in range(LAYERS)])
        self.head = Head(DIM, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x, ids)


def predicted_and_counted(options: dict[str, Any]) -> dict[str, Any]:
    policy = TrainingPolicy(micro_batch=4, pipe_size=2, num_micro_batches=4, **options)
    model, ids = Undivided(policy.ep_size > 1), torch.randint(0, VOCABULARY, (4, 32))
    plan = estimate(describe_module(model, ids), MACHINES["a100-80gb"].with_devices(bmt.world_size()), policy)
    blocks = [
        bmt.Block(model_wrapper_dispatch(layer), mode="PIPE", policy=policy.block_policy())
        for layer in model.layers
    ]
    layers = bmt.PipelineTransformerBlockList(blocks, schedule=policy.schedule, chunks=policy.chunks)
    table, head = BMTrainModelWrapper(model.table), BMTrainModelWrapper(model.head)
    bmt.init_parameters([layers, table, head])
    pool = current_engine(context()).pool
    for _ in range(3):
        for comm in context().communicators():
            comm.reset_traffic()
        pool.reset_peaks()
        layers.loss(table(ids), head=head, labels=ids).backward()
    parameters = [*layers.parameters(), *table.parameters(), *head.parameters()]
    return {
        "predicted": by_operation(plan.traffic),
        "counted": by_operation(*[comm.traffic() for comm in context().communicators()]),
        "pools": (plan.memory.pool_peak, pool.stats()["peak_bytes_in_use"]),
        "weights": (plan.memory.weights, 4 * sum(p.numel() for p in parameters)),
    }


class Attention(torch.nn.Module):
    """Four heads of queries, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(DIM, 2 * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, -1)).transpose(1, 2).split((4, 2, 2), 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + mixed.transpose(1, 2).flatten(2)


class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attention() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sequences_predicted_and_counted() -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    model, x = Reader(), torch.ones(2, 32, DIM)
    policy = TrainingPolicy(micro_batch=2, sp_size=2)
    plan = estimate(describe_module(model, x), MACHINES["a100-80gb"].with_devices(bmt.world_size()), policy)
    model = BMTrainModelWrapper(model)
    for _ in range(3):
        for comm in context().communicators():
            comm.reset_traffic()
        model(bmt.shard_sequence({"inputs_embeds": x})["inputs_embeds"]).sum().backward()
    return by_operation(plan.traffic), by_operation(*[comm.traffic() for comm in context().communicators()])


@pytest.mark.parametrize("world", [2, 4])
def test_sequence_ranks_are_predicted(world: int) -> None:
    for predicted, counted in run_ranks(world, sequences_predicted_and_counted, init={"sp_size": 2}):
        assert counted == predicted


class Sums(torch.nn.Module):
    """Two pairs of products; the second of each is a sum over tensor-parallel ranks if they are divided."""

    def __init__(self, is_divided: bool) -> None:
        super().__init__()
        first, last = (
            (bmt.nn.ColumnParallelLinear, bmt.nn.RowParallelLinear)
            if is_divided
            else (torch.nn.Linear, torch.nn.Linear)
        )
        column, row = ({"gather_input": False}, {"all_reduce_output": True}) if is_divided else ({}, {})
        self.pairs = torch.nn.ModuleList(
            torch.nn.Sequential(first(DIM, 4 * DIM, **column), last(4 * DIM, DIM, **row)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            x = x + pair(x)
        return x


def sums_predicted_and_counted() -> dict[str, Any]:
    plain, x = torch.nn.Sequential(*[Sums(False) for _ in range(4)]), torch.ones(8, 32, DIM)
    described = describe_module(plain, x, blocks=list(plain))
    policy = TrainingPolicy(micro_batch=8, tp_size=2)
    plan = estimate(described, MACHINES["a100-80gb"].with_devices(bmt.world_size()), policy)
    layers = bmt.TransformerBlockList(
        [bmt.Block(model_wrapper_dispatch(Sums(True)), policy=policy.block_policy()) for _ in range(4)]
    )
    bmt.init_parameters(layers)
    pool = current_engine(context()).pool
    for _ in range(3):
        for comm in context().communicators():
            comm.reset_traffic()
        pool.reset_peaks()
        layers(x.clone().requires_grad_()).sum().backward()
    counted = [comm.traffic() for comm in context().communicators()]
    return {
        "bytes": (by_operation(plan.traffic), by_operation(*counted)),
        "messages": (
            plan.traffic["all_reduce of layers"][0],
            sum(each["all_reduce"][0] for each in counted if "all_reduce" in each),
        ),
        "pools": (plan.memory.pool_peak, pool.stats()["peak_bytes_in_use"]),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_sums_of_tensor_parallel_ranks_are_predicted(world: int) -> None:
    for found in run_ranks(world, sums_predicted_and_counted, init={"tp_size": 2}):
        for predicted, counted in found.values():
            assert counted == predicted


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "zb1p", "recompute": False},
        {"schedule": "interleaved"},
        {"schedule": "gpipe", "ep_size": 2},
    ],
    ids=lambda options: options["schedule"],
)
def test_a_stage_is_predicted(options: dict[str, Any]) -> None:
    """Its blocks stay gathered for a whole pass, beside full gradients of all of them."""
    for found in run_ranks(
        4,
        predicted_and_counted,
        options,
        init={"pipe_size": 2, "num_micro_batches": 4, "ep_size": options.get("ep_size", 1)},
    ):
        predicted, counted = (
            {name: nbytes for name, (_, nbytes) in found[kind].items()} for kind in ("predicted", "counted")
        )
        assert found["pools"][0] == found["pools"][1]
        # Shapes, labels and losses are not predicted.
        assert 0 <= sum(counted.values()) - sum(predicted.values()) < 2_500
        assert counted["reduce_scatter"] == predicted["reduce_scatter"]
        of_plan, held = found["weights"]
        assert held <= of_plan <= 1.05 * held
