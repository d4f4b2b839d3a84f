"""GPT-2 (Radford et al., 2019): a decoder-only transformer, normalised before each layer."""

from __future__ import annotations

import math

import torch
from layers import Attention, Embedding, FeedForward, LayerNorm, Linear, Mixture

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
        num_experts: int,
    ) -> None:
        super().__init__()
        std = {"init_std": init_std, "out_init_std": out_init_std}
        self.attention_norm = LayerNorm(dim_model, bias=bias, dtype=dtype)
        self.attention = Attention(dim_model, num_heads, dim_head, bias, dtype=dtype, **std)
        self.feedforward_norm = LayerNorm(dim_model, bias=bias, dtype=dtype)
        if num_experts:
            self.feedforward = Mixture(dim_model, dim_ff, num_experts, top_k=min(2, num_experts), dtype=dtype)
        else:
            self.feedforward = FeedForward(dim_model, dim_ff, bias, dtype=dtype, **std)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
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
        num_experts: of a layer, in the place of its feed-forward layer; 0: none.
        schedule: of a pipeline, if ``init_distributed`` has made one.
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
        num_experts: int = 0,
        schedule: str = "1f1b",
    ) -> None:
        super().__init__()
        self.max_distance, self.num_experts = max_distance, num_experts
        # GPT-2 draws weights with 0.02 at its width of 768; this keeps the size of activations at other widths.
        init_std = 0.02 * math.sqrt(768 / dim_model)
        # Each layer adds twice to the residual stream; this keeps its variance from growing with depth.
        out_init_std = init_std / math.sqrt(2 * num_layers)

        self.token_embedding = Embedding(vocab_size, dim_model, dtype=dtype, init_std=init_std)
        self.position_embedding = Embedding(max_distance, dim_model, dtype=dtype, init_std=init_std)
        sizes = dim_model, dim_head, num_heads, dim_ff
        layers = [
            bmt.CheckpointBlock(
                TransformerLayer(*sizes, bias, dtype, init_std, out_init_std, num_experts),
                use_checkpoint=use_checkpoint,
                zero_level=zero_level,
                mode="PIPE" if bmt.config["pipe_enabled"] else "BLOCK",
            )
            for _ in range(num_layers)
        ]
        if bmt.config["pipe_enabled"]:
            chunks = 2 if schedule == "interleaved" else 1
            self.layers = bmt.PipelineTransformerBlockList(layers, schedule=schedule, chunks=chunks)
        else:
            self.layers = bmt.TransformerBlockList(layers)
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
        return self.scores(self.layers(x, attention_mask(mask)))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, of what the last layer returned."""
        x = self.output_norm(x)
        return self.token_embedding.projection(x) if self.head is None else self.head(x)

    def num_parameters(self, of_a_token: bool = False) -> int:
        """Numbers in the parameters of all ranks together; or without the experts that a token does not pass."""
        experts = sum(p.full_numel for name, p in self.named_parameters() if ".experts." in name)
        total = sum(p.full_numel for p in self.parameters()) + (bmt.config["ep_size"] - 1) * experts
        unused = max(self.num_experts - 2, 0) if of_a_token else 0
        return total - experts * bmt.config["ep_size"] * unused // max(self.num_experts, 1)

    def loss(
        self, input_ids: torch.Tensor, targets: torch.Tensor, loss_func: torch.nn.Module
    ) -> torch.Tensor:
        """Mean loss over this rank's tokens, in every layout of the ranks.

        Args:
            input_ids: ``(batch, seq_len)``, token ids without padding; ``seq_len`` divides by ``sp_size``, so that
                each rank of a sequence has as many tokens.
            targets: ``(batch, seq_len)``, the token after each.
            loss_func: mean of logits ``(tokens, vocab_size)`` and targets ``(tokens,)``.
        """
        part = bmt.shard_sequence({"input_ids": input_ids, "targets": targets})
        x = self.token_embedding(part["input_ids"]) + self.position_embedding(part["position_ids"])
        head = _Loss(self, loss_func)
        if bmt.config["pipe_enabled"]:  # backward of a micro-batch begins when its loss is known
            return self.layers.loss(x, head=head, labels=part["targets"])
        return head(self.layers(x), part["targets"])


class _Loss(torch.nn.Module):
    """Loss of what the last layer returned, with the parts of the model after it."""

    def __init__(self, model: GPT, loss_func: torch.nn.Module) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([model.output_norm, model.head or model.token_embedding])
        self.scores, self.loss_func = model.scores, loss_func

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss_func(self.scores(x).flatten(0, 1), targets.flatten())


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
