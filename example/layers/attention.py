"""Multi-head self-attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt

from .linear import Linear

__all__ = ["Attention"]


class Attention(bmt.DistributedModule):
    """Multi-head self-attention; queries, keys and values come out of one linear map.

    Args:
        dim_model: size of input and output.
        num_heads: number of heads.
        dim_head: size of a head; ``num_heads * dim_head`` need not be ``dim_model``.
        bias: whether the linear maps have a bias.
        dtype: dtype of the parameters.
        init_std: standard deviation for the weight of ``project_qkv``.
        out_init_std: standard deviation for the weight of ``project_out``, which adds to the residual stream.
    """

    def __init__(
        self,
        dim_model: int,
        num_heads: int,
        dim_head: int,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        init_std: float = 0.02,
        out_init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dim_head = dim_head
        self.project_qkv = Linear(dim_model, 3 * num_heads * dim_head, bias, dtype=dtype, init_std=init_std)
        self.project_out = Linear(num_heads * dim_head, dim_model, bias, dtype=dtype, init_std=out_init_std)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend.

        Args:
            x: ``(batch, seq_len, dim_model)``.
            mask: bool, broadcastable to ``(batch, num_heads, seq_len, seq_len)``; True where the query (third
                dimension) may look at the key (last dimension). Every query needs at least one key. None: each
                looks at itself and all before it, also on ranks that divide a sequence.

        Returns:
            ``(batch, seq_len, dim_model)``.
        """
        batch, seq_len, _ = x.shape
        qkv = self.project_qkv(x).view(batch, seq_len, 3, self.num_heads, self.dim_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, num_heads, seq_len, dim_head)
        if mask is None:
            mixed = bmt.nn.functional.attention(query, key, value, causal=True)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, seq_len, -1))
