"""The linear layer, sharded."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..layer import DistributedModule
from ._divide import check_features, check_layer, parameter

__all__ = ["Linear", "OpLinear"]


class OpLinear:
    """``OpLinear.apply(x, weight, bias=None)``: ``x @ weight.T + bias``, differentiable."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)


class LinearLayer(DistributedModule):
    """Sizes and description that linear layers share."""

    #: Options shown by ``repr``, beside the sizes.
    _shown: ClassVar[tuple[str, ...]] = ()

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        check_layer(dtype, in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features

    def extra_repr(self) -> str:
        options = "".join(f", {name}={getattr(self, name)}" for name in self._shown)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self._parameters['bias'] is not None}{options}"
        )


class Linear(LinearLayer):
    """:class:`torch.nn.Linear` with sharded parameters.

    ``init_parameters`` draws the weight with ``xavier_normal_`` and sets the bias to zero.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        bias: whether to add a bias.
        dtype: of the parameters; default: torch's.

    Raises:
        TypeError: a size is no integer, or ``dtype`` is not one of floats.
        ValueError: a size is negative.

    Example:
        >>> bmtrain.nn.Linear(4, 2, dtype=torch.bfloat16)(torch.ones(3, 4, dtype=torch.bfloat16)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        self.weight = parameter((out_features, in_features), dtype, torch.nn.init.xavier_normal_)
        zeros = parameter((out_features,), dtype, torch.nn.init.zeros_) if bias else None
        self.register_parameter("bias", zeros)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(..., in_features)`` to ``(..., out_features)``."""
        weight = self.weight
        check_features("input", input, weight, self.in_features)
        return OpLinear.apply(input, weight, self.bias)
