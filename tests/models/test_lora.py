"""A LoRA fine-tune: low-rank layers put into Blocks that exist already, the rest frozen, the difference saved alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.llama import Llama, llama_loss
from harness.parity import (
    Batch,
    Run,
    assert_same_training,
    saved,
    token_batches,
    train_plain,
    train_sharded,
)

import bmtrain as bmt

RANK = 2


class PlainLora(torch.nn.Module):
    """Around a linear layer: what it gives, plus a product of two thin matrices."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        generator = torch.Generator().manual_seed(inner.in_features + inner.out_features)
        self.down = torch.nn.Parameter(torch.randn(RANK, inner.in_features, generator=generator) * 0.3)
        self.up = torch.nn.Parameter(torch.zeros(inner.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + (x @ self.down.T) @ self.up.T


class Lora(bmt.DistributedModule):
    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        generator = torch.Generator().manual_seed(inner.in_features + inner.out_features)
        self.down = bmt.DistributedParameter(torch.randn(RANK, inner.in_features, generator=generator) * 0.3)
        self.up = bmt.DistributedParameter(torch.zeros(inner.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + (x @ self.down.T) @ self.up.T


def insert(model: torch.nn.Module, lora: Any) -> torch.nn.Module:
    """Puts low-rank layers around every query and value, and freezes everything else."""
    for param in model.parameters():
        param.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(("attention.query", "attention.value")):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], lora(module))
    return model


def is_delta(name: str) -> bool:
    return name.endswith((".up", ".down")) and "mlp" not in name


def batches() -> list[Batch]:
    return token_batches(43, 8, 11)


def built(path: str) -> torch.nn.Module:
    model = bmt.BMTrainModelWrapper(Llama())
    bmt.load(model, path)
    return insert(model, Lora)


def sharded(path: str, delta_path: str) -> Run:
    model = built(path)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    run = train_sharded(model, llama_loss, batches())
    for name, p in model.named_parameters():
        assert p.requires_grad == is_delta(name)
        if name in frozen:
            assert p.grad is None
            assert torch.equal(p.detach(), frozen[name])
    delta = {name: value for name, value in model.state_dict().items() if is_delta(name)}
    if bmt.rank() == 0:
        torch.save(delta, delta_path)
    bmt.synchronize()

    fresh = built(path)
    missing, unexpected = bmt.load(fresh, delta_path, strict=False)
    assert unexpected == []
    assert not any(is_delta(name) for name in missing) and len(missing) + len(delta) == len(run.weights)
    ids = batches()[0]
    with torch.no_grad():
        assert torch.equal(llama_loss(fresh, ids), llama_loss(model, ids))
    return run


def plain(path: str, parts: int) -> Run:
    model = Llama()
    model.load_state_dict(torch.load(path))
    return train_plain(insert(model, PlainLora), llama_loss, batches(), parts)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bc_15_bc_34_low_rank_layers_in_built_blocks(world: int, tmp_path: Path) -> None:
    torch.manual_seed(6)
    path = saved(Llama(), tmp_path / "start.pt")
    ours = run_ranks(world, sharded, path, str(tmp_path / "delta.pt"))
    assert_same_training(ours, plain(path, 1), plain(path, world))
    delta = torch.load(tmp_path / "delta.pt")
    assert len(delta) == 3 * 2 * 2 and all(is_delta(name) for name in delta)
