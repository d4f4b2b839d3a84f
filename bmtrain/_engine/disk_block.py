"""The state of a block whose parameters or gradients are on a drive. See [Note: Blocks on a drive]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._C import Communicator, ShardedBuffer
from .._ranks.agree import failing_together
from .block_state import BlockState
from .disk_shard import StoredShard
from .policy import BlockPolicy


class DiskBlockState(BlockState):
    """A block that reads its shards before they are gathered, and writes its gradients."""

    #: The shards on the drive.
    stored: tuple[StoredShard, ...] = ()
    #: The number of lagging steps when the ranks last agreed that no drive has failed.
    _checked_step = 0

    def store(self, shards: Sequence[StoredShard | None], comm: Communicator) -> None:
        self.stored = tuple(shard for shard in shards if shard is not None)
        self._comm = comm

    # ---- parameters

    def adopt_data(self) -> bool:
        adopted = super().adopt_data()
        if adopted:
            for shard in self.stored:
                shard.follow_shard()
        return adopted

    def fetch(self) -> None:
        """Starts to read the parameters, unless they are gathered or an update has still to write them."""
        for update in tuple(self.pending):
            if update.is_done:
                update.finish_together()
        if not self.is_gathered and not self.pending:
            for shard in self.stored:
                shard.fetch_parameters()

    def forget(self) -> None:
        """Drops parameters that were read and are not gathered."""
        if not self.is_gathered:
            self._rest()

    def start_gather(self, round_: int) -> None:
        if self.policy.shards_on_disk or self._checked_step != self.engine.lagging_steps:
            self._checked_step = self.engine.lagging_steps
            with failing_together(f"parameters of {self.label} on disk", self._comm):
                for shard in self.stored:
                    shard.fetch_parameters()
                for shard in self.stored:
                    if shard.parameters is not None:
                        shard.parameters.arrive()
                self.engine.drives.check()
        super().start_gather(round_)

    def finish_gather(self) -> None:
        super().finish_gather()
        for shard in self.stored:
            # An update may need them; without gathered bytes, the shard is the gathered buffer.
            if shard.buffer.gathered_bytes and not shard.tier.precedes_updates:
                shard.rest_parameters()

    def drop_gathered(self) -> None:
        was_gathered = self.is_gathered
        super().drop_gathered()
        if was_gathered and not self.is_gathered:
            self._rest()

    def begin_update(self, *, is_early: bool) -> None:
        """Called before an update reads and writes the files, or inside backward what is in memory."""
        for update in tuple(self.pending):
            update.finish_together()
        self.drop_gathered()
        for shard in self.stored:
            if not is_early:
                shard.require_gradients()
            shard.waits_for_update &= is_early
            shard.rest_parameters()
            shard.note_changes()

    def _rest(self) -> None:
        for shard in self.stored:
            shard.rest_parameters()

    # ---- gradients

    def begin_backward(
        self, trains: Mapping[ShardedBuffer, list[bool]], under_way: Sequence[ShardedBuffer], in_turn: bool
    ) -> None:
        for shard in self.stored:
            if shard.buffer in trains:
                shard.require_gradients()
        super().begin_backward(trains, under_way, in_turn)
        for shard in self.stored:
            flags = trains.get(shard.buffer, [False])
            shard.waits_for_update = shard.tier.precedes_updates and all(flags)

    def prepare_reduce(self, buffers: Sequence[ShardedBuffer]) -> None:
        for shard in self.stored:
            if shard.buffer in buffers:
                shard.begin_gradients()

    def end_reduce(self, buffers: Sequence[ShardedBuffer]) -> None:
        for shard in self.stored:
            if shard.buffer in buffers:
                shard.deliver_gradients()
                shard.stop_waiting()

    def cancel_backward(self, buffers: Sequence[ShardedBuffer]) -> None:
        super().cancel_backward(buffers)
        for shard in self.stored:
            shard.stop_waiting()


def state_of(engine: Any, label: str, buffers: Sequence[ShardedBuffer], policy: BlockPolicy) -> BlockState:
    """Returns the state of a new block."""
    return (DiskBlockState if policy.optimizer == "disk" else BlockState)(engine, label, buffers, policy)
