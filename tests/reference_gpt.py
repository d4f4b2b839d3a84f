"""The example's GPT-2 in plain PyTorch: same keys, same arithmetic, same draws from the generator. No bmtrain."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["SMALL_SHAPE", "ReferenceGPT"]

#: Of a model that trains in moments; ``max_distance`` is missing.
SMALL_SHAPE = {
    "num_layers": 3,
    "vocab_size": 61,
    "dim_model": 32,
    "dim_head": 8,
    "num_heads": 4,
    "dim_ff": 80,
}


class _Linear(nn.Module):
    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, std: float = 0.02
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None
        )
        self.std = std

    def reset(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class _Embedding(nn.Module):
    def __init__(self, num_embeddings: int, dim: int, dtype: torch.dtype, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, dim, dtype=dtype))
        self.std = std

    def reset(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class _LayerNorm(nn.Module):
    def __init__(self, dim: int, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(dim, dtype=dtype)) if bias else None)

    def reset(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class _Attention(nn.Module):
    def __init__(
        self, dim: int, heads: int, dim_head: int, bias: bool, dtype: torch.dtype, std: float, out_std: float
    ):
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        self.project_qkv = _Linear(dim, 3 * heads * dim_head, bias, dtype, std)
        self.project_out = _Linear(heads * dim_head, dim, bias, dtype, out_std)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, seq_len, _ = x.shape
        qkv = self.project_qkv(x).view(batch, seq_len, 3, self.heads, self.dim_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, seq_len, -1))


class _FeedForward(nn.Module):
    def __init__(self, dim: int, dim_ff: int, bias: bool, dtype: torch.dtype, std: float, out_std: float):
        super().__init__()
        self.w_in = _Linear(dim, dim_ff, bias, dtype, std)
        self.w_out = _Linear(dim_ff, dim, bias, dtype, out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w_out(F.gelu(self.w_in(x), approximate="tanh"))


class _Layer(nn.Module):
    def __init__(
        self,
        dim: int,
        heads: int,
        dim_head: int,
        dim_ff: int,
        bias: bool,
        dtype: torch.dtype,
        std: float,
        out_std: float,
    ):
        super().__init__()
        self.attention_norm = _LayerNorm(dim, bias, dtype)
        self.attention = _Attention(dim, heads, dim_head, bias, dtype, std, out_std)
        self.feedforward_norm = _LayerNorm(dim, bias, dtype)
        self.feedforward = _FeedForward(dim, dim_ff, bias, dtype, std, out_std)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.feedforward(self.feedforward_norm(x))


class ReferenceGPT(nn.Module):
    """What ``models.GPT`` of the example computes, with its constructor; initialised at once."""

    def __init__(
        self,
        num_layers: int,
        vocab_size: int,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        max_distance: int,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        *,
        tied: bool = True,
    ) -> None:
        super().__init__()
        std = 0.02 * math.sqrt(768 / dim_model)
        out_std = std / math.sqrt(2 * num_layers)
        self.token_embedding = _Embedding(vocab_size, dim_model, dtype, std)
        self.position_embedding = _Embedding(max_distance, dim_model, dtype, std)
        self.layers = nn.ModuleList(
            _Layer(dim_model, num_heads, dim_head, dim_ff, bias, dtype, std, out_std)
            for _ in range(num_layers)
        )
        self.output_norm = _LayerNorm(dim_model, bias, dtype)
        self.head = None if tied else _Linear(dim_model, vocab_size, False, dtype, std)
        for module in self.modules():
            if hasattr(module, "reset"):
                module.reset()

    def forward(self, input_ids: torch.Tensor, pos: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seq_len = input_ids.size(1)
        causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        visible = ((causal & mask[:, None, :]) | torch.eye(seq_len, dtype=torch.bool))[:, None]
        x = self.token_embedding(input_ids) + self.position_embedding(pos)
        for layer in self.layers:
            x = layer(x, visible)
        x = self.output_norm(x)
        return F.linear(x, self.token_embedding.weight) if self.head is None else self.head(x)
