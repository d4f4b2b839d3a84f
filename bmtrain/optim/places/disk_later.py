"""Updates of state on drives that continue after the step, in a thread.

[Note: Updates on drives that overlap]
`OnDisk.apply` queues the chunks of each block and returns, and a thread lets them pass, the first block of a forward
first: the drive moves state while the next forward computes, and with ``step_in_backward`` also while the backward
does. Whoever reads or writes the parameters, gradients or state of a block waits for its chunks ([Note: Updates that
overlap]); a block that is computed waits before its gather. Where the library cannot know all who do (other tensors of
the same memory, a graph that leads to a parameter), the step waits itself.

An update that begins inside backward takes the gradients of its block in memory, and parameters that are there from
the backward: both are read no more, and the gradients are not written. If the backward is faster than the drive, it
waits, so that few blocks are in memory. Where others refer to a gradient, or another optimizer needs some, gradients
are written and read as without it.

A failure of a drive ends all updates of the rank. The ranks raise it together: before the next gather of a block with
state on a drive, or at the end of the next step. A rank alone raises it where parameters or state are read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..._engine.block_state import BlockState
from ..._engine.disk_shard import StoredShard
from ..._engine.disk_tier import LEAVING
from ..._engine.drives import Drives
from ..._engine.pending import PendingUpdate
from ...errors import DiskError
from ..formulas import Part
from .disk_arena import Chunk, Stream, in_turns

#: Context manager in which accesses to parameters do not wait for their updates.
_UNGUARDED = torch._C.DisableTorchFunctionSubclass


class DiskUpdate:
    """The update of parameters of one block.

    Args:
        background: computes it.
        block: the block.
        stored: its shards on a drive.
        chunks_of: returns the chunks, once gradients on a drive are there.

    Attributes:
        order: of its block in a forward.
        num_left: chunks that have not been written; None before they are queued.
        failure: why it ended without them.
    """

    def __init__(
        self,
        background: Background,
        block: BlockState,
        stored: Sequence[StoredShard],
        chunks_of: Callable[[], list[Chunk]],
    ) -> None:
        self._background = background
        self._stored = stored
        self._chunks_of: Callable[[], list[Chunk]] | None = chunks_of
        self._has_taken = False
        self.order = block.number
        self.num_left: int | None = None
        self.failure: BaseException | None = None

    @property
    def is_ready(self) -> bool:
        """Whether no gradient is being written to a drive."""
        return self._has_taken or all(s.gradients is None or s.gradients.memory is None for s in self._stored)

    @property
    def is_done(self) -> bool:
        return self.num_left == 0

    def abandon(self) -> None:
        """Gives it up, and all others."""
        self._background.abandon()

    def take(self, parameters: Container[Tensor]) -> None:
        """Takes gradients of ``parameters`` in memory, and parameters there, if all of them can be taken."""
        if self._stored and all(stored.may_be_taken(parameters) for stored in self._stored):
            self._has_taken = True
            self._background.taken.append(self)
            for stored in self._stored:
                stored.take()

    def take_chunks(self) -> list[Chunk]:
        assert self._chunks_of is not None
        with _UNGUARDED():
            chunks, self._chunks_of = self._chunks_of(), None
        self.num_left = len(chunks)
        return chunks

    def wait_for_end(self) -> None:
        """Waits until it is computed and written, or has failed."""
        if self.num_left is None:
            with _UNGUARDED():
                for stored in self._stored:
                    if stored.gradients is not None:
                        stored.deliver_gradients()
                        stored.rest_gradients()
            self._background.queue_ready()
        self._background.wait(self)
        if self._has_taken:
            self._has_taken = False
            with _UNGUARDED():
                for stored in self._stored:
                    stored.give_back()

    def wait(self) -> None:
        """As `wait_for_end`.

        Raises:
            DiskError: a drive has failed, in this update or another one.
        """
        self.wait_for_end()
        if self.failure is not None:
            raise self.failure
        with _UNGUARDED():
            for stored in self._stored:
                stored.note_written()


class PendingDiskUpdate(PendingUpdate):
    """As its base; what a block waits for in a call does not raise, since all ranks do that next.

    Args:
        update: of the parameters, in the background.
        parameters: the parameters that it changes.
        block: their block.
        zero: zeroes gradients of parameters.
    """

    __slots__ = ("_zero", "_zeroed")

    def __init__(
        self,
        update: DiskUpdate,
        parameters: Sequence[Any],
        block: BlockState,
        zero: Callable[[Sequence[Any]], None],
    ) -> None:
        super().__init__(update, parameters, update, block)
        self._zero: Any = zero
        self._zeroed = False

    def finish(self) -> None:
        if self.is_finished:
            return
        self.update.wait_for_end()  # which Ctrl-C may interrupt
        zero, self._zero = self._zero, None
        super().finish()
        if self._zeroed:
            zero(self.parameters)

    def finish_together(self) -> None:
        with suppress(DiskError):
            self.finish()

    def end(self) -> None:
        """Gives the update up: an exit waits for no drive, whose files end with the process."""
        self.update.abandon()

    def __del__(self) -> None:
        """Nothing: the thread owns what it writes to."""

    @property
    def is_done(self) -> bool:
        done: bool = self.update.is_done
        return done

    def zero_gradients_afterwards(self) -> bool:
        self._zeroed = True
        return True


class Background:
    """The thread of a place; it ends when nothing is queued.

    Args:
        drives: hold the failure after which nothing is computed.
    """

    def __init__(self, drives: Drives) -> None:
        self._drives = drives
        #: The place's stream and computation; none while there is nothing to do, as they would keep the place.
        self._work: tuple[Stream, Callable[[list[Part]], None]] | None = None
        self._changed = threading.Condition()
        self._not_ready: list[DiskUpdate] = []
        self._queue: deque[Chunk] = deque()
        self._owners: dict[Chunk, DiskUpdate] = {}  # of chunks that are not written
        self._is_running = False
        #: Updates with gradients in memory.
        self.taken: deque[DiskUpdate] = deque()

    def post(
        self, updates: Sequence[DiskUpdate], stream: Stream, compute: Callable[[list[Part]], None]
    ) -> None:
        """Queues updates as soon as they are ready.

        Args:
            updates: of blocks without a pending update.
            stream: for their chunks.
            compute: computes parts of chunks in memory.
        """
        with self._changed:
            self._work = stream, compute
            self._not_ready += updates
        self.queue_ready()

    def queue_ready(self) -> None:
        """Queues updates that have become ready."""
        ready = [update for update in self._not_ready if update.is_ready]
        if not ready:
            return
        owners = {chunk: update for update in ready for chunk in update.take_chunks()}
        with self._changed:
            self._not_ready = [update for update in self._not_ready if update not in ready]
            if self._drives.failure is not None:
                self._end(self._drives.failure, [*ready, *self._owners.values()])
                return
            self._owners |= owners
            waiting = sorted([*self._queue, *owners], key=lambda chunk: self._owners[chunk].order)
            self._queue = deque(in_turns(waiting))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="bmtrain-drives", daemon=True).start()

    def wait(self, update: DiskUpdate) -> None:
        """Waits until an update has ended, which passes before others."""
        with self._changed:
            self._queue = deque(sorted(self._queue, key=lambda chunk: self._owners[chunk] is not update))
            self._changed.wait_for(lambda: update.is_done)

    def limit_taken(self) -> None:
        """Waits for updates with gradients in memory before the latest."""
        while self.taken and (len(self.taken) > LEAVING or self.taken[0].is_done):
            self.taken.popleft().wait_for_end()

    def finish(self) -> None:
        """Waits until nothing is queued, and the thread has left the stream."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running)

    def abandon(self) -> None:
        """Gives up what is queued."""
        self._drives.note(DiskError("the process ends, and its last update with it"))
        with self._changed:
            self._end(self._drives.failure, self._owners.values())
        self.finish()

    # ---- in the thread

    def _run(self) -> None:
        assert self._work is not None
        stream, compute = self._work
        with torch.no_grad():
            while self._goes_on():
                try:
                    stream.let_pass(self._take, compute, self._written)
                except BaseException as error:
                    if isinstance(error, DiskError):
                        self._drives.note(error)
                    with self._changed:
                        self._end(error, self._owners.values())

    def _goes_on(self) -> bool:
        with self._changed:
            self._is_running = bool(self._queue)
            if not self._is_running and not self._not_ready:
                self._work = None
            self._changed.notify_all()
            return self._is_running

    def _take(self) -> Chunk | None:
        with self._changed:
            return self._queue.popleft() if self._queue else None

    def _written(self, chunk: Chunk) -> None:
        with self._changed:
            update = self._owners.pop(chunk, None)
            chunk.pieces.clear()  # references to gradients and parameters, which others count
            if update is not None and update.num_left:
                update.num_left -= 1
                if update.is_done:
                    self._changed.notify_all()

    def _end(self, error: BaseException | None, updates: Iterable[DiskUpdate]) -> None:
        """Ends updates with an error, and what is queued."""
        for update in updates:
            update.failure, update.num_left = error, 0
        self._owners.clear()
        self._queue.clear()
        self._changed.notify_all()
