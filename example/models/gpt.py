"""GPT-2 (Radford et al., 2019): a decoder-only transformer, normalised before each layer."""

from __future__ import annotations

import math

import torch
from layers import Attention, Embedding, FeedForward, LayerNorm, Linear

import bmtrain as bmt

__all__ = ["GPT"]


class TransformerLayer(bmt.DistributedModule):
    """One layer: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(
        self,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        bias: bool,
        dtype: torch.dtype | None,
        init_std: float,
        out_init_std: float,
    ) -> None:
        super().__init__()
        std = {"init_std": init_std, "out_init_std": out_init_std}
        self.attention_norm = LayerNorm(dim_model, bias=bias, dtype=dtype)
        self.attention = Attention(dim_model, num_heads, dim_head, bias, dtype=dtype, **std)
        self.feedforward_norm = LayerNorm(dim_model, bias=bias, dtype=dtype)
        self.feedforward = FeedForward(dim_model, dim_ff, bias, dtype=dtype, **std)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.feedforward(self.feedforward_norm(x))


class GPT(bmt.DistributedModule):
    """A GPT-2 language model.

    Args:
        num_layers: number of transformer layers.
        vocab_size: number of token ids.
        dim_model: width of the residual stream.
        dim_head: size of an attention head.
        num_heads: number of attention heads.
        dim_ff: width of the feed-forward layers.
        max_distance: number of positions, the longest sequence.
        bias: whether linear maps and norms have a bias.
        dtype: dtype of parameters and activations: float32, bfloat16 or float16.
        tied: use the token embedding as the output head too, as GPT-2 does; False: a weight of its own.
        use_checkpoint: recompute a layer's activations in backward instead of keeping them.
        zero_level: 3 frees a layer's gathered parameters after forward, 2 keeps them until its backward.
    """

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
        dtype: torch.dtype | None = None,
        *,
        tied: bool = True,
        use_checkpoint: bool = True,
        zero_level: int = 3,
    ) -> None:
        super().__init__()
        self.max_distance = max_distance
        # GPT-2 draws weights with 0.02 at its width of 768; this keeps the size of activations at other widths.
        init_std = 0.02 * math.sqrt(768 / dim_model)
        # Each layer adds twice to the residual stream; this keeps its variance from growing with depth.
        out_init_std = init_std / math.sqrt(2 * num_layers)

        self.token_embedding = Embedding(vocab_size, dim_model, dtype=dtype, init_std=init_std)
        self.position_embedding = Embedding(max_distance, dim_model, dtype=dtype, init_std=init_std)
        self.layers = bmt.TransformerBlockList(
            [
                bmt.CheckpointBlock(
                    TransformerLayer(
                        dim_model, dim_head, num_heads, dim_ff, bias, dtype, init_std, out_init_std
                    ),
                    use_checkpoint=use_checkpoint,
                    zero_level=zero_level,
                )
                for _ in range(num_layers)
            ]
        )
        self.output_norm = LayerNorm(dim_model, bias=bias, dtype=dtype)
        self.head = (
            None if tied else Linear(dim_model, vocab_size, bias=False, dtype=dtype, init_std=init_std)
        )

    def forward(self, input_ids: torch.Tensor, pos: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Scores of the next token.

        Args:
            input_ids: ``(batch, seq_len)``, token ids.
            pos: ``(batch, seq_len)``, position of each token, below ``max_distance``.
            mask: ``(batch, seq_len)``, bool, False where ``input_ids`` is padding.

        Returns:
            Logits ``(batch, seq_len, vocab_size)``, in the dtype of the parameters; padding's mean nothing.
        """
        seq_len = input_ids.size(1)
        if seq_len > self.max_distance:
            raise ValueError(
                f"input_ids: expected at most max_distance={self.max_distance} tokens in a row, got {seq_len}"
            )
        x = self.token_embedding(input_ids) + self.position_embedding(pos)
        x = self.layers(x, attention_mask(mask))
        x = self.output_norm(x)
        return self.token_embedding.projection(x) if self.head is None else self.head(x)


def attention_mask(valid: torch.Tensor) -> torch.Tensor:
    """Which key each query may look at: itself, and every token before it that is not padding.

    Args:
        valid: ``(batch, seq_len)``, bool, False at padding.

    Returns:
        Bool ``(batch, 1, seq_len, seq_len)``. Its diagonal is True even at padding: a query without any key
        would come out of the softmax as NaN.
    """
    seq_len = valid.size(1)
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool, device=valid.device).tril()
    itself = torch.eye(seq_len, dtype=torch.bool, device=valid.device)
    return ((causal & valid[:, None, :]) | itself)[:, None]
