"""Who is told what begins and ends in a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import _C
    from .runtime import BlockRuntime
    from .schedule import Phase

__all__ = ["Observer"]

_NOTHING = nullcontext()


class Observer:
    """Told by the engine; this one looks away. What costs time is left to those that record."""

    def gathering(self, runtime: BlockRuntime) -> None:
        """The gather of a block's parameters is about to start."""

    def awaiting_gather(self, runtime: BlockRuntime) -> None:
        """The block cannot go on without its parameters."""

    def gathered(self, runtime: BlockRuntime) -> None:
        """The parameters are there."""

    def computing(self, runtime: BlockRuntime, phase: Phase) -> None:
        """The block runs, forward or backward."""

    def computed(self, runtime: BlockRuntime) -> None:
        """The block has run."""

    def reducing(self, runtime: BlockRuntime, groups: Sequence[_C.ShardGroup]) -> None:
        """A block's gradients are sent off."""

    def awaiting_reduction(self, groups: Sequence[_C.ShardGroup]) -> None:
        """Nothing goes on before the gradients sent off have arrived."""

    def reduced(self, groups: Sequence[_C.ShardGroup]) -> None:
        """They have, and are summed into the shards now."""

    def waiting(self, name: str, reason: str) -> AbstractContextManager[None]:
        """While this rank waits for something else.

        Args:
            name: of what, e.g. a parameter.
            reason: ``gather``, ``reduce``, ``stage`` (another one of a pipeline), ``update`` (of the optimizer).
        """
        return _NOTHING
