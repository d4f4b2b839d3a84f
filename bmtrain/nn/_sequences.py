"""Sequences whose tokens are divided over the ranks of a group.

[Note: Sequence ranks]
Each rank of a sequence group has some tokens of every sequence of one batch, and runs the whole model on them: layers
that treat each token by itself need nothing else. Attention alone exchanges tokens (`functional.py`), and its backward
sends each gradient back to the rank that has the token. So a rank differentiates the loss of its own tokens, and the
sum of the gradients over all ranks, which ZeRO computes anyhow, is the gradient of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..global_var import context

if TYPE_CHECKING:
    from .._ranks.context import Context, Group

__all__ = ["Method", "Run", "Sequences", "check_stamp", "current_sequences", "set_current", "whole_sequences"]


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
        batch_size: number of sequences.
        length: tokens of a sequence.
        padded: the same with the tokens that make it divisible; these attend to themselves only.
        own: indices of this rank's tokens in a sequence, ``(padded / ranks,)``, on the CPU.
        documents: ``(batch_size, padded)`` number of the document that a token belongs to, never falling, on the CPU.
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

    def runs(self) -> list[list[Run]]:
        """The documents of each sequence; one list if all sequences have the same."""
        rows = self.documents
        if (rows == rows[:1]).all():
            rows = rows[:1]
        found = []
        for row in rows:
            bounds = [0, *(row.diff().nonzero().flatten() + 1).tolist(), self.padded]
            found.append([Run(*pair) for pair in pairwise(bounds)])
        return found

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ValueError unless ``(batch, heads, tokens, ...)`` are this rank's tokens."""
        if tensor.dim() != 4 or (tensor.shape[0], tensor.shape[2]) != (self.batch_size, self.num_own):
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
