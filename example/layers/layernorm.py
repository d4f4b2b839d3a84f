"""Layer normalisation with sharded scale and shift."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt

__all__ = ["LayerNorm"]


class LayerNorm(bmt.DistributedModule):
    """Layer normalisation over the last dimension (Ba et al., 2016).

    Args:
        dim_norm: size of the last dimension.
        eps: added to the variance.
        bias: whether to learn a shift as well as a scale.
        dtype: dtype of the parameters, torch's default if None; statistics are float32 in any case.
    """

    def __init__(
        self, dim_norm: int, *, eps: float = 1e-5, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.dim_norm = dim_norm
        self.eps = eps
        self.weight = bmt.DistributedParameter(
            torch.empty(dim_norm, dtype=dtype), init_method=bmt.ParameterInitializer(torch.nn.init.ones_)
        )
        if bias:
            self.bias = bmt.DistributedParameter(
                torch.empty(dim_norm, dtype=dtype), init_method=bmt.ParameterInitializer(torch.nn.init.zeros_)
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.dim_norm,), self.weight, self.bias, self.eps)
