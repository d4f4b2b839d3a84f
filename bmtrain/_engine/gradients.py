"""Gradients of blocks between the backward that made them and their shards.

[Note: Reductions in flight]
When a block's backward ends, its gradients are sent off; the reduction is completed when the next block's backward has
ended, so that it overlaps with compute, and at the latest at the end of the whole backward: then all gradients are
complete. One object decides where gradients go, the :class:`Destination`: to their shards, to wait for a later backward
(:class:`Accumulating`), or to the sums over virtual shards (`virtual_sum.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, Protocol

import torch

from .._C import ShardedBuffer, TreeSum
from .._shards.gather import changed_by_hooks
from ..parameter import DistributedParameter
from .block_state import BlockState
from .policy import Recompute
from .unsent import Unsent


class Destination:
    """Where gradients go; this one: to their shards, in the backward that made them."""

    #: Whether gradients may be summed in the order of their arrival.
    sums_on_arrival = True
    #: Whether a reduction adds to gradient shards.
    adds_to_shards = True

    def __init__(self, unsent: Unsent) -> None:
        self.unsent = unsent

    def of_block(self, block: BlockState, buffers: Sequence[ShardedBuffer]) -> Sequence[ShardedBuffer] | None:
        """Returns the buffers to reduce now, ``buffers`` and those with unsent gradients; None if all wait."""
        self.unsent.blocks.pop(block.number, None)
        return block.take_unsent(buffers)

    def of_parameter(self, param: DistributedParameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Returns the full gradient of a parameter outside Blocks to reduce now, or None."""
        return self.unsent.joined(param, gradient) if self.unsent.outside else gradient

    def takes(self, trained: tuple[ShardedBuffer, list[bool]]) -> bool:
        """Whether a buffer collects gradients; given with it: which of its parameters are trained."""
        return True in trained[1]

    def keeps(self, param: DistributedParameter) -> bool:
        """Whether a parameter outside Blocks gets gradients of this backward at a later time."""
        return id(param) in self.unsent.outside

    def tree_of(self, buffer: ShardedBuffer) -> TreeSum | None:
        """Returns the sum that gradients reduced over the ranks are added to; None: the gradient shard."""
        return None


class Accumulating(Destination):
    """Gradients wait for the first backward outside ``no_sync()``."""

    def of_block(self, block: BlockState, buffers: Sequence[ShardedBuffer]) -> Sequence[ShardedBuffer] | None:
        if not block.policy.keep_gradients:
            return super().of_block(block, buffers)
        block.keep_unsent(buffers)
        if buffers:
            self.unsent.blocks[block.number] = block
        return None

    def of_parameter(self, param: DistributedParameter, gradient: torch.Tensor) -> None:
        self.unsent.add(param, gradient)


class ReductionListener(Protocol):
    """Listener for completed reductions."""

    def reduced(self, runtime: Any) -> None:
        """The gradients of a block have reached their shards."""


