"""What the planner predicts is what the runtime counts: messages, bytes on the wire, bytes of memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.traffic import by_operation

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain._engine.observer import Observer
from bmtrain._tools.gpt import GPT
from bmtrain.global_var import context
from bmtrain.plan import MACHINES, TrainingPolicy, describe_module, estimate
from bmtrain.plan.model import muon_flops
from bmtrain.plan.network import Network
from bmtrain.plan.report import format_plan
from bmtrain.plan.simulation import Rates, SimulatedStep
from bmtrain.wrapper import BMTrainModelWrapper, model_wrapper_dispatch

LAYERS, DIM, EXPERTS = 5, 64, 8
LARGE = 160  # blocks of more than the 1 MiB from which ranks of a host share buffers


def storage_bytes(tensors) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Mixture(bmt.DistributedModule):
    """A layer, and experts of which each gets as many tokens."""

    def __init__(self, layer: torch.nn.Module, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.experts = bmt.nn.Experts(dim, 2 * dim, EXPERTS, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        rows = x.flatten(0, 1)
        index = (torch.arange(2 * len(rows)) % EXPERTS).view(-1, 2)
        return x + self.experts(rows, index, torch.ones(index.shape)).view_as(x)


def gpt(policy: TrainingPolicy, dtype: torch.dtype, dim: int = DIM) -> torch.nn.Module:
    model = GPT(LAYERS, dim, 4, 101, 32).to(dtype)
    layers = [model_wrapper_dispatch(layer) for layer in model.layers]
    if policy.ep_size > 1:
        layers = [Mixture(layer, dim, dtype) for layer in layers]
        bmt.init_parameters(torch.nn.ModuleList(layers))
    model.layers = torch.nn.ModuleList([bmt.Block(layer, policy=policy.block_policy()) for layer in layers])
    # Behind blocks that compute in 16 bits the head goes on in its own dtype.
    model.norm.register_forward_pre_hook(lambda norm, args: (args[0].to(norm.weight.dtype),))
    return BMTrainModelWrapper(model)


def predicted_and_counted(options: dict[str, Any], dtype: torch.dtype, dim: int) -> dict:
    gc.collect()
    policy = TrainingPolicy(micro_batch=2, **options)
    model = gpt(policy, dtype, dim)
    batch = torch.randint(0, 101, (2, 33))
    described = describe_module(model, batch)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), state_dtype=policy.state_dtype)
    pool = current_engine(context()).pool
    for _ in range(4):
        optimizer.zero_grad()
        for comm in context().communicators():
            comm.reset_traffic()
        pool.reset_peaks()
        model(batch).backward()
        optimizer.step()
    params = list(model.parameters())
    machine = MACHINES["a100-80gb"].with_devices(bmt.world_size())
    if dim == LARGE:
        machine = replace(machine, shares_memory=True)
    plan = estimate(described, machine, policy)
    num_sharing = policy.block_policy().num_sharing
    state = [t for p in params for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return {
        "predicted": by_operation(plan.traffic),
        "counted": by_operation(*[comm.traffic() for comm in context().communicators()]),
        "predicted pool": plan.memory.pool_peak,
        "counted pool": pool.stats()["peak_bytes_in_use"],
        "predicted states": bmt.plan.model_state_bytes(
            described.sliced(1, 1, 1, policy.ep_size),
            bmt.world_size(),
            num_sharing(bmt.world_size()),
            policy.state_dtype,
            num_sharing_experts=num_sharing(bmt.world_size() // policy.ep_size),
        ),
        "counted states": {
            "weights": storage_bytes(params),
            "gradients": storage_bytes([p.grad for p in params]),
            "optimizer": storage_bytes(state),
        },
    }


HALF = {"compute_dtype": torch.bfloat16}
THROUGH_HALF = {"gather_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("world", "options", "dtype", "dim"),
    [
        (2, {"level": 2}, torch.float32, DIM),
        (2, {"recompute": False}, torch.bfloat16, DIM),
        (4, {"level": 2, "recompute": False}, torch.float32, DIM),
        (4, {}, torch.float32, DIM),
        (4, {}, torch.bfloat16, DIM),
        (4, {"recompute": False}, torch.float32, DIM),
        (2, {}, torch.float32, LARGE),
        (2, {"state_dtype": torch.int8}, torch.float32, LARGE),
        (2, {"level": 2, "recompute": False}, torch.float32, LARGE),
        (2, {"recompute": "selective"}, torch.float32, DIM),
        (2, {"level": 1}, torch.float32, DIM),
        (4, {"level": 1, "recompute": False}, torch.bfloat16, DIM),
        (2, {"level": 0}, torch.float32, DIM),
        (4, {"level": 0}, torch.bfloat16, DIM),
        (4, {"level": 0, **HALF}, torch.float32, DIM),
        (4, {"zero_size": 2}, torch.float32, DIM),
        (4, {"zero_size": 2, "level": 2, **HALF}, torch.float32, DIM),
        (4, {"zero_size": 2, "level": 1}, torch.bfloat16, DIM),
        (2, HALF, torch.float32, DIM),
        (2, THROUGH_HALF, torch.float32, DIM),
        (2, {"level": 1, **THROUGH_HALF}, torch.float32, LARGE),
        (4, {"zero_size": 2, "level": 2, **THROUGH_HALF}, torch.float32, DIM),
        (2, {"ep_size": 2, "level": 2}, torch.float32, DIM),
        (2, {"ep_size": 2, **HALF}, torch.float32, LARGE),
        (4, {"ep_size": 2, "recompute": False}, torch.bfloat16, DIM),
        (4, {"ep_size": 2, "zero_size": 2, "recompute": "selective"}, torch.float32, DIM),
        (4, {"ep_size": 4}, torch.float32, DIM),
    ],
)
def test_prediction_is_what_is_counted(world, options, dtype, dim) -> None:
    init = {"ep_size": options.get("ep_size", 1)}
    for found in run_ranks(world, predicted_and_counted, options, dtype, dim, init=init):
        assert found["counted"] == found["predicted"]
        assert found["counted pool"] == found["predicted pool"]
        for name, counted in found["counted states"].items():
            predicted = found["predicted states"][name]
            assert counted <= predicted <= 1.05 * counted + 200_000, name


def rules_shown_by(model: torch.nn.Module) -> list[str]:
    """Returns the lines of the optimizer's table without options, in order."""
    shown = str(bmt.optim.MuonOptimizer(model.named_parameters())).splitlines()[1:]
    return sorted(line for line in shown if not line.startswith("    "))


