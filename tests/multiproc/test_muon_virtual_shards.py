"""The example's GPT-2 by Muon: the bits of torch, and with virtual shards on any number of ranks, also after a resume.

``BMTRAIN_MUON_STEPS`` sets the number of steps (8).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import bmtrain as bmt
from bmtrain.distributed import checkpoint

EXAMPLE = Path(__file__).parents[2] / "example"
STEPS = int(os.environ.get("BMTRAIN_MUON_STEPS", "8"))
SEQ, VOCAB, LR = 8, 31, 5e-3


class RoundedRoots(TorchDispatchMode):
    """Correctly rounded square roots of fp32 tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sqrt.default:
            return args[0].double().sqrt().float()
        return func(*args, **(kwargs or {}))


def parallel_layers() -> Any:
    """While it is entered, GPT has layers of which each tensor-parallel rank computes some heads and features."""
    import models.gpt
    from layers import Attention, FeedForward

    class Heads(Attention):
        def __init__(
            self, dim_model: int, num_heads: int, dim_head: int, *rest: Any, dtype: Any, **std: Any
        ) -> None:
            super().__init__(dim_model, num_heads, dim_head, *rest, dtype=dtype, **std)
            self.project_qkv = bmt.nn.ColumnParallelLinear(dim_model, 3 * num_heads * dim_head, dtype=dtype)
            self.project_out = bmt.nn.RowParallelLinear(num_heads * dim_head, dim_model, dtype=dtype)

        def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
            qkv = self.project_qkv(x)  # of the rows of all ranks
            split = qkv.unflatten(-1, (3, -1, self.dim_head)).permute(2, 0, 3, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=True)
            return self.project_out(mixed.transpose(1, 2).flatten(2))

    class Features(FeedForward):
        def __init__(self, dim_model: int, dim_ff: int, *rest: Any, dtype: Any, **std: Any) -> None:
            super().__init__(dim_model, dim_ff, *rest, dtype=dtype, **std)
            self.w_in = bmt.nn.ColumnParallelLinear(dim_model, dim_ff, dtype=dtype)
            self.w_out = bmt.nn.RowParallelLinear(dim_ff, dim_model, dtype=dtype)

    return patch.multiple(models.gpt, Attention=Heads, FeedForward=Features)


def whole_gradient(p: bmt.DistributedParameter) -> torch.Tensor:
    gradient = p.gather_grad()
    assert gradient is not None
    if p._tp_split_dim < 0:
        return gradient
    slices = bmt.distributed.all_gather(gradient)[: bmt.config["tp_size"]]
    return torch.cat(list(slices), p._tp_split_dim)


