"""Sequences whose tokens are divided over the ranks of a group.

[Note: Sequence ranks]
Each rank of a sequence group has some tokens of every sequence of one batch, and runs the whole model on them: layers
that treat each token by itself need nothing else. Attention alone exchanges tokens (`functional.py`), and its backward
sends each gradient back to the rank that has the token. So a rank differentiates the loss of its own tokens, and the
sum of the gradients over all ranks, which ZeRO computes anyhow, is the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch

from .._C import Work
from .._engine.engine import current_engine
from .._ranks.context import Context, Group
from ..global_var import context


class Method(str, Enum):
    """How attention exchanges tokens."""

    HEADS = "heads"  # each rank gets all tokens of some heads (S. A. Jacobs et al., DeepSpeed Ulysses, 2023)
    RING = "ring"  # keys and values visit all ranks (H. Liu et al., Ring Attention, 2023)


class Run(NamedTuple):
    """Tokens ``start`` to ``end`` of a sequence, which attend to each other only."""

    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of one batch, and the tokens of them that this rank has.

    Attributes:
        group: the ranks that share the tokens.
        method: how attention exchanges tokens.
        batch_size: number of sequences of this rank's batch.
        length: tokens of a sequence.
        padded: the same with the tokens that make it divisible; these attend to themselves only.
        own: indices of this rank's tokens in a sequence, ``(padded / ranks,)``, on the CPU.
        documents: ``(tp_size, pipe_size * batch_size, padded)`` number of the document that a token belongs to, never
            falling, on the CPU: of all batches that this rank's layers may see, see :meth:`documents_of`.
        stamp: distinguishes these sequences from others, in what backward has saved.
    """

    group: Group
    method: Method
    batch_size: int
    length: int
    padded: int
    own: torch.Tensor
    documents: torch.Tensor
    stamp: torch.Tensor

    @property
    def num_own(self) -> int:
        """Tokens of a sequence that this rank has."""
        return len(self.own)

    def shard(self, tensor: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Returns this rank's tokens of ``(batch_size, length, ...)``; added tokens have the value ``fill``."""
        missing = self.padded - self.length
        if missing:
            shape = (tensor.shape[0], missing, *tensor.shape[2:])
            tensor = torch.cat([tensor, tensor.new_full(shape, fill)], dim=1)
        return tensor.index_select(1, self.own.to(tensor.device))

    def documents_of(self, num_rows: int) -> torch.Tensor | None:
        """Returns the documents ``(num_rows, padded)`` of the rows that attention sees here; None if these are others.

        Layers of a pipeline see a micro-batch, which may have rows of all stages' ranks; layers between a column- and a
        row-parallel one see the rows of all tensor-parallel ranks.
        """
        ctx = context("attention")
        first = ctx.groups["pipe"].rank * self.batch_size
        rows = current_engine(ctx).rows or slice(first, first + self.batch_size)
        found = self.documents[:, rows]
        if num_rows == found.shape[1]:
            return found[ctx.groups["tp"].rank]
        return found.flatten(0, 1) if num_rows == found.shape[0] * found.shape[1] else None

    def wait_for(self, works: Iterable[Work]) -> None:
        """Waits for tokens of other ranks."""
        with current_engine(context()).waiting("sequences", "tokens"):
            for work in works:
                work.wait()

    def runs(self, num_rows: int) -> list[list[Run]]:
        """The documents of each row that attention sees; one list if all rows have the same."""
        rows = self.documents_of(num_rows)
        assert rows is not None
        if (rows == rows[:1]).all():
            rows = rows[:1]
        found = []
        for row in rows:
            bounds = [0, *(row.diff().nonzero().flatten() + 1).tolist(), self.padded]
            found.append([Run(*pair) for pair in pairwise(bounds)])
        return found

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ValueError unless ``(batch, heads, tokens, ...)`` are this rank's tokens."""
        is_part = tensor.dim() == 4 and tensor.shape[2] == self.num_own
        if not is_part or self.documents_of(tensor.shape[0]) is None:
            raise ValueError(
                f"attention: {name}: expected ({self.batch_size} sequences, heads, {self.num_own} tokens, features), "
                f"this rank's part of the last shard_sequence(), got {tuple(tensor.shape)}; attention over other "
                "sequences than these is not divided over ranks (for an evaluation on whole sequences: "
                "bmtrain.nn.sequence.whole_sequences())"
            )


def check_stamp(sequences: Sequences, stamp: torch.Tensor) -> None:
    """Raises RuntimeError if recomputation ran with other sequences than the forward did."""
    if stamp.item() != sequences.stamp.item():
        raise RuntimeError(
            "attention: a block ran again in backward, after shard_sequence() had begun other sequences: call "
            "backward() before the next shard_sequence(), or build blocks with use_checkpoint=False"
        )


class _Current:
    """The sequences that attention is over, of the process that has ``context``."""

    context: Context | None = None
    sequences: Sequences | None = None


def current_sequences() -> Sequences | None:
    """The sequences of the last :func:`shard_sequence`; None without, or after :func:`whole_sequences`."""
    return _Current.sequences if _Current.context is context("attention") else None


def set_current(sequences: Sequences) -> None:
    """Makes these the sequences of :func:`current_sequences`."""
    _Current.context, _Current.sequences = context("shard_sequence"), sequences


def whole_sequences() -> None:
    """Ends the division of sequences: until the next :func:`shard_sequence`, each rank attends to its own tokens.

    Example:
        >>> bmtrain.nn.sequence.whole_sequences()  # before an evaluation that each rank makes alone
    """
    _Current.sequences = None
