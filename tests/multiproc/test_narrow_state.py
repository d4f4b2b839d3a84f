"""Moments in 8 and 16 bits: any number of ranks has the same bits, memory as predicted, losses as in fp32."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.kits import TanhLinear
from reference_gpt import SMALL_SHAPE

import bmtrain as bmt
from bmtrain.distributed import checkpoint
from bmtrain.parameter import shard_of

EXAMPLE = str(Path(__file__).parents[2] / "example")
CLASSES: dict[str, Any] = {
    "device": bmt.optim.AdamOptimizer,
    "offload": bmt.optim.AdamOffloadOptimizer,
    "muon": bmt.optim.MuonOptimizer,
    "muon offload": bmt.optim.MuonOffloadOptimizer,
}


class Model(bmt.DistributedModule):
    """A Block whose parameters are cut at other elements by every number of ranks, and one outside."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.outside = bmt.DistributedParameter(torch.randn(7, 31, generator=generator).to(dtype))
        layer = bmt.DistributedModule()
        layer.weight = bmt.DistributedParameter(torch.randn(41, 53, generator=generator).to(dtype))
        layer.bias = bmt.DistributedParameter(torch.randn(41, generator=generator).to(dtype))
        self.block = bmt.Block(layer)


class Training:
    def __init__(self, kind: str, state_dtype: str, dtype: torch.dtype) -> None:
        self.model = Model(dtype)
        self.optimizer = CLASSES[kind](
            self.model.parameters(), lr=0.1, weight_decay=0.01, state_dtype=state_dtype
        )
        self.number = 0

    def train(self, steps: int) -> None:
        """Gradients of a full-size draw, cut to shards: what any number of ranks would compute."""
        for _ in range(steps):
            self.number += 1
            generator = torch.Generator().manual_seed(self.number)
            for p in self.model.parameters():
                full = torch.randn(p.full_shape, generator=generator) * torch.rand(
                    p.full_shape, generator=generator
                )
                p.grad = shard_of(p, full.pow(5).to(p.dtype)).reshape(p.shape).clone()
            self.optimizer.step()

    def everything(self) -> list[Any]:
        weights = [w.float().tolist() for w in self.model.state_dict().values()]
        state = self.optimizer.state_dict(gather=True)["state"]
        return [
            *weights,
            *({k: torch.as_tensor(v).tolist() for k, v in entry.items()} for entry in state.values()),
        ]


def stay(folder: str, kind: str, state_dtype: str, dtype: torch.dtype) -> list[Any]:
    training = Training(kind, state_dtype, dtype)
    training.train(3)
    if folder:
        checkpoint.save(folder, 3, training.model, training.optimizer)
    training.train(3)
    return training.everything()


def resume(folder: str, kind: str, state_dtype: str, dtype: torch.dtype) -> list[Any]:
    training = Training(kind, state_dtype, dtype)
    checkpoint.load(folder, training.model, training.optimizer)
    training.number = 3
    training.train(3)
    return training.everything()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("state_dtype", ("bfloat16", "int8"))
@pytest.mark.parametrize("kind", CLASSES)
def test_every_number_of_ranks_has_the_same_bits_and_resumes_a_checkpoint(
    kind: str, state_dtype: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    arguments = kind, state_dtype, dtype
    expected, *others = run_ranks(2, stay, str(tmp_path), *arguments)
    for world in (1, 3, 4):
        others += run_ranks(world, stay, "", *arguments)
        others += run_ranks(world, resume, str(tmp_path), *arguments)
    assert all(other == expected for other in others)


def updates_in_pieces(state_dtype: str) -> None:
    """The second parameter is computed in several pieces, the first of which fills up those of the first."""
    found = []
    for overlap in (False, True):
        generator, layer = torch.Generator().manual_seed(0), bmt.DistributedModule()
        layer.first = bmt.DistributedParameter(torch.randn(100, generator=generator))
        layer.second = bmt.DistributedParameter(torch.randn(70_001, generator=generator))
        block = bmt.Block(layer)  # which puts off the updates of its parameters together
        parameters = list(block.parameters())
        optimizer = bmt.optim.AdamOffloadOptimizer(
            parameters, lr=0.1, overlap=overlap, state_dtype=state_dtype
        )
        for _ in range(2):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        states = optimizer.state_dict()["state"].values()
        found.append([*(p.detach() for p in parameters), *(v for s in states for v in s.values())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("state_dtype", ("bfloat16", "int8"))
def test_updates_in_pieces_have_the_bits_of_whole_ones(state_dtype: str) -> None:
    run_ranks(1, updates_in_pieces, state_dtype)


def counted_and_predicted(state_dtype: str, dtype: torch.dtype) -> tuple[int, int, set[torch.dtype]]:
    dim = 256
    model = bmt.TransformerBlockList([bmt.Block(TanhLinear(dim)) for _ in range(2)]).to(dtype)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), state_dtype=state_dtype)
    model(torch.ones(2, dim, dtype=dtype)).sum().backward()
    optimizer.step()
    blocks = bmt.plan.describe_module(model, torch.ones(2, dim, dtype=dtype))
    sizes = bmt.plan.model_state_bytes(blocks, bmt.world_size(), state_dtype=getattr(torch, state_dtype))
    dtypes = {s["exp_avg"].dtype for s in optimizer.state.values()}
    return bmt.memory_report(model, optimizer).optimizer, sizes["optimizer"], dtypes


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    ("state_dtype", "array", "per_moment"),
    (("float32", torch.float32, 4), ("bfloat16", torch.bfloat16, 2), ("int8", torch.uint8, 1 + 1 / 32)),
)
def test_memory_is_what_the_planner_predicts(
    state_dtype: str, array: torch.dtype, per_moment: float, dtype: torch.dtype
) -> None:
    numel = 256 * 257  # of a rank, of two
    for counted, predicted, dtypes in run_ranks(2, counted_and_predicted, state_dtype, dtype):
        exact = numel * (2 * per_moment + (4 if dtype == torch.bfloat16 else 0))
        assert dtypes == {array}
        assert exact <= counted <= exact + 60_000  # distances between the arrays
        assert counted <= predicted <= exact + 200_000


def losses(state_dtype: str, steps: int) -> list[float]:
    if EXAMPLE not in sys.path:
        sys.path.insert(0, EXAMPLE)
    from models import GPT  # the example's folder is no package

    torch.manual_seed(7)
    length = 32
    model = GPT(**{**SMALL_SHAPE, "vocab_size": 256, "max_distance": length})
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=3e-3, state_dtype=state_dtype)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    found = []
    for number in range(steps):
        begins = torch.randint(len(text) - length, (16, 1), generator=torch.Generator().manual_seed(number))
        rows = text[begins + torch.arange(length + 1)]
        pos = torch.arange(length).repeat(len(rows), 1)
        logits = model(rows[:, :-1], pos, torch.ones_like(pos, dtype=torch.bool))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_losses_are_close_to_those_of_fp32_moments() -> None:
    """GPT-2 learns bytes of text."""
    steps, last = 150, 50
    ends = {}
    for state_dtype in ("float32", "bfloat16", "int8"):
        (found,) = run_ranks(1, losses, state_dtype, steps, timeout=300)
        ends[state_dtype] = sum(found[-last:]) / last
        assert ends[state_dtype] < 0.6 * found[0]
    assert ends["bfloat16"] == pytest.approx(ends["float32"], rel=0.002)
    assert ends["int8"] == pytest.approx(ends["float32"], rel=0.005)