class Gradients:
    """Sends gradients to their destination, and completes them when backward returns.

    Attributes:
        destination: where gradients go now.
        unsent: gradients that wait in ``no_sync()``.
        round: number of backwards that sent gradients; parameters are expected to change between two of them.
        listeners: notified when the gradients of a block have reached their shards.
        turn: the block whose backwards add up, see [Note: Vertical order].
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine  # its observer and islands
        self.unsent = Unsent()
        self.destination = Destination(self.unsent)
        self._accumulating = Accumulating(self.unsent)
        self.round = 0
        self.listeners: weakref.WeakSet[ReductionListener] = weakref.WeakSet()
        self._reductions: list[tuple[BlockState, Sequence[ShardedBuffer]]] = []
        self._accumulated: dict[int, DistributedParameter] = {}  # with post-accumulate hooks to be run
        self._callback_task = -1
        self._thread = 0  # of the last forward, which may be in a backward while others begin one
        self._is_ending = False
        self.turn: Any = None

    # ---- destinations

    @contextmanager
    def going_to(self, destination: Destination) -> Iterator[None]:
        """Context manager in which gradients have another destination."""
        before, self.destination = self.destination, destination
        try:
            yield
        finally:
            self.destination = before

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager in which gradients wait. See [Note: The accumulation window]."""
        return self.going_to(self._accumulating)

    def is_window_open(self) -> bool:
        """Whether parameters must not change, see [Note: The accumulation window]."""
        return self.destination is self._accumulating or bool(self.unsent.blocks or self.unsent.outside)

    # ---- one block

    def begin(self, block: BlockState, trains: Mapping[ShardedBuffer, list[bool]]) -> None:
        """Prepares the buffers of a block for the gradients of a backward; ``trains``: of which parameters."""
        for _, busy in self._reductions:
            if not set(busy).isdisjoint(trains):  # a block that ran twice in a row
                self.finish()
                break
        in_turn = block.policy.recompute is not Recompute.OFF
        with self._engine.waiting(block.label, "reduce"):
            block.begin_backward(trains, self._under_way(), in_turn)

    def sum_arrived(self) -> None:
        """Sums gradients that have come, so that the peers need not wait for memory that this rank has yet to read."""
        for buffer in self._under_way():
            buffer.sum_if_arrived()

    def _under_way(self) -> list[ShardedBuffer]:
        """Buffers whose gradients may be summed before their turn."""
        if not self.destination.sums_on_arrival:
            return []
        return [buffer for _, buffers in self._reductions for buffer in buffers]

    def send(self, block: BlockState, buffers: Sequence[ShardedBuffer]) -> None:
        """Sends the gradients in ``buffers`` to their destination; they are there when backward returns."""
        if block.defers:
            block.keep_unsent(buffers)
            return
        now = self.destination.of_block(block, buffers)
        if now is not None:
            self._reduce(block, now)

    def send_deferred(self, block: BlockState) -> None:
        """Sends the gradients of all backwards since :attr:`BlockState.defers` was set, and resets it."""
        block.defers = False
        self.send(block, block.take_unsent(()))

    def _reduce(self, block: BlockState, buffers: Sequence[ShardedBuffer]) -> None:
        engine = self._engine
        try:
            if engine.observer is not None:
                engine.observer.reducing(block, buffers)
            with engine.waiting(block.label, "reduce"):
                if engine.tier is not None and self.destination.adds_to_shards:
                    block.prepare_reduce(buffers)
                for buffer in buffers:
                    buffer.start_reduce()
            self._complete_previous()
            self._reductions.append((block, buffers))
        except BaseException:
            block.cancel_backward(buffers)  # nobody would complete it, and another backward could not begin
            raise
        if not self._is_ending:
            self.call_at_end_of_backward()

    def _complete_previous(self) -> None:
        """Completes the reductions before the latest: at most one overlaps with compute.

        The sum over replicas, which follows the sum over the ranks that share a block, overlaps with one more block.
        """
        if len(self._reductions) > 1:
            self.finish(but=1)
        continues = False
        for buffer in self._reductions[-1][1] if self._reductions else ():
            continues |= buffer.continue_reduce()
        if not continues:
            self.finish()

    def finish(self, but: int = 0) -> None:
        """Waits until every gradient sent has reached its shard, ``but`` for the gradients of so many latest blocks."""
        observer, destination = self._engine.observer, self.destination
        while len(self._reductions) > but:
            block, buffers = self._reductions.pop(0)
            try:
                if observer is not None:
                    observer.awaiting_reduction(buffers)
                for buffer in buffers:
                    buffer.await_reduce()
                if observer is not None:
                    observer.reduced(buffers)
                for buffer in buffers:
                    buffer.finish_reduce(destination.tree_of(buffer))
                for user in tuple(self.listeners):
                    user.reduced(block)
                if self._engine.tier is not None and destination.adds_to_shards:
                    block.end_reduce(buffers)
            except BaseException:
                block.cancel_backward(buffers)
                raise

    # ---- parameters outside blocks

    def of_parameter(self, param: DistributedParameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Returns the full gradient of a parameter outside Blocks that is to be reduced to its shard, or None.

        Args:
            gradient: this rank's, before the user's hooks.
        """
        if self.unsent.blocks or self.unsent.outside:
            self.call_at_end_of_backward()
        return self.destination.of_parameter(param, changed_by_hooks(param, gradient))

    def note_accumulated(self, param: DistributedParameter) -> None:
        """Schedules the post-accumulate hooks of ``param`` for the end of backward, when gradients are complete."""
        if self.destination.keeps(param):
            return  # autograd calls this for a gradient that went to the sum, or is unsent, too
        self._accumulated[id(param)] = param
        # Otherwise the island, or the end of backward, does it.
        if self._engine.islands.count == 0 and not self._is_ending:
            self.call_at_end_of_backward()

    # ---- the end of a backward

    def call_at_end_of_backward(self) -> None:
        """Makes all gradients complete when the running backward returns."""
        task = torch._C._current_graph_task_id()
        if task != self._callback_task:
            self._callback_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        with self.ending():
            if self.turn is not None:
                self.turn.end()
            if self._engine.islands.count == 0 and self.destination is not self._accumulating:
                self.close_round()
            self.finish()
        if self._engine.tier is not None:
            self._engine.tier.settle()
        if self._engine.islands.count == 0:
            self.run_accumulated_hooks()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Context manager in which no work is postponed to the end of the backward."""
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False

    def close_round(self) -> None:
        """Starts to send the unsent gradients, at the end of a backward that sends. Collective."""
        self.round += 1
        unsent = self.unsent
        for number in sorted(unsent.blocks):
            if not unsent.blocks[number].defers:  # else a pipeline accumulates more
                self.send_deferred(unsent.blocks[number])
        if unsent.outside:
            unsent.reduce_outside()
        if unsent.gathered:
            unsent.release_gathered()

    def run_accumulated_hooks(self) -> None:
        """Runs the post-accumulate hooks of parameters with new gradients."""
        accumulated, self._accumulated = self._accumulated, {}
        for param in accumulated.values():
            param._run_accumulated_hooks()

    def drop_stale(self, *, in_forward: bool = True) -> None:
        """Drops pending reductions of a backward that failed: the gradients may have been zeroed since."""
        self._thread = get_ident() if in_forward else self._thread
        pending = self._reductions or self._accumulated or self.turn
        if pending and torch._C._current_graph_task_id() == -1 and self._thread == get_ident():
            self._accumulated.clear()
            if self.turn is not None:
                self.turn.drop()
            while self._reductions:
                block, buffers = self._reductions.pop(0)
                block.cancel_backward(buffers)
            if self._engine.tier is not None:
                self._engine.tier.settle()
