"""A GPT in plain torch, to be sharded in different ways by the step benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, seq, dim)`` to the same."""
        batch, seq, dim = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, dim))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return hidden


class GPT(nn.Module):
    """Token and position embeddings, layers, a norm and a head; returns the mean cross-entropy of the next token."""

    def __init__(self, num_layers: int, dim: int, num_heads: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.layers = nn.ModuleList([Layer(dim, num_heads) for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """``(batch, seq + 1)`` ids to a scalar."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        embedded = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=ids.device))
        x = embedded
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x.to(embedded.dtype)))  # layers may compute in a dtype of their own
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
