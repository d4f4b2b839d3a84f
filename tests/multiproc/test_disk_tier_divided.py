"""Blocks on a drive whose parameters are divided by more than ZeRO, and gradients of virtual shards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankError, run_ranks
from harness.disk_tier import ALL, TIERS, kernel_bytes, small_chunks

import bmtrain as bmt
from bmtrain._engine.disk_shard import stored_shard_of
from bmtrain._ranks.context import context
from bmtrain.plan import MACHINES, TrainingPolicy, describe_module, estimate
from bmtrain.plan.policy import DISK

DIM = 40


class Layer(bmt.DistributedModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = bmt.nn.Linear(DIM, DIM)
        if kind == "tp":
            self.rest = torch.nn.Sequential(
                bmt.nn.ColumnParallelLinear(DIM, 2 * DIM),
                torch.nn.ReLU(),
                bmt.nn.RowParallelLinear(2 * DIM, DIM),
            )
        else:
            self.rest = bmt.nn.MoE(DIM, 2 * DIM, 4, top_k=2) if kind == "ep" else bmt.nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = self.rest(torch.relu(self.first(x)))
        out: torch.Tensor = x + (rest[0] if isinstance(rest, tuple) else rest)
        return out


def make(kind: str, place: dict[str, Any], optimizer: str = "AdamOptimizer") -> tuple[torch.nn.Module, Any]:
    small_chunks()
    torch.manual_seed(3)
    pipe = kind == "pipe"
    with bmt.default_policy(bmt.BlockPolicy(**place)):
        blocks = [bmt.Block(Layer(kind), mode="PIPE" if pipe else "BLOCK") for _ in range(3)]
    model = (bmt.PipelineTransformerBlockList if pipe else bmt.TransformerBlockList)(blocks)
    bmt.init_parameters(model)
    return model, getattr(bmt.optim, optimizer)(model.named_parameters(), lr=0.01, weight_decay=0.1)


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> list[torch.Tensor]:
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    ctx, seen = context(), []
    for step in steps:
        manager.zero_grad()
        for shard in bmt.virtual_shards(step) if ctx.virtual_shards else [None]:
            number = ctx.topology.dp_id if shard is None else shard.index
            x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(100 * step + number))
            loss = model(x).square().mean()
            manager.backward(loss)
            seen.append(loss.detach())
        seen.append(manager.clip_grad_norm(optimizer.param_groups, 0.5))
        manager.step()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def compare(kind: str, optimizer: str, places: list[dict[str, Any]]) -> None:
    plain = train(*make(kind, {}, optimizer), range(3))
    for place in places:
        found = train(*make(kind, place, optimizer), range(3))
        assert len(found) == len(plain)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), place


@pytest.mark.parametrize(
    ("kind", "world", "init"),
    [
        ("tp", 4, {"tp_size": 2}),
        ("ep", 4, {"ep_size": 2}),
        ("pipe", 4, {"pipe_size": 2, "num_micro_batches": 2}),
        ("plain", 2, {"virtual_shards": 4}),
        ("ep", 2, {"ep_size": 2, "virtual_shards": 4}),
    ],
)
@pytest.mark.parametrize("optimizer", ["AdamOptimizer", "MuonOptimizer"])
def test_same_bits(kind: str, world: int, init: dict[str, Any], optimizer: str, drive: Path) -> None:
    places = TIERS[2:] if optimizer == "AdamOptimizer" else [TIERS[1], ALL]
    run_ranks(world, compare, kind, optimizer, places, init={"tier_directories": [str(drive)], **init})


def count_planned(init: dict[str, int]) -> None:
    dim, pipe = 600, "pipe_size" in init
    own = [bmt.nn.Linear] * 2 if pipe else [bmt.nn.ColumnParallelLinear, bmt.nn.RowParallelLinear]
    with bmt.default_policy(bmt.BlockPolicy(**ALL)):
        divided, plain = (
            [torch.nn.Sequential(*(linear(dim, dim, bias=False) for linear in pair)) for _ in range(4)]
            for pair in (own, [torch.nn.Linear] * 2)
        )
        blocks = [bmt.Block(layer, mode="PIPE" if pipe else "BLOCK") for layer in divided]
        model = (bmt.PipelineTransformerBlockList if pipe else bmt.TransformerBlockList)(blocks)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    x, before = torch.ones(4, dim), (0, 0)
    for _ in range(3):
        before = kernel_bytes()
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()
        optimizer._place.finish()
    moved = [now - old for now, old in zip(kernel_bytes(), before, strict=True)]
    kind = type(model if pipe else divided[0][0]).__name__
    with pytest.raises(ValueError, match=f"expected layers whose forward is one rank's, got {kind}"):
        describe_module(model, x)
    described = describe_module(torch.nn.Sequential(*plain), x, blocks=plain)
    machine = MACHINES["a100-80gb"].with_devices(bmt.world_size())
    planned = estimate(described, machine, TrainingPolicy(disk=DISK, **init)).disk
    assert moved == pytest.approx([planned.read, planned.written], rel=0.02)
    assert bmt.memory_report(model, optimizer).on_disk == pytest.approx(planned.stored, rel=0.02)


@pytest.mark.parametrize("init", [{"tp_size": 2}, {"pipe_size": 2, "num_micro_batches": 2}], ids=str)
def test_bytes_of_divided_blocks_are_as_planned(init: dict[str, int], tmp_path: Path) -> None:
    run_ranks(2, count_planned, init, init={"tier_directories": [str(tmp_path)], **init})


def flip() -> None:
    """Changes a bit of the second stage on the drive."""
    model, optimizer = make("pipe", ALL)
    train(model, optimizer, range(1))
    shards = {shard for p in model.parameters() if (shard := stored_shard_of(p)) is not None}
    assert len(shards) == 2 - bmt.rank()  # of this stage's layers
    if bmt.rank() == 1:
        shards.pop().parameters.mapping[1000:1001].bitwise_xor_(4)
    train(model, optimizer, range(1, 2))


def test_a_flipped_bit_of_a_stage_ends_all(tmp_path: Path) -> None:
    init = {"tier_directories": [str(tmp_path)], "pipe_size": 2, "num_micro_batches": 2}
    with pytest.raises(RankError) as raised:
        run_ranks(2, flip, init=init)
    found = re.search(
        "rank 1 raised DiskError: parameters of Layer#2: .*their checksum differs", str(raised.value)
    )
    assert found, raised.value


def whole_values(places: list[dict[str, Any]]) -> list[torch.Tensor]:
    """A step of a pipeline, and everything that ranks get from other stages."""
    torch.manual_seed(3)
    blocks = [bmt.Block(Layer("pipe"), mode="PIPE", policy=bmt.BlockPolicy(**place)) for place in places]
    model = bmt.PipelineTransformerBlockList(blocks)
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
    found = train(model, optimizer, range(2))[:-4]
    params = list(model.parameters())
    found += [*(p.gather() for p in params), *(p.gather_grad() for p in params)]
    found += [bmt.optim.gather_state(optimizer, p, "exp_avg") for p in params]
    state = model.state_dict()
    with bmt.whole(model):
        assert all(torch.equal(state[name], p) for name, p in model.named_parameters() if state)
    rows = bmt.inspect.inspect_model(model, "*")
    return [*found, *state.values(), *(torch.tensor([row["mean"], row["std"]]) for row in rows)]


def mixed_stages() -> None:
    small_chunks()
    plain = whole_values([{}, {}])
    for places in ([ALL, {}], [{}, TIERS[1]], [ALL, ALL]):
        found = whole_values(places)
        assert len(found) == len(plain)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), places
    block = bmt.Block(Layer("pipe"), mode="PIPE", policy=bmt.BlockPolicy(**ALL))
    model = bmt.PipelineTransformerBlockList([bmt.Block(Layer("pipe"), mode="PIPE"), block])
    with pytest.raises(ValueError, match=r"expected an optimizer of bmtrain.optim, got SGD"):  # on all stages
        bmt.optim.OptimManager().add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_stages_agree_on_what_is_on_a_drive(drive: Path) -> None:
    init = {"tier_directories": [str(drive)], "pipe_size": 2, "num_micro_batches": 2}
    run_ranks(2, mixed_stages, init=init)
