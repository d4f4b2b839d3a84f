"""The position-wise feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt

from .linear import Linear

__all__ = ["FeedForward", "Mixture"]


class FeedForward(bmt.DistributedModule):
    """``w_out(gelu(w_in(x)))``, with the tanh form of GELU that GPT-2 uses.

    Args:
        dim_model: size of input and output.
        dim_ff: size of the hidden layer.
        bias: whether the two linear maps have a bias.
        dtype: dtype of the parameters.
        init_std: standard deviation for the weight of ``w_in``.
        out_init_std: standard deviation for the weight of ``w_out``, which adds to the residual stream.
    """

    def __init__(
        self,
        dim_model: int,
        dim_ff: int,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        init_std: float = 0.02,
        out_init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.w_in = Linear(dim_model, dim_ff, bias, dtype=dtype, init_std=init_std)
        self.w_out = Linear(dim_ff, dim_model, bias, dtype=dtype, init_std=out_init_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w_out(F.gelu(self.w_in(x), approximate="tanh"))


class Mixture(bmt.nn.MoE):
    """Experts in the place of a feed-forward layer; each token passes through two. They are not kept in balance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]
