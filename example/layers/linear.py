"""Linear map with a sharded weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt

__all__ = ["Linear"]


class Linear(bmt.DistributedModule):
    """``y = x W^T + b``.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether to add ``b``.
        dtype: dtype of the parameters, torch's default if None.
        init_std: standard deviation of the normal distribution that ``W`` is drawn from; ``b`` starts at 0.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(out_features, in_features, dtype=dtype),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=init_std),
        )
        if bias:
            self.bias = bmt.DistributedParameter(
                torch.empty(out_features, dtype=dtype),
                init_method=bmt.ParameterInitializer(torch.nn.init.zeros_),
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
