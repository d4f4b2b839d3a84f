"""bmt.memory_report(): every figure against a size that is known."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.kits import TanhLinear

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain.global_var import context

LAYERS, DIM, ROWS = 4, 256, 8
BLOCK = 4 * (DIM * DIM + DIM)  # fp32, and both parameters a multiple of 512 bytes
INPUT = 4 * ROWS * DIM


class Model(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = bmt.TransformerBlockList([bmt.Block(TanhLinear(DIM)) for _ in range(LAYERS)])
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.layers(x).mul(self.scale.sum()).square().sum()


def of_phases(policy: dict[str, Any]) -> dict[str, Any]:
    gc.collect()  # blocks of what ran in these ranks before
    current_engine(context()).pool.trim()
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        model = Model()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    x = torch.randn(ROWS, DIM)
    reports = {"built": bmt.memory_report(model, manager)}
    for _ in range(2):  # the order of blocks is learnt in the first
        manager.zero_grad()
        manager.backward(model(x))
        manager.step()
    bmt.memory_report(reset_peaks=True)
    loss = model(x)
    reports["forward"] = bmt.memory_report(model, manager, reset_peaks=True)
    with bmt.no_sync():
        loss.backward()
    reports["waiting"] = bmt.memory_report(model, manager, reset_peaks=True)
    model(x).backward()
    reports["backward"] = bmt.memory_report(model, [optimizer])
    for report in reports.values():
        assert report.process <= report.peak_process
        assert report.process > 2**20
    in_use = current_engine(context()).pool.stats()["bytes_in_use"]
    assert reports["backward"].gathered + reports["backward"].unreduced == in_use
    return reports


# Full parameters after forward and between micro-batches; whole gradients there; activations after forward.
CASES = {
    "3": ({}, BLOCK, 0, LAYERS * BLOCK, LAYERS * INPUT),
    "3, selective": ({"recompute": "selective"}, BLOCK, 0, LAYERS * BLOCK, 2 * LAYERS * INPUT),
    "2, activations kept": ({"level": 2, "recompute": "off"}, LAYERS * BLOCK, 0, LAYERS * BLOCK, None),
    "1": ({"level": 1}, LAYERS * BLOCK, LAYERS * BLOCK, LAYERS * BLOCK, LAYERS * INPUT),
    "0": ({"level": 0}, 0, 0, LAYERS * BLOCK, LAYERS * INPUT),
    "bf16 over fp32": (
        {"level": 1, "compute_dtype": torch.bfloat16},
        LAYERS * BLOCK // 2,
        LAYERS * BLOCK // 2,
        LAYERS * BLOCK // 2,
        None,
    ),
    "1, through bf16": (
        {"level": 1, "gather_dtype": torch.bfloat16},
        LAYERS * BLOCK,
        LAYERS * BLOCK,
        LAYERS * BLOCK,
        LAYERS * INPUT,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_report_says_what_each_phase_holds(case):
    policy, after_forward, between, unreduced, activations = CASES[case]
    world = 2
    share = LAYERS * BLOCK // (1 if policy.get("level") == 0 else world)
    outside = 4 * 16
    for reports in run_ranks(world, of_phases, policy):
        built, forward, waiting, backward = (
            reports[name] for name in ("built", "forward", "waiting", "backward")
        )
        assert built.parameters == backward.parameters == share + outside
        assert (built.gradients, built.optimizer, built.activations) == (0, 0, 0)
        assert backward.gradients == share + outside
        # Ranges start apart.
        assert 2 * (share + outside) <= backward.optimizer <= 2 * (share + outside) + 64 * 1024
        assert forward.gathered == after_forward
        assert waiting.gathered == between
        assert (forward.unreduced, waiting.unreduced, backward.unreduced) == (0, unreduced, 0)
        assert waiting.activations == backward.activations == 0
        if "compute_dtype" not in policy:
            assert forward.activations == activations
        assert waiting.peak_buffers >= waiting.gathered + waiting.unreduced
        assert "parameters" in str(built)


def of_tiers(places: list[dict[str, str]]) -> bmt.MemoryReport:
    blocks = [bmt.Block(TanhLinear(DIM), policy=bmt.BlockPolicy(**place)) for place in places]
    model = bmt.TransformerBlockList(blocks)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    model(torch.randn(ROWS, DIM)).square().sum().backward()
    optimizer.step()
    return bmt.memory_report(model, optimizer)


TIERS: dict[str, tuple[dict[str, str], dict[str, int]]] = {  # policy, and what is on the drive, in blocks
    "device": ({}, {}),
    "host": ({"parameters": "host", "gradients": "host"}, {}),
    "state": ({"optimizer": "disk"}, {"optimizer": 2}),
    "parameters": ({"parameters": "disk", "optimizer": "disk"}, {"parameters": 1, "optimizer": 2}),
    "gradients": ({"gradients": "disk", "optimizer": "disk"}, {"gradients": 1, "optimizer": 2}),
    "all": (
        {"parameters": "disk", "gradients": "disk", "optimizer": "disk"},
        {"parameters": 1, "gradients": 1, "optimizer": 2},
    ),
}


@pytest.mark.parametrize("names", [*([name] for name in TIERS), list(TIERS)], ids="-".join)
@pytest.mark.parametrize("world", [1, 2])
def test_report_has_rows_for_each_tier(names: list[str], world: int, tmp_path: Path):
    policies = [TIERS[name][0] for name in names]
    init = {"tier_directories": [str(tmp_path)]}
    for report in run_ranks(world, of_tiers, policies, init=init, fresh=True):
        for what, arrays in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            number = sum(TIERS[name][1].get(what, 0) for name in names)
            shard = BLOCK // world
            # Parameters and gradients begin at a page of the file.
            stored = number * (shard if what == "optimizer" else -(-shard // 4096) * 4096)
            rest = (arrays * len(names) - number) * shard
            assert getattr(report, f"disk_{what}") == stored
            assert getattr(report, f"host_{what}") == 0  # the memory of CPU ranks is in the first row
            # Ranges of the state start apart.
            apart = 64 * 1024 if what == "optimizer" and rest else 0
            assert rest <= getattr(report, what) <= rest + apart
        assert report.on_disk == report.disk_parameters + report.disk_gradients + report.disk_optimizer


def of_large_blocks(dim: int, **dtypes: torch.dtype) -> tuple[str, list[bmt.MemoryReport]]:
    policy = bmt.BlockPolicy(recompute="whole", **dtypes)
    layers = bmt.TransformerBlockList([bmt.Block(TanhLinear(dim), policy=policy) for _ in range(LAYERS)])
    x = torch.randn(ROWS, dim)
    reports = []
    for _ in range(3):
        bmt.memory_report(reset_peaks=True)
        layers(x).square().sum().backward()
        reports.append(bmt.memory_report())
    return context().world.comm.backend, reports


@pytest.mark.parametrize(
    ("width", "dtypes"), [(4, {}), (2, {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32})]
)
def test_report_counts_buffers_that_are_used_in_place(width: int, dtypes: dict[str, torch.dtype]):
    dim, world = 760, 2  # a block of 2.2 MiB, in 16 bits 1.1
    elements = dim * dim + dim
    for backend, reports in run_ranks(world, of_large_blocks, dim, fresh=True, **dtypes):
        if backend != "shm":
            pytest.skip(f"only ranks that share memory have such buffers, not {backend}")
        gathered = 2 * width * elements // world  # two Blocks', which ranks have in common
        for report in reports:
            assert gathered + 4 * elements <= report.in_place <= gathered + 4 * elements + 4096
            assert report.peak_buffers == 0  # also where shards are rounded on their way to the buffer


def arguments() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got int"):
        bmt.memory_report(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optim: expected"):
        bmt.memory_report(optim=[3])
    model = bmt.Block(TanhLinear(DIM), policy=bmt.BlockPolicy(recompute="off"))
    loss = model(torch.randn(ROWS, DIM)).sum()
    assert bmt.memory_report().activations is None
    assert "activations     unknown" in str(bmt.memory_report())
    loss.backward()
    assert bmt.memory_report().activations == 0


def test_report_refuses_what_it_does_not_know():
    run_ranks(1, arguments)


def test_report_needs_init():
    with pytest.raises(RuntimeError, match="not initialized"):
        bmt.memory_report()
