"""Embedding table with a sharded weight, usable as the output head as well."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt

__all__ = ["Embedding"]


class Embedding(bmt.DistributedModule):
    """Rows of a learned table.

    Args:
        num_embeddings: number of rows.
        embedding_dim: length of a row.
        dtype: dtype of the table, torch's default if None.
        init_std: standard deviation of the normal distribution that the table is drawn from.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(num_embeddings, embedding_dim, dtype=dtype),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=init_std),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table for integer ``ids`` of any shape: ``(*ids.shape, embedding_dim)``."""
        return F.embedding(ids, self.weight)

    def projection(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of every row for ``x`` of shape ``(..., embedding_dim)``: ``(..., num_embeddings)``.

        This is the head of a model that ties input and output embeddings (Press and Wolf, 2017).
        """
        return F.linear(x, self.weight)
