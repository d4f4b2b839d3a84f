"""Blocks that stay gathered for several calls, and whose gradients of several backwards add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .block_state import BlockState
from .engine import Engine
from .phase import Phase


def hold(engine: Engine, block: BlockState, phase: Phase | None = None) -> None:
    """Keeps the parameters gathered for several calls, until :func:`let_go`.

    The next call gathers them again, unless the policy has kept them and they are unchanged.

    Args:
        engine: of the block.
        block: is held.
        phase: of these calls, where they are one in the order of calls: the parameters are gathered now then.
    """
    block.is_held = False
    if phase is not None:
        try:
            engine.open(block, phase)
        except BaseException:
            engine.abandon(block)
            raise
        engine.end_call(block, keep=True)
    elif not engine.is_of_this_round(block):
        block.drop_gathered()
    block.is_held = True


def let_go(engine: Engine, block: BlockState, *, keep: bool = False) -> None:
    """Ends :func:`hold`; ``keep`` as in :meth:`Engine.close`."""
    block.is_held = False
    engine.keep_or_drop(block, keep)


def drop_gradients(block: BlockState) -> None:
    """Drops the gradients of all backwards since :attr:`BlockState.defers` was set, and resets it."""
    if block.defers:
        block.defers = False
        block.cancel_backward(list(block.unsent))


@contextmanager
def all_or_none(blocks: Sequence[BlockState]) -> Iterator[None]:
    """Context manager for a backward of several blocks, which drops the gradients that they deferred if it fails."""
    try:
        yield
    except BaseException:
        for block in blocks:
            drop_gradients(block)
        raise
