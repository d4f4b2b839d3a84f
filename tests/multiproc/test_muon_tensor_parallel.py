"""Muon and whole_matrix over matrices that are split over tensor-parallel ranks, against torch over whole ones.

``BMTRAIN_MUON_STEPS`` sets the number of steps (4).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain import BlockPolicy
from bmtrain.distributed import checkpoint
from bmtrain.optim import MuonOffloadOptimizer, MuonOptimizer, OptimManager, whole_matrix

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
STEPS, SPLIT = int(os.environ.get("BMTRAIN_MUON_STEPS", "4")), 3
#: Shape, and the dimension that is split over tensor-parallel ranks.
MATRICES = {"fused": ((24, 10), 0), "up": ((18, 10), 0), "down": ((10, 18), 1), "square": ((7, 7), -1)}


class Inner(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, (shape, dim) in MATRICES.items():
            own = slice_of(torch.zeros(shape, dtype=dtype), dim)
            setattr(self, name, bmt.DistributedParameter(own, tp_mode=dim >= 0, tp_split_dim=dim))


def slice_of(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's tensor-parallel slice of a tensor."""
    if dim < 0:
        return whole
    return whole.chunk(bmt.config["tp_size"], dim)[bmt.config["tp_rank"]].contiguous()


def drawn(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{block}.{name}": torch.randn(shape, generator=generator).to(dtype)
        for block in range(2)
        for name, (shape, _) in MATRICES.items()
    }


