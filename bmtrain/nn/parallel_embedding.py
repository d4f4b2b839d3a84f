"""Embeddings and output projections, full or divided along the vocabulary."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from .._base.arguments import require_between, require_tensor
from ..global_var import context
from ..layer import DistributedModule
from ._divide import check_features, check_layer, divided, expect_replicas, parameter, tp_parameter
from .parallel_linear_func import gather_rows, parallel_linear, replicate, scatter_rows

__all__ = ["Projection", "VPEmbedding", "VPProjection"]

_LARGEST = sys.float_info.max


class _Table(DistributedModule):
    """A weight with a row for each entry of a vocabulary."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype | None = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1,
    ) -> None:
        super().__init__()
        check_layer(dtype, vocab_size=vocab_size, embedding_size=embedding_size)
        require_between("init_mean", init_mean, -_LARGEST, _LARGEST)
        require_between("init_std", init_std, 0)
        self.vocab_size = vocab_size
        self.embedding_size = embedding_size
        self.weight = self._table(dtype, mean=init_mean, std=init_std)

    def _table(self, dtype: torch.dtype | None, **normal: float) -> Any:
        """The parameter, whose initializer draws from a normal distribution."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.embedding_size}"


class VPEmbedding(_Table):
    """An embedding whose table is divided along the vocabulary over the tensor-parallel ranks.

    Args:
        vocab_size: number of rows of the whole table; a multiple of the tensor-parallel size.
        embedding_size: size of an embedding.
        dtype: of the table.
        init_mean, init_std: of the normal distribution that ``init_parameters`` draws from.

    Raises:
        ValueError: if ``vocab_size`` does not divide.

    Example:
        >>> table = bmtrain.nn.VPEmbedding(10, 4, dtype=torch.float32)
        >>> bmtrain.init_parameters(table)
        >>> hidden = table(torch.tensor([[1, 2, 3]]))
        >>> hidden.shape, table(hidden, projection=True).shape
        (torch.Size([1, 3, 4]), torch.Size([1, 3, 10]))
    """

    def _table(self, dtype: torch.dtype | None, **normal: float) -> Any:
        rows = divided("vocab_size", self.vocab_size)
        return tp_parameter((rows, self.embedding_size), 0, dtype, torch.nn.init.normal_, **normal)

    def forward(self, x: torch.Tensor, projection: bool = False) -> torch.Tensor:
        """Embeds ids, or projects hidden states onto the vocabulary.

        Args:
            x: ids of any shape (the same shape on all tensor-parallel ranks); with ``projection`` hidden states
                ``(batch, seq, dim)``, each rank's its own slice of the sequence.
            projection: compute logits.

        Returns:
            ``(*x.shape, dim)``; with ``projection`` ``(batch, tp * seq, vocab / tp)``, for
            ``FusedCrossEntropy(parallel=True)``.

        Raises:
            TypeError: ``x`` is no tensor, or ids are no integers.
            IndexError: an id lies outside the vocabulary (on the CPU).
        """
        require_tensor("x", x)
        return self.projection(x) if projection else self._embed(x)

    def projection(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits of this rank's part of the vocabulary for all ranks' hidden states."""
        weight = self.weight
        check_features("x", x, weight, self.embedding_size)
        by_position = x.transpose(0, 1)  # rows are gathered along dim 0, the sequence is dim 1
        logits = parallel_linear(by_position, weight, None, True, False, False, None, training=False)
        return logits.transpose(0, 1).contiguous()

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        tp = context().groups["tp"]
        _check_ids(ids, self.vocab_size)
        weight = self.weight
        first = tp.rank * weight.shape[0]
        all_ids = gather_rows(ids.reshape(1, -1)) - first  # every rank looks up its rows for all ranks
        elsewhere = (all_ids < 0) | (all_ids >= weight.shape[0])
        found = F.embedding(all_ids.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
        return scatter_rows(found).view(*ids.shape, weight.shape[1])


def _check_ids(ids: torch.Tensor, vocab_size: int) -> None:
    """Checks ids before communication. On a GPU the values are not checked: the host would wait."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"x: expected ids of dtype int32 or int64, got {ids.dtype}")
    if ids.device.type == "cpu" and ids.numel():
        least, most = (int(end) for end in ids.aminmax())
        if least < 0 or most >= vocab_size:
            raise IndexError(f"x: expected ids in [0, {vocab_size}), got {least if least < 0 else most}")


class Projection(_Table):
    """Logits ``x @ weight.T`` over a whole vocabulary.

    Args: as :class:`VPEmbedding`.

    Example:
        >>> bmtrain.nn.Projection(10, 4, dtype=torch.float32)(torch.ones(2, 3, 4)).shape
        torch.Size([2, 3, 10])
    """

    def _table(self, dtype: torch.dtype | None, **normal: float) -> Any:
        return parameter((self.vocab_size, self.embedding_size), dtype, torch.nn.init.normal_, **normal)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., dim)`` to ``(..., vocab)``."""
        return self.projection(x)

    def projection(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the logits, as a call of the module does."""
        weight = self.weight
        check_features("x", x, weight, self.embedding_size)
        return F.linear(x, weight)


class VPProjection(VPEmbedding):
    """Logits of this rank's part of the vocabulary, for hidden states that are equal on all tensor-parallel ranks.

    Args: as :class:`VPEmbedding`.

    Example:
        >>> bmtrain.nn.VPProjection(10, 4, dtype=torch.float32)(torch.ones(2, 3, 4)).shape  # 10 / tp_size logits
        torch.Size([2, 3, 10])
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """``(..., dim)`` to ``(..., vocab / tp)``."""
        return self.projection(x)

    def projection(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the logits, as a call of the module does."""
        weight = self.weight
        check_features("x", x, weight, self.embedding_size)
        expect_replicas(self, x)
        return F.linear(replicate(x), weight)
