"""A LLaMA in plain torch, as one finds it: rotary buffers, RMSNorm, SwiGLU, a list of layers walked in Python."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Llama", "llama_loss"]


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position; one buffer is saved, one is not."""

    inverse: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.register_buffer("inverse", 100.0 ** (-torch.arange(0, dim, 2).float() / dim))
        angles = torch.arange(length)[:, None] * self.inverse
        self.register_buffer("cosine", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sine", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, dim=-1)
        length = x.shape[-2]
        return x * self.cosine[:length] + torch.cat((-other, one), dim=-1) * self.sine[:length]


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim // 2, bias=False)  # two queries share a key
        self.value = nn.Linear(dim, dim // 2, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.rotary = Rotary(dim // num_heads, length)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in (
                (self.query, self.num_heads),
                (self.key, self.num_heads // 2),
                (self.value, self.num_heads // 2),
            )
        )
        q, k, v = self.rotary(q), self.rotary(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        attended: torch.Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return attended


class SwiGLU(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Layer(nn.Module):
    def __init__(self, dim: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, num_heads, length)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = SwiGLU(dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Llama(nn.Module):
    def __init__(
        self, vocab: int = 43, dim: int = 16, num_layers: int = 3, num_heads: int = 4, length: int = 16
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, num_heads, length) for _ in range(num_layers)])
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """What the head sees."""
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask)
        normed: torch.Tensor = self.norm(x)
        return normed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.hidden(ids))
        return logits


def llama_loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean loss of predicting each next token."""
    ids = batch[0]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
