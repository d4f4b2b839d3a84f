"""Observers of the events of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from .._C import ShardedBuffer
from .block_state import BlockState
from .phase import Phase

_NOTHING = nullcontext()


class Observer:
    """Receives the events of the engine (`Engine.observer`); this base class ignores them."""

    def gathering(self, runtime: BlockState) -> None:
        """The gather of a block's parameters is about to start."""

    def awaiting_gather(self, runtime: BlockState) -> None:
        """The block cannot continue without its parameters."""

    def gathered(self, runtime: BlockState) -> None:
        """The parameters are there."""

    def computing(self, runtime: BlockState, phase: Phase) -> None:
        """The block runs, forward or backward."""

    def computed(self, runtime: BlockState) -> None:
        """The block has run."""

    def reducing(self, runtime: BlockState, groups: Sequence[ShardedBuffer]) -> None:
        """A block's gradients are sent off."""

    def awaiting_reduction(self, groups: Sequence[ShardedBuffer]) -> None:
        """This rank waits for gradients in flight."""

    def reduced(self, groups: Sequence[ShardedBuffer]) -> None:
        """The gradients have arrived, and are summed into the shards."""

    def transferring(self, transfer: object, label: str, *, is_write: bool) -> None:
        """A transfer between a drive and memory starts.

        Args:
            transfer: anything that is no other transfer until its end.
            label: of the block.
            is_write: whether it goes to the drive.
        """

    def transferred(self, transfer: object) -> None:
        """A transfer has ended, now or since the last look."""

    def waiting(self, name: str, reason: str) -> AbstractContextManager[None]:
        """Context manager for other waits of this rank.

        Args:
            name: the object of the wait, e.g. a parameter.
            reason: ``gather``, ``reduce``, ``stage`` (of a pipeline), ``update``, ``copies``, ``owner`` (of a matrix).
        """
        return _NOTHING
