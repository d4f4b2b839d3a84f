"""A BERT: a pooler that nobody uses, and a decoder of which the parent reads the bias."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from harness.kits import BMTRAIN, TORCH, Kit
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

VOCAB, DIM, HEADS, BATCH, LENGTH = 41, 16, 2, 8, 9


def bert(kit: Kit) -> torch.nn.Module:
    class Embeddings(kit.module):
        def __init__(self) -> None:
            super().__init__()
            self.word = kit.embedding(VOCAB, DIM)
            self.position = kit.embedding(LENGTH, DIM)
            self.norm = kit.layer_norm(DIM)
            self.register_buffer("position_ids", torch.arange(LENGTH))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.norm(self.word(ids) + self.position(self.position_ids[: ids.shape[1]]))

    class Layer(kit.module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = kit.linear(DIM, 3 * DIM, bias=False)
            self.out = kit.linear(DIM, DIM)
            self.up = kit.linear(DIM, 2 * DIM)
            self.down = kit.linear(2 * DIM, DIM)
            self.norms = torch.nn.ModuleList([kit.layer_norm(DIM), kit.layer_norm(DIM)])

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            scores = (q @ k.transpose(-1, -2) * (DIM // HEADS) ** -0.5).masked_fill(
                ~mask[:, None, None], float("-inf")
            )
            x = self.norms[0](x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
            return self.norms[1](x + self.down(F.gelu(self.up(x))))

    class Pooler(kit.module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = kit.linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.dense(x[:, 0]))

    class Decoder(kit.module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = kit.parameter(torch.zeros(VOCAB))

    class Model(kit.module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = Embeddings()
            self.encoder = kit.layers([Layer() for _ in range(3)])
            self.pooler = Pooler()
            self.dense = kit.linear(DIM, DIM)
            self.norm = kit.layer_norm(DIM)
            self.decoder = Decoder()

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = self.encoder(self.embeddings(ids), mask)
            x = self.norm(F.gelu(self.dense(x)))
            return F.linear(x, self.embeddings.word.weight, self.decoder.bias)

    return Model()


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    ids, targets = batch
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, -2:] = False
    return F.cross_entropy(model(ids, mask).flatten(0, 1), targets.flatten())


def batches() -> list[Batch]:
    return token_batches(VOCAB, BATCH, LENGTH, LENGTH)


def sharded(path: str) -> Run:
    model = bert(BMTRAIN)
    bmt.init_parameters(model)
    bmt.load(model, path)
    run = train_sharded(model, loss_of, batches())
    assert model.pooler.dense._parameters["weight"].grad is None
    assert model.decoder._parameters["bias"].grad.any() or not model.decoder._parameters["bias"].numel()
    return run


def plain(path: str, parts: int) -> Run:
    model = bert(TORCH)
    model.load_state_dict(torch.load(path))
    return train_plain(model, loss_of, batches(), parts)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bc_11_bc_42_a_bias_read_by_the_parent_and_a_pooler_without_gradients(
    world: int, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    start = bert(TORCH)
    path = saved(start, tmp_path / "start.pt")
    ours = run_ranks(world, sharded, path)
    whole = plain(path, 1)
    assert_same_training(ours, whole, plain(path, world))
    assert torch.equal(ours[0].weights["pooler.dense.weight"], start.pooler.dense.weight)
