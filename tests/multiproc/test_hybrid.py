"""Hybrid sharding: blocks shared by some ranks, and held alike by others."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.kits import TanhLinear

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain._ranks.groups import parts_of
from bmtrain.global_var import context

WORLD, SHARING, LAYERS, DIM, MICROS = 4, 2, 3, 8, 2


def build(**policy: Any) -> bmt.TransformerBlockList:
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        return bmt.TransformerBlockList([bmt.Block(TanhLinear(DIM)) for _ in range(LAYERS)])


def batch(step: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + bmt.rank())
    return torch.randn(2, DIM, generator=generator)


def plain_loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for index in range(LAYERS):
        x = torch.tanh(torch.nn.functional.linear(x, values[f"{index}.weight"], values[f"{index}.bias"]))
    return x.square().sum()


def sum_in_two_steps(gradient: torch.Tensor) -> torch.Tensor:
    """(rank 0 + rank 1) + (rank 2 + rank 3)."""
    of_ranks = bmt.distributed.all_gather(gradient)
    return of_ranks.unflatten(0, (-1, SHARING)).sum(1).sum(0)


def trained(policy: dict[str, Any], accumulates: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build(zero_size=SHARING, **policy)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
    sharing, replicas = parts_of(context(), "zero", SHARING)
    for step in range(3):
        optimizer.zero_grad()
        dtype = policy.get("gather_dtype")
        values = {n: p.gather().detach().to(dtype).float() for n, p in model.named_parameters()}
        for value in values.values():
            value.requires_grad_()
        for comm in (sharing.comm, sharing.reduce_comm, replicas.reduce_comm):
            comm.reset_traffic()
        for micro in range(MICROS):
            with bmt.no_sync() if accumulates and micro < MICROS - 1 else nullcontext():
                loss = model(batch(step, micro)).square().sum()
                loss.backward()
            assert torch.equal(loss, plain_loss(values, batch(step, micro)))
        traffic = {
            **sharing.comm.traffic(),
            **sharing.reduce_comm.traffic(),
            **replicas.reduce_comm.traffic(),
        }
        expected = {name: torch.zeros_like(value) for name, value in values.items()}
        for micro in range(MICROS):
            for value in values.values():
                if not accumulates:
                    value.grad = None
            plain_loss(values, batch(step, micro)).backward()
            if not accumulates or micro == MICROS - 1:
                for name, value in values.items():
                    expected[name] = sum_in_two_steps(value.grad) + expected[name]
        for name, param in model.named_parameters():
            part = expected[name].flatten()[param._start_partition : param._end_partition]
            assert torch.equal(param.grad, part)
        optimizer.step()
    norm = bmt.optim.OptimManager(loss_scale=None)
    norm.add_optimizer(optimizer)
    layout = model[0]._storages[0].shards.layout
    return {
        "traffic": traffic,
        "partition": layout.partition,
        "is_shared_by": layout.num_ranks,
        "norm": float(norm.clip_grad_norm(optimizer.param_groups, 1e9)),
        "wanted_norm": float(torch.cat([g.flatten() for g in expected.values()]).norm()),
        "mine": [param.detach().clone() for param in model.parameters()],
        "inspected": [row["grad_mean"] for row in bmt.inspect.inspect_model(model, "*")],
        "wanted_means": [float(value.mean()) for value in expected.values()],
        "in_use": current_engine(context()).pool.stats()["buffers_in_use"],
    }


# Gathers of blocks and reductions, in a step of MICROS micro-batches.
CASES = {
    "3": ({}, False, MICROS * (2 * LAYERS - 1), MICROS * LAYERS),
    "3, accumulating": ({"recompute": "off"}, True, MICROS * (2 * LAYERS - 1), LAYERS),
    "2, selective": ({"level": 2, "recompute": "selective"}, False, MICROS * LAYERS, MICROS * LAYERS),
    "1": ({"level": 1}, True, LAYERS, LAYERS),
    "3, through bf16": (
        {"gather_dtype": torch.bfloat16},
        False,
        MICROS * (2 * LAYERS - 1),
        MICROS * LAYERS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_summed_over_sharing_ranks_then_over_replicas(case):
    policy, accumulates, gathers, reductions = CASES[case]
    outcomes = run_ranks(WORLD, trained, policy, accumulates)
    for outcome in outcomes:
        assert outcome["is_shared_by"] == SHARING
        nbytes = 4 * outcome["partition"]
        travelling = nbytes // 2 if "gather_dtype" in policy else nbytes
        assert outcome["traffic"]["all_gather"] == (gathers, gathers * (SHARING - 1) * travelling)
        assert outcome["traffic"]["all_to_all"] == (reductions, reductions * (SHARING - 1) * nbytes)
        # Of two replicas: 2 (R - 1) / R is 1.
        assert outcome["traffic"]["all_reduce"] == (reductions, reductions * nbytes)
        assert outcome["norm"] == pytest.approx(outcome["wanted_norm"], rel=1e-6)
        assert outcome["inspected"] == pytest.approx(outcome["wanted_means"], rel=1e-5, abs=1e-7)
        assert outcome["in_use"] == (LAYERS if policy.get("level") == 1 else 0)
    for one, other in ((0, 2), (1, 3)):  # replicas hold the same bits
        for mine, theirs in zip(outcomes[one]["mine"], outcomes[other]["mine"], strict=True):
            assert torch.equal(mine, theirs)


def losses(zero_size: int | None, dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    model = build(zero_size=zero_size).to(dtype)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(batch(step).to(dtype)).float().square().sum()
        loss.backward()
        optimizer.step()
        seen.append(bmt.sum_loss(loss).item())
    return seen


def test_hybrid_trains_as_full_sharding_does():
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        hybrid, full = (run_ranks(WORLD, losses, size, dtype)[0] for size in (SHARING, None))
        assert hybrid == pytest.approx(full, rel=tolerance)
    # More than there are ranks is all of them.
    assert run_ranks(2, losses, 8, torch.float32) == run_ranks(2, losses, None, torch.float32)


def moved(path: str, sizes: list[int | None]) -> int:
    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.full((2, DIM), 0.5)).sum().backward()
        optimizer.step()

    models = [build(zero_size=size) for size in sizes]
    optimizers = [bmt.optim.AdamOptimizer(model.parameters(), lr=0.01) for model in models]
    step(models[0], optimizers[0])
    bmt.distributed.checkpoint.save(path, 1, models[0], optimizers[0])
    bmt.distributed.checkpoint.load(path, models[1], optimizers[1])
    param = next(models[0].parameters())
    copy = pickle.loads(pickle.dumps(param))
    assert torch.equal(copy.gather(), param.gather())
    for one, other in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    states = [optimizer.state_dict(gather=True)["state"] for optimizer in optimizers]
    for one, other in zip(states[0].values(), states[1].values(), strict=True):
        assert torch.equal(one["exp_avg"], other["exp_avg"])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)  # the same on all ranks: no order can change it
    for one, other in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def test_checkpoints_move_between_hybrid_and_full_sharding(tmp_path):
    cases = [[SHARING, None], [None, SHARING]]
    sizes = [run_ranks(WORLD, moved, str(tmp_path / str(n)), case)[0] for n, case in enumerate(cases)]
    assert abs(sizes[0] - sizes[1]) < 0.05 * sizes[1]  # replicas are written once


def seeded_apart() -> list[torch.Tensor]:
    torch.manual_seed(bmt.rank())
    model = build(zero_size=SHARING)
    bmt.init_parameters(model)
    return [param.detach().clone() for param in model.parameters()]


def test_replicas_begin_alike_whatever_the_seeds():
    shards = run_ranks(WORLD, seeded_apart)
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(shards[one], shards[other], strict=True))


class TensorParallel(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(bmt.config["tp_rank"])
        self.weight = bmt.DistributedParameter(torch.randn(DIM, DIM), tp_mode=True, tp_split_dim=0)
        torch.manual_seed(0)
        self.bias = bmt.DistributedParameter(torch.randn(DIM))

    def forward(self, x):
        return torch.tanh(torch.nn.functional.linear(x + self.bias, self.weight))


def tensor_parallel(policy: dict[str, Any]) -> list[float]:
    block = bmt.Block(TensorParallel(), policy=bmt.BlockPolicy(**policy))
    optimizer = bmt.optim.AdamOptimizer(block.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    seen = []
    for step in range(2):
        manager.zero_grad()
        manager.backward(block(batch(step)).sum())
        seen.append(float(manager.clip_grad_norm(optimizer.param_groups, 1e9)))
        seen += [row["grad_std"] for row in bmt.inspect.inspect_model(block, "*")]
        manager.step()
    return seen


@pytest.mark.parametrize("policy", [{"level": 0}, {"zero_size": SHARING}], ids=["level 0", "hybrid"])
def test_replicas_of_tensor_parallel_slices(policy):
    ours, full = (run_ranks(WORLD, tensor_parallel, given, init={"tp_size": 2}) for given in (policy, {}))
    for mine, theirs in zip(ours, full, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def not_a_divisor() -> None:
    with pytest.raises(
        ValueError, match="zero_size: expected a divisor of the 4 ranks that share the block, got 3"
    ):
        build(zero_size=3)


def test_zero_size_argument():
    run_ranks(WORLD, not_a_divisor)
    with pytest.raises(ValueError, match=r"zero_size: expected at least 2 \(1 is level 0\), got 1"):
        bmt.BlockPolicy(zero_size=1)
    with pytest.raises(ValueError, match="zero_size: at level 0 nothing is sharded, got 2"):
        bmt.BlockPolicy(level=0, zero_size=2)


class Scaled(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def narrow_gradients() -> list[float]:
    policy = bmt.BlockPolicy(zero_size=SHARING, compute_dtype=torch.bfloat16)
    block = bmt.Block(Scaled(), policy=policy)
    block(torch.full((1024,), (1.0, 2**-9)[bmt.rank() % SHARING], dtype=torch.bfloat16)).backward()
    return list(set(block.weight.grad.tolist()))


def test_sums_over_ranks_are_not_rounded_before_those_over_replicas() -> None:
    assert run_ranks(WORLD, narrow_gradients) == [[2 + 2**-8]] * WORLD