def state_of_muon(dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[int, int]:
    model = gpt(TrainingPolicy(micro_batch=2), dtype, DIM)
    batch = torch.randint(0, 101, (2, 33))
    optimizer = bmt.optim.MuonOptimizer(model.parameters(), state_dtype=state_dtype)
    model(batch).backward()
    optimizer.step()
    described = describe_module(model, batch)
    predicted = bmt.plan.model_state_bytes(
        described, bmt.world_size(), state_dtype=state_dtype, optimizer="muon"
    )
    assert sorted(described.rules.splitlines()) == rules_shown_by(model)
    plan = estimate(described, MACHINES["a100-80gb"].with_devices(2), TrainingPolicy(optimizer="muon"))
    assert described.rules in format_plan(plan)
    return predicted["optimizer"], bmt.memory_report(model, optimizer).optimizer


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_of_muon_is_predicted(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    for predicted, counted in run_ranks(2, state_of_muon, dtype, state_dtype):
        assert predicted == pytest.approx(counted, abs=200_000, rel=0.05)


class Tied(torch.nn.Module):
    """A layer with a weight that is a table too, a matrix, and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 8)
        self.tied, self.linear = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        self.tied.weight = self.table.weight
        self.stack = torch.nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(self.tied(x + self.table.weight[0])) @ self.stack).sum(0)


def rules_of_odd_blocks() -> None:
    embedding, layer = torch.nn.Embedding(16, 8), Tied()
    plain = torch.nn.Sequential(embedding, layer)
    expected = describe_module(plain, torch.ones(4, dtype=torch.long), blocks=[embedding, layer])
    blocks = [bmt.Block(model_wrapper_dispatch(member)) for member in (embedding, layer)]
    model = torch.nn.Sequential(*blocks)
    described = describe_module(model, torch.ones(4, dtype=torch.long))
    assert sorted(described.rules.splitlines()) == rules_shown_by(model)
    assert described.rules == expected.rules
    for found in (described, expected):
        assert [block.muon_flops for block in found.blocks] == [0, muon_flops(8, 8)]


def test_parameters_take_the_rules_that_the_optimizer_chooses() -> None:
    run_ranks(2, rules_of_odd_blocks)


def copies_for_the_loss_of_a_rank(level: int, offload: int) -> tuple[float, int]:
    policy = TrainingPolicy(level=level, micro_batch=2, survive=True, offload=offload)
    model, manager = gpt(policy, torch.float32, DIM), bmt.optim.OptimManager()
    kind = bmt.optim.AdamOffloadOptimizer if offload else bmt.optim.AdamOptimizer
    manager.add_optimizer(kind(model.parameters()))
    described = describe_module(model, torch.randint(0, 101, (2, 33)))
    for shard in bmt.virtual_shards(0):
        manager.backward(model(shard.of(torch.randint(0, 101, (8, 33)))))
    manager.step()
    for shard in bmt.virtual_shards(1):
        manager.backward(model(shard.of(torch.randint(0, 101, (8, 33)))))
    keeper = context().survival._keeper
    own, of_ward, others = (message.data for message in keeper.messages)
    counted = own.nbytes + others.nbytes
    if offload:  # else what the ward has is its own memory
        tensors = [of_ward]
        for param in keeper.ward.params.values():
            state = keeper.ward.optimizers[0].state.get(param, {})  # none of an empty shard
            tensors += [x for x in (param, *state.values()) if isinstance(x, torch.Tensor)]
        storages = {storage.data_ptr(): storage for storage in map(torch.Tensor.untyped_storage, tensors)}
        counted += sum(storage.nbytes() for storage in storages.values())
    machine = MACHINES["a100-80gb"].with_devices(bmt.world_size())
    return estimate(described, machine, policy).memory.copies, counted


@pytest.mark.parametrize("offload", [0, 1])
@pytest.mark.parametrize("level", [0, 3])
def test_copies_for_the_loss_of_a_rank_are_predicted(level: int, offload: int) -> None:
    init = {"virtual_shards": 4, "survive": 1}
    found = run_ranks(2, copies_for_the_loss_of_a_rank, level, offload, init=init, fresh=True)
    for predicted, counted in found:
        assert predicted == pytest.approx(counted, rel=0.03 if level else 0.04)


class Order(Observer):
    """What begins and ends, in order; blocks are numbered as they come."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._numbers: dict[Any, int] = {}

    def _note(self, event: str, runtime: Any) -> None:
        self.events.append((event, self._numbers.setdefault(id(runtime), len(self._numbers))))

    def gathering(self, runtime: Any) -> None:
        self._note("gathering", runtime)

    def awaiting_gather(self, runtime: Any) -> None:
        self._note("awaiting gather", runtime)

    def computing(self, runtime: Any, phase: Any) -> None:
        self._note(f"computing {phase.value}", runtime)

    def computed(self, runtime: Any) -> None:
        self._note("computed", runtime)

    def reducing(self, runtime: Any, groups: Any) -> None:
        self._note("reducing", runtime)

    def reduced(self, groups: Any) -> None:
        self.events.append(("reduced", -1))


def simulated_and_real_order(options: dict[str, Any]) -> tuple[list, list]:
    policy = TrainingPolicy(micro_batch=2, **options)
    model = gpt(policy, torch.float32)
    batch = torch.randint(0, 101, (2, 33))
    described = describe_module(model, batch)
    real, simulated = Order(), Order()
    engine = current_engine(context())
    for number in range(4):
        if number == 3:
            engine.observer = real
        model.zero_grad()
        model(batch).backward()
    engine.observer = None
    machine = MACHINES["a100-80gb"].with_devices(bmt.world_size())
    step = SimulatedStep(described, policy, 2, Network(machine, bmt.world_size()), Rates(1e12, 1e12))
    step.engine.observer = simulated
    step.run()
    passes = len(simulated.events) // 3
    return real.events, simulated.events[-passes:]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"level": 2}),
        (2, {}),
        (4, {}),
        (2, {"level": 1}),
        (2, {"level": 0}),
        (4, {"zero_size": 2}),
    ],
)
def test_the_simulation_orders_events_as_a_run_does(
    world: int, options: dict[str, Any], recompute: bool
) -> None:
    for real, simulated in run_ranks(world, simulated_and_real_order, {"recompute": recompute, **options}):
        assert real == simulated
        assert len(real) > 5 * LAYERS


def describe_undivided() -> None:
    linears = bmt.nn.ColumnParallelLinear(8, 8), bmt.nn.RowParallelLinear(8, 8)
    for model in (
        bmt.TransformerBlockList([bmt.Block(torch.nn.Sequential(*linears))]),
        bmt.PipelineTransformerBlockList([bmt.Block(bmt.nn.Linear(8, 8), mode="PIPE")]),
    ):
        assert len(describe_module(model, torch.ones(2, 8)).blocks) == 1


def test_tensor_parallel_layers_and_stages_of_one_rank_are_described() -> None:
    run_ranks(1, describe_undivided)
