"""A model in plain torch whose sequences ranks divide."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Layer", "Model", "make_plain"]


class Layer(nn.Module):
    """A layer in plain torch, which calls torch's attention."""

    def __init__(self, dim: int, num_heads: int, num_kept: int) -> None:
        super().__init__()
        self.num_heads, self.num_kept = num_heads, num_kept
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * num_kept * (dim // num_heads))
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2 * self.num_kept, -1)).transpose(1, 2).chunk(2, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Model(nn.Module):
    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.layers = nn.ModuleList([*(Layer(32, 4, 2) for _ in range(2)), *extra])
        self.head = nn.Linear(32, 50)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def make_plain() -> nn.Module:
    torch.manual_seed(3)
    return Model()
