"""A linear layer whose output features are divided over the tensor-parallel ranks."""

from __future__ import annotations

import torch

from .._base.arguments import require_integer
from ._divide import divided, expect_replicas, tp_parameter
from .linear import LinearLayer
from .parallel_linear_func import parallel_linear

__all__ = ["ColumnParallelLinear"]


class ColumnParallelLinear(LinearLayer):
    """:class:`torch.nn.Linear` of which each tensor-parallel rank computes a slice of the output features.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the whole output; a multiple of the tensor-parallel size.
        bias: whether to add a bias.
        dtype: of the parameters; default: torch's.
        gather_output: concatenate the ranks' outputs along the last dim, on every rank.
        gather_input: each rank gives its slice of the input along dim 0; they are concatenated. False: the input is the
            same on all ranks.
        async_gather_chunks: number of pieces in which the input is gathered, overlapped with compute.

    Raises:
        ValueError: if ``out_features`` does not divide.
        RuntimeError: the first input in training is not the same on all ranks, with ``gather_input=False``.

    Example:
        >>> up, down = bmtrain.nn.ColumnParallelLinear(4, 8), bmtrain.nn.RowParallelLinear(8, 4)
        >>> tokens = torch.ones(6, 4)  # this rank's, of all that the tensor-parallel group has
        >>> down(up(tokens)).shape
        torch.Size([6, 4])
    """

    _shown = ("gather_input", "gather_output")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        gather_input: bool = True,
        async_gather_chunks: int = 2,
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        require_integer("async_gather_chunks", async_gather_chunks, 1)
        self.gather_output = gather_output
        self.gather_input = gather_input
        self.async_gather_chunks = async_gather_chunks
        rows = divided("out_features", out_features)
        self.weight = tp_parameter((rows, in_features), 0, dtype, torch.nn.init.xavier_normal_)
        zeros = tp_parameter((rows,), 0, dtype, torch.nn.init.zeros_) if bias else None
        self.register_parameter("bias", zeros)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(d0, ..., in)`` to ``(d0 * tp, ..., out / tp)`` (options change both factors)."""
        if not self.gather_input:
            expect_replicas(self, input)
        return parallel_linear(
            input,
            self.weight,
            self.bias,
            self.gather_input,
            self.gather_output,
            False,
            None,
            self.async_gather_chunks,
            training=self.training,
        )