class Reference:
    """torch's optimizers over whole fp32 copies, by the gradients of the ranks."""

    def __init__(self, model: Any, optimizer: bmt.optim.MuonOptimizer) -> None:
        self.parameters = dict(model.named_parameters())
        muon = {id(p) for group in optimizer.param_groups if group["rule"] == "muon" for p in group["params"]}
        self.by_muon = [name for name, p in self.parameters.items() if id(p) in muon]
        self.parts = {name: self.divided(name, p.gather_all().float()) for name, p in self.parameters.items()}
        kinds: list[list[torch.Tensor]] = [[], []]
        for name, parts in self.parts.items():
            kinds[name not in self.by_muon] += parts
        self.optimizers = (
            torch.optim.Muon(kinds[0], lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(kinds[1], lr=LR, betas=(0.9, 0.95), weight_decay=0.1),
        )
        # The root of torch's AdamW is MKL's, which is off by a bit now and then. fp32 parameters have its bits,
        # masters of 16-bit ones have the correctly rounded root.
        is_fp32 = all(p.dtype is torch.float32 for p in self.parameters.values())
        self.roots: Any = nullcontext() if is_fp32 else RoundedRoots()

    @staticmethod
    def divided(name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        count = 3 * bmt.config["tp_size"] if "project_qkv" in name and whole.dim() == 2 else 1
        return [torch.nn.Parameter(part.detach().clone()) for part in whole.chunk(count)]

    def step(self) -> None:
        for name, p in self.parameters.items():
            gradient = whole_gradient(p)
            for part, own in zip(self.parts[name], self.divided(name, gradient.float()), strict=True):
                part.grad = own.detach()
        with self.roots:
            for optimizer in self.optimizers:
                optimizer.step()

    def check(self) -> None:
        for name, p in self.parameters.items():
            expected = torch.cat([part.detach() for part in self.parts[name]]).to(p.dtype)
            assert torch.equal(p.gather_all(), expected), name


def batches(step: int) -> Iterator[torch.Tensor]:
    """This rank's rows: virtual shard by virtual shard, or its share of a tensor-parallel group's."""
    ids = torch.randint(VOCAB, (8, SEQ + 1), generator=torch.Generator().manual_seed(step))
    if bmt.config["tp_size"] > 1:
        yield ids.chunk(bmt.world_size())[bmt.rank()]
        return
    for shard in bmt.virtual_shards(step):
        yield shard.of(ids)


def train(
    dtype: str, level: int, folder: str, save_at: int | None, offload: bool = False
) -> tuple[int, dict[str, torch.Tensor]]:
    """Trains to the end, from the checkpoint if there is one; returns the first step and all bits."""
    sys.path.insert(0, str(EXAMPLE))
    from models import GPT

    tp_size = bmt.config["tp_size"]
    parallel = parallel_layers() if tp_size > 1 else nullcontext()
    with bmt.default_policy(bmt.BlockPolicy(level=level)), parallel:
        model = GPT(2, VOCAB, 16, 8, 2, 32, SEQ, dtype=getattr(torch, dtype), zero_level=level)
    bmt.init_parameters(model)
    splits = {"*.project_qkv": 3 * tp_size}
    muon = bmt.optim.MuonOffloadOptimizer if offload else bmt.optim.MuonOptimizer
    optimizer = muon(model.named_parameters(), lr=LR, adjust_lr_fn="match_rms_adamw", splits=splits)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    first = 0
    if save_at is None and checkpoint.latest(folder) is not None:
        first = checkpoint.load(folder, model, manager).step
    reference = Reference(model, optimizer) if first == 0 else None
    for step in range(first, STEPS):
        if step == save_at:
            checkpoint.save(folder, step, model, manager)
        manager.zero_grad()
        for rows in batches(step):
            position = torch.arange(SEQ).expand(len(rows), SEQ)
            logits = model(rows[:, :-1], position, torch.ones(len(rows), SEQ, dtype=torch.bool))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            manager.backward(loss / tp_size)
        manager.clip_grad_norm(optimizer.param_groups, 0.5)
        if reference is not None:
            reference.step()
        manager.step()
    if reference is not None:
        reference.check()
    values = dict(model.state_dict())
    for index, entry in optimizer.state_dict(gather=True)["state"].items():
        values.update({f"{index}.{name}": torch.as_tensor(value) for name, value in entry.items()})
    if dtype == "float32":  # the host has a master of fp32 parameters too, which is the parameter
        values = {name: value for name, value in values.items() if not name.endswith("._param_fp32")}
    return first, values


def run_on(world: int, shards: int, *arguments: Any) -> tuple[int, dict[str, torch.Tensor]]:
    ranks = run_ranks(world, train, *arguments, init={"virtual_shards": shards}, timeout=600)
    assert all(same_bits(values, ranks[0][1]) for _, values in ranks)
    return ranks[0]


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name, value in one.items()
    )


@pytest.mark.parametrize(
    ("dtype", "shards", "level"),
    [("float32", 8, 3), ("bfloat16", 4, 3), ("float32", 2, 2), ("bfloat16", 1, 3)],
)
def test_muon_has_the_same_bits_on_any_number_of_ranks(
    dtype: str, shards: int, level: int, tmp_path: Path
) -> None:
    worlds = [world for world in (1, 2, 4) if shards % world == 0]
    _, values = run_on(worlds[-1], shards, dtype, level, str(tmp_path), STEPS // 2)
    for world in worlds[:-1]:
        assert same_bits(run_on(world, shards, dtype, level, str(tmp_path / "none"), None)[1], values)
    first, resumed = run_on(worlds[0], shards, dtype, level, str(tmp_path), None, True)
    assert first == STEPS // 2
    assert same_bits(resumed, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("world", "offload"), [(2, True), (4, False)])
def test_tensor_parallel_weights_are_those_of_torch(
    world: int, offload: bool, dtype: str, tmp_path: Path
) -> None:
    run_ranks(world, train, dtype, 3, str(tmp_path), None, offload, init={"tp_size": 2}, timeout=600)
