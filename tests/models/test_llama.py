"""A LLaMA of plain torch, wrapped: rotary buffers, RMSNorm, SwiGLU."""

from __future__ import annotations

from pathlib import Path

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


def batches() -> list[Batch]:
    return token_batches(43, 8, 11)


def sharded(path: str, file: str) -> Run:
    model = bmt.BMTrainModelWrapper(Llama())
    bmt.load(model, path, strict=True)
    assert isinstance(model.layers[0], bmt.Block)
    run = train_sharded(model, llama_loss, batches())
    ids = batches()[0][0]
    fused = bmt.loss.FusedCrossEntropy()(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert fused.item() == pytest.approx(llama_loss(model, (ids,)).item(), rel=1e-6)
    bmt.save(model, file)
    return run


def plain(path: str, parts: int) -> Run:
    model = Llama()
    model.load_state_dict(torch.load(path))
    return train_plain(model, llama_loss, batches(), parts)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bc_57_bc_65_a_wrapped_llama(world: int, tmp_path: Path) -> None:
    torch.manual_seed(5)
    path = saved(Llama(), tmp_path / "start.pt")
    ours = run_ranks(world, sharded, path, str(tmp_path / "trained.pt"))
    assert_same_training(ours, plain(path, 1), plain(path, world))
    twin = Llama()
    twin.load_state_dict(torch.load(tmp_path / "trained.pt"), strict=True)
    assert torch.equal(twin.layers[1].mlp.gate.weight, ours[0].weights["layers.1.mlp.gate.weight"])
