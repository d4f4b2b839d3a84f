"""Virtual shards in a pipeline have the bits of one process without one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks

import bmtrain as bmt

SHARDS, ROWS, SEQ, DIM, VOCAB, LAYERS, STEPS = 8, 3, 5, 10, 23, 4, 3


class Layer(torch.nn.Module):
    """A layer that draws numbers of torch and of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(DIM)
        self.up, self.down = torch.nn.Linear(DIM, 4 * DIM), torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor, more: tuple[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        bias = more[0]
        y = F.dropout(self.down(F.gelu(self.up(self.norm(x)) + bias.sum())), 0.2, self.training)
        return x + y * scale * random.random() + bias


class Head(torch.nn.Module):
    """Reads the embedding."""

    def __init__(self, tokens: torch.nn.Embedding) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(DIM)
        self.tokens = tokens

    def forward(self, x: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm(x + bias), 0.1, self.training)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1).float(), labels.flatten())


class Model(torch.nn.Module):
    """Where the loss is outside, the layers run twice, and their inputs count."""

    def __init__(self, dtype: str, schedule: str | None, policies: list[dict[str, Any]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        made = [bmt.BMTrainModelWrapper(part.to(getattr(torch, dtype))) for part in self._parts()]
        self.tokens, self.head, *layers = made
        self.head.tokens = self.tokens
        self.layers: Any
        blocks = [
            bmt.Block(layer, mode="PIPE", policy=bmt.BlockPolicy(**policies[index % len(policies)]))
            for index, layer in enumerate(layers)
        ]
        chunks = 2 if schedule == "interleaved" else 1
        self.layers = bmt.PipelineTransformerBlockList(blocks, schedule=schedule or "1f1b", chunks=chunks)
        self.loss_inside = schedule is not None

    @staticmethod
    def _parts() -> list[torch.nn.Module]:
        tokens = torch.nn.Embedding(VOCAB, DIM)
        return [tokens, Head(torch.nn.Embedding(1, 1)), *(Layer() for _ in range(LAYERS))]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.tokens(ids), 0.1, self.training)
        scale = (1 + ids[0, 0] / VOCAB).to(x.dtype)  # another one in each shard
        bias = self.tokens(torch.arange(SEQ)) / 10  # trained, and read after the layers, too
        if self.loss_inside:
            return self.layers.loss(x, (bias,), scale=scale, head=self.head, labels=(ids.roll(1), bias))
        x, states = self.layers(x, (bias,), scale=scale, return_hidden_states=True)
        return self.head(self.layers(x + states.mean(0), (bias,), scale=scale), ids.roll(1), bias)


def train(
    dtype: str, schedule: str | None, policies: list[dict[str, Any]], loss_scale: float | None
) -> list[Any]:
    model = Model(dtype, schedule, policies)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2, weight_decay=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=loss_scale, loss_scale_steps=2)
    manager.add_optimizer(optimizer)
    found: list[Any] = []
    for step in range(STEPS):
        batch = torch.randint(VOCAB, (ROWS * SHARDS, SEQ), generator=torch.Generator().manual_seed(step))
        manager.zero_grad()
        shards, losses = bmt.virtual_shards(step), []
        for shard in shards:
            losses.append(model(shard.of(batch)))
            between = random.random(), torch.rand(1).item()
            manager.backward(losses[-1])
            found.append(
                (step, shard.index, losses[-1].item(), *between, random.random(), torch.rand(1).item())
            )
        norm = manager.clip_grad_norm(optimizer.param_groups, 0.5)
        manager.step()
        found.append((step, "end", shards.mean(losses).item(), norm.item(), manager.loss_scale))
    entries = sorted(optimizer.state_dict(gather=True)["state"].items())
    for index, entry in entries:
        found += [(index, name, torch.as_tensor(value).tolist()) for name, value in sorted(entry.items())]
    return found + [(name, value.tolist()) for name, value in model.state_dict().items()]


CASES = [
    # ranks, stages, dtype, loss scale, schedule (None: the loss outside), policies
    (2, 2, "float32", None, None, [{}]),
    (4, 2, "float32", None, "gpipe", [{}]),
    (4, 4, "float32", None, "zb1p", [{}]),
    (2, 2, "float32", None, "interleaved", [{}]),
    (6, 2, "bfloat16", None, "1f1b", [{"level": 0}, {"level": 1, "recompute": "selective"}]),
    (8, 4, "float16", 2.0**17, None, [{"level": 0}, {"level": 2}]),
    (8, 2, "float16", 2.0**17, "1f1b", [{"level": 3, "recompute": "off"}, {"zero_size": 2}]),
]


@pytest.mark.parametrize(("ranks", "stages", "dtype", "loss_scale", "schedule", "policies"), CASES)
def test_a_pipeline_has_the_bits_of_one_process(ranks, stages, dtype, loss_scale, schedule, policies) -> None:
    arguments = dtype, schedule, policies, loss_scale
    whole = run_ranks(1, train, *arguments, init={"virtual_shards": SHARDS})[0]
    known = {entry[:-1] if len(entry) < 4 else entry[:2]: entry for entry in whole}
    for found in run_ranks(ranks, train, *arguments, init={"virtual_shards": SHARDS, "pipe_size": stages}):
        for entry in found:
            assert entry == known[entry[:-1] if len(entry) < 4 else entry[:2]]


def misuse() -> None:
    """A backward whose sums have ended."""
    layers = bmt.PipelineTransformerBlockList(
        [bmt.Block(bmt.nn.Linear(DIM, DIM), mode="PIPE") for _ in range(2)]
    )
    head = Mean()
    x = torch.ones(ROWS, DIM)
    for _ in bmt.virtual_shards(0):
        loss = layers.loss(x, head=head)
        loss.backward()
        late = layers.loss(x, head=head)
    with pytest.raises(RuntimeError, match="call backward in the loop"):
        late.backward()


class Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def test_misuse_raises() -> None:
    run_ranks(2, misuse, init={"virtual_shards": 2, "pipe_size": 2})
