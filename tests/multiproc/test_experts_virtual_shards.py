"""Mixtures of experts have the same bits however many ranks their experts are divided over, with virtual shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain
from bmtrain._shards.full_values import full_value

SHARDS, EXPERTS, TOP_K, TOKENS = 6, 4, 2, 9
LAYOUTS = [(1, 1), (2, 2), (4, 2), (4, 4)]  # the last micro-step of 4 ranks has 2 shards
#: Added to the experts' logits.
ROUTED = {"free": [0.0, 0, 0, 0], "all to two": [20.0, 0, 0, 20], "none to one": [0.0, -20, 0, 0]}


class Layer(bmtrain.DistributedModule):
    """A mixture, and experts that are called twice."""

    def __init__(self, dim: int, hidden: int, **options: Any) -> None:
        super().__init__()
        self.moe = bmtrain.nn.MoE(dim, hidden, EXPERTS, TOP_K, **options)
        self.twice = bmtrain.nn.Experts(dim, hidden, EXPERTS, **options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, logits = self.moe(torch.tanh(x))
        index = torch.arange(len(x)).view(-1, 1) % EXPERTS
        for _ in range(2):
            y = y + self.twice(y, index, torch.ones_like(y[:, :1]))
        return x + torch.dropout(y, 0.1, self.training), logits


class Model(bmtrain.DistributedModule):
    """Two layers in Blocks, of which the last runs twice, and one outside."""

    def __init__(self, recompute: str, dim: int, hidden: int, **options: Any) -> None:
        super().__init__()
        policy = bmtrain.BlockPolicy(recompute=recompute)
        self.blocks = torch.nn.ModuleList(
            bmtrain.Block(Layer(dim, hidden, **options), policy=policy) for _ in range(2)
        )
        self.last = Layer(dim, hidden, **options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_logits = []
        for layer in (*self.blocks, self.blocks[1], self.last):
            x, logits = layer(x)
            all_logits.append(logits)
        return x, torch.cat(all_logits)


def train(routing: str, recompute: str, dim: int, hidden: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = Model(recompute, dim, hidden, dtype=dtype)
    bmtrain.init_parameters(model)
    for name, param in model.named_parameters():
        if name.endswith("router.weight"):
            router = full_value(param)
            router[:, 0] += torch.tensor(ROUTED[routing], dtype=dtype)
            param.load(router)
    optimizer = bmtrain.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmtrain.optim.OptimManager()
    manager.add_optimizer(optimizer)
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        batch = torch.randn(SHARDS * TOKENS, dim, generator=torch.Generator().manual_seed(step)).to(dtype)
        batch[:, 0] = 3  # about 1 after tanh, for `ROUTED`
        manager.zero_grad()
        shards, losses = bmtrain.virtual_shards(step), []
        for shard in shards:
            y, logits = model(shard.of(batch))
            losses.append(y.float().square().mean() + 0.01 * torch.logsumexp(logits, -1).square().mean())
            manager.backward(losses[-1])
        if step == 0:
            for name, param in model.named_parameters():
                gradient = param.gather_grad()
                parts = bmtrain.distributed.all_gather(gradient, comm=bmtrain.config["ep_comm"])
                found[f"gradient {name}"] = parts.flatten(0, 1) if param._ep_mode else gradient
        found[f"norm {step}"] = manager.clip_grad_norm(optimizer.param_groups, 0.5)
        manager.step()
        found[f"loss {step}"] = shards.mean(losses)
    return {**found, **{name: full_value(param) for name, param in model.named_parameters()}}


def bits(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in values.items()}


@pytest.mark.parametrize(
    ("routing", "recompute", "dim", "hidden", "dtype"),
    [
        ("free", "off", 16, 24, torch.float32),
        ("all to two", "whole", 10, 7, torch.float32),  # not in one call of torch
        ("none to one", "whole", 16, 24, torch.bfloat16),
    ],
)
def test_any_division_of_experts_has_the_same_bits(
    routing: str, recompute: str, dim: int, hidden: int, dtype: torch.dtype
) -> None:
    runs = [
        run_ranks(
            world,
            train,
            routing,
            recompute,
            dim,
            hidden,
            dtype,
            init={"ep_size": ep, "virtual_shards": SHARDS},
        )
        for world, ep in LAYOUTS
    ]
    expected = bits(runs[0][0])
    for (world, ep), ranks in zip(LAYOUTS, runs, strict=True):
        for found in map(bits, ranks):
            assert found.keys() == expected.keys()
            differing = [name for name in found if found[name] != expected[name]]
            assert not differing, f"{world} ranks, ep_size {ep}"
