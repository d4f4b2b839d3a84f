"""A linear layer whose input features are divided over the tensor-parallel ranks."""

from __future__ import annotations

import torch

from .._base.arguments import require_integer
from ._divide import divided, tp_parameter
from .linear import LinearLayer
from .parallel_linear_func import ReduceType, parallel_linear

__all__ = ["RowParallelLinear"]


class RowParallelLinear(LinearLayer):
    """:class:`torch.nn.Linear` of which each tensor-parallel rank computes a slice of the input features.

    Args:
        in_features: size of the whole input; a multiple of the tensor-parallel size.
        out_features: size of the last dim of the output.
        bias: whether to add a bias (the same on every rank).
        dtype: of the parameters; default: torch's.
        split_input: the input has all features of this rank's slice along dim 0; slices are exchanged. False: the
            input is this rank's slice of the features.
        all_reduce_output: every rank gets the whole output. False: its slice of it along dim 0.
        async_chunks: number of pieces in which the output is reduced, overlapped with compute.

    Raises:
        ValueError: if ``in_features`` does not divide, or, in forward, dim 0 of an output to be scattered.

    Example:
        See :class:`ColumnParallelLinear`.
    """

    _shown = ("split_input", "all_reduce_output")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        split_input: bool = False,
        all_reduce_output: bool = False,
        async_chunks: int = 2,
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        require_integer("async_chunks", async_chunks, 1)
        self.split_input = split_input
        self.all_reduce_output = all_reduce_output
        self.async_chunks = async_chunks
        columns = divided("in_features", in_features)
        self.weight = tp_parameter((out_features, columns), 1, dtype, torch.nn.init.xavier_normal_)
        zeros = tp_parameter((out_features,), -1, dtype, torch.nn.init.zeros_) if bias else None
        self.register_parameter("bias", zeros)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(d0, ..., in / tp)`` to ``(d0 / tp, ..., out)`` (options change both)."""
        return parallel_linear(
            input,
            self.weight,
            self.bias,
            self.split_input,
            False,
            self.split_input,
            ReduceType.ALL_REDUCE if self.all_reduce_output else ReduceType.REDUCE_SCATTER,
            self.async_chunks,
        )