class Reference:
    """torch over whole fp32 matrices, of which a fused one is several."""

    def __init__(self, by_muon: bool, dtype: torch.dtype) -> None:
        self.by_muon, self.dtype = by_muon, dtype
        self.whole = {
            name: [torch.nn.Parameter(x.clone()) for x in self.parts(name, value)]
            for name, value in drawn(100, dtype).items()
        }
        flat = [part for parts in self.whole.values() for part in parts]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Muon(flat, **OPTIONS) if by_muon else torch.optim.Adafactor(flat, lr=0.05)
        )

    def parts(self, name: str, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return value.float().chunk(SPLIT if self.by_muon and "fused" in name else 1)

    def step(self, number: int) -> None:
        for name, gradient in drawn(number, self.dtype).items():
            for part, grad in zip(self.whole[name], self.parts(name, gradient), strict=True):
                part.grad = grad.clone()
        self.optimizer.step()

    def value(self, name: str) -> torch.Tensor:
        return torch.cat([part.detach() for part in self.whole[name]]).to(self.dtype)


def train(
    by_muon: bool, dtype: torch.dtype, policy: dict[str, Any], folder: str, first: int, offload: bool = False
) -> None:
    blocks = [bmt.Block(Inner(dtype), policy=BlockPolicy(**policy)) for _ in range(2)]
    model = bmt.TransformerBlockList(blocks)
    named: dict[str, Any] = {
        f"{number}.{name}": p for number, block in enumerate(blocks) for name, p in block.named_parameters()
    }
    for name, value in drawn(100, dtype).items():
        named[name].load(value)
    if by_muon:
        cls = MuonOffloadOptimizer if offload else MuonOptimizer
        optimizer: Any = cls(named.items(), splits={"*.fused": SPLIT}, **OPTIONS)
    else:
        optimizer = whole_matrix(torch.optim.Adafactor, named.items(), lr=0.05)
    manager, reference = OptimManager(), Reference(by_muon, dtype)
    manager.add_optimizer(optimizer)
    if first:
        checkpoint.load(folder, model, manager)
    for number in range(STEPS):
        reference.step(number)
        if number < first:
            continue
        for name, gradient in drawn(number, dtype).items():
            named[name].load_grad(slice_of(gradient, MATRICES[name[2:]][1]))
        manager.step()
        for name, p in named.items():
            assert torch.equal(p.gather_all(), reference.value(name)), (number, name)
        if number == 0:
            manager.load_state_dict(manager.state_dict(gather_opt=True))
        if number == 1:
            checkpoint.save(folder, number, model, manager)


@pytest.mark.parametrize("by_muon", [True, False], ids=["muon", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("world", "policy"), [(2, {}), (4, {}), (4, {"level": 0})], ids=str)
def test_weights_are_those_of_torch_over_whole_matrices(
    world: int, policy: dict[str, Any], dtype: torch.dtype, by_muon: bool, tmp_path: Path
) -> None:
    run_ranks(world, train, by_muon, dtype, policy, str(tmp_path), 0, init={"tp_size": 2})
    if world == 4:  # goes on without tensor parallelism, at another number of ranks
        run_ranks(3, train, by_muon, dtype, {}, str(tmp_path), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_on_the_host_has_the_same_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    run_ranks(2, train, True, dtype, {}, str(tmp_path), 0, True, init={"tp_size": 2})
    run_ranks(3, train, True, dtype, {}, str(tmp_path), 2, False)


def traffic() -> None:
    """Every element that is not the owner's travels twice, in 2 bytes, and nothing else does."""
    block = bmt.Block(Inner(torch.float32))
    optimizer = MuonOptimizer(block.parameters())
    for name, p in block.named_parameters():
        p.load_grad(slice_of(torch.randn(MATRICES[name][0]), MATRICES[name][1]))
    comm = bmt.config["comm"]
    comm.reset_traffic()
    optimizer.step()
    assert {kind for kind, (calls, _) in comm.traffic().items() if calls} == {"send", "recv"}
    sent = bmt.distributed.all_reduce(torch.tensor(float(comm.traffic()["send"][1]))).item()
    numels = [torch.Size(shape).numel() for shape, _ in MATRICES.values()]
    assert 0 < sent < 2 * 2 * sum(numels)


def test_a_matrix_travels_to_its_owner_and_back() -> None:
    run_ranks(4, traffic, init={"tp_size": 2})


def wrong() -> None:
    block = bmt.Block(Inner(torch.float32))
    with pytest.raises(
        ValueError, match=r"splits: down: expected a number of parts for a matrix whose columns"
    ):
        MuonOptimizer(block.named_parameters(), splits={"down": [4, 6]})


def test_parts_of_different_sizes_need_whole_rows() -> None:
    run_ranks(2, wrong, init={"tp_size": 2})


def experts() -> None:
    """Experts that are divided over ranks are stacked at their owner, each a matrix."""
    torch.manual_seed(1)
    whole = torch.randn(4, 5, 6)
    layer = bmt.DistributedModule()
    layer.experts = bmt.DistributedParameter(whole.chunk(2)[bmt.rank() % 2].clone(), ep_mode=True)
    block = bmt.Block(layer)
    optimizer = MuonOptimizer(block.named_parameters(), splits={"experts": 4}, **OPTIONS)
    copies = [torch.nn.Parameter(expert.clone()) for expert in whole]
    reference = torch.optim.Muon(copies, **OPTIONS)
    (p,) = block.parameters()
    for step in range(3):
        gradient = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(step))
        p.load_grad(gradient.chunk(2)[bmt.rank() % 2])
        for copy, part in zip(copies, gradient, strict=True):
            copy.grad = part.clone()
        optimizer.step()
        reference.step()
        assert torch.equal(p.gather_all(), torch.stack([copy.detach() for copy in copies]))


@pytest.mark.parametrize("world", [2, 4])
def test_experts_on_several_ranks_are_matrices_of_one_process(world: int) -> None:
    run_ranks(world, experts, init={"ep_size": 2})


def replicas() -> None:
    """Ranks with replicas divide the matrices: nothing is gathered, and each result is sent to all."""
    block = bmt.Block(Inner(torch.float32), policy=BlockPolicy(level=0))
    optimizer = MuonOptimizer(block.parameters())
    for name, p in block.named_parameters():
        p.load_grad(torch.randn(MATRICES[name][0], generator=torch.Generator().manual_seed(1)))
    comm = bmt.config["comm"]
    comm.reset_traffic()
    optimizer.step()
    sent = bmt.distributed.all_reduce(torch.tensor(float(comm.traffic()["send"][1]))).item()
    assert sent == 2 * sum(torch.Size(shape).numel() for shape, _ in MATRICES.values())


def test_replicas_divide_the_matrices() -> None:
    run_ranks(2, replicas)
