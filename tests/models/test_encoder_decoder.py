"""An encoder-decoder in the manner of T5: position biases shared by all layers, None for what a layer lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from harness.kits import BMTRAIN, TORCH, TORCH_RECOMPUTED, Kit
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

VOCAB, DIM, HEADS, BATCH, SOURCE, TARGET = 37, 16, 4, 8, 7, 5


def encoder_decoder(kit: Kit) -> torch.nn.Module:
    class PositionBias(kit.module):
        """One learnt number per distance and head, for all layers."""

        def __init__(self, num_distances: int) -> None:
            super().__init__()
            self.table = kit.parameter(torch.randn(num_distances, HEADS) * 0.1)

        def forward(self, rows: int, columns: int) -> torch.Tensor:
            distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
            bias = F.embedding(distance.clamp(-4, 4) + 4, self.table)
            return bias.permute(2, 0, 1).unsqueeze(0)

    class Attention(kit.module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = kit.layer_norm(DIM)
            self.query = kit.linear(DIM, DIM, bias=False)
            self.key = kit.linear(DIM, DIM, bias=False)
            self.value = kit.linear(DIM, DIM, bias=False)
            self.out = kit.linear(DIM, DIM, bias=False)

        def forward(
            self, x: torch.Tensor, memory: Any = None, bias: Any = None, mask: Any = None
        ) -> torch.Tensor:
            queries = self.norm(x)
            source = queries if memory is None else memory
            split = [
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for t in (self.query(queries), self.key(source), self.value(source))
            ]
            scores = split[0] @ split[1].transpose(-1, -2)
            if bias is not None:
                scores = scores + bias
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            return x + self.out((scores.softmax(-1) @ split[2]).transpose(1, 2).flatten(2))

    class FeedForward(kit.module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = kit.layer_norm(DIM)
            self.up = kit.linear(DIM, 3 * DIM, bias=False)
            self.down = kit.linear(3 * DIM, DIM, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.relu(self.up(self.norm(x))))

    class Layer(kit.module):
        def __init__(self, is_decoder: bool) -> None:
            super().__init__()
            self.self_attention = Attention()
            self.cross_attention = Attention() if is_decoder else None
            self.feed_forward = FeedForward()

        def forward(
            self,
            x: Any,
            mask: Any,
            bias: Any,
            memory: Any = None,
            cross_mask: Any = None,
            cross_bias: Any = None,
        ) -> torch.Tensor:
            x = self.self_attention(x, None, bias, mask)
            if self.cross_attention is not None:
                x = self.cross_attention(x, memory, cross_bias, cross_mask)
            return self.feed_forward(x)

    class Model(kit.module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = kit.embedding(VOCAB, DIM)
            self.encoder_bias = PositionBias(9)
            self.decoder_bias = PositionBias(9)
            self.encoder = kit.layers([Layer(False) for _ in range(3)])
            self.decoder = kit.layers([Layer(True) for _ in range(2)])
            self.encoder_norm = kit.layer_norm(DIM)
            self.decoder_norm = kit.layer_norm(DIM)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            bias = self.encoder_bias(source.shape[1], source.shape[1])
            memory = self.encoder(self.embedding(source), None, bias, None, None, None)
            memory = self.encoder_norm(memory)
            length = target.shape[1]
            bias = self.decoder_bias(length, length)
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            x = self.decoder(self.embedding(target), causal, bias, memory, None, None)
            return F.linear(self.decoder_norm(x) * DIM**-0.5, self.embedding.weight)

    return Model()


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    source, target = batch
    logits = model(source, target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def batches() -> list[Batch]:
    return token_batches(VOCAB, BATCH, SOURCE, TARGET + 1)


def sharded(path: str) -> Run:
    model = encoder_decoder(BMTRAIN)
    bmt.init_parameters(model)
    bmt.load(model, path)
    return train_sharded(model, loss_of, batches())


def plain(path: str, parts: int, kit: Kit = TORCH) -> Run:
    model = encoder_decoder(kit)
    model.load_state_dict(torch.load(path))
    return train_plain(model, loss_of, batches(), parts)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bc_23_none_arguments_and_a_position_bias_trained_through_all_layers(
    world: int, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    path = saved(encoder_decoder(TORCH), tmp_path / "start.pt")
    ours = run_ranks(world, sharded, path)
    # The bias gets a gradient from each layer: a layer that runs again adds up its own uses first, in torch as well.
    whole = plain(path, 1, TORCH_RECOMPUTED if world == 1 else TORCH)
    assert_same_training(ours, whole, whole if world == 1 else plain(path, world))
    assert whole.gradients["encoder_bias.table"].any()
    assert whole.losses[-1] < whole.losses[0] * 1.05
