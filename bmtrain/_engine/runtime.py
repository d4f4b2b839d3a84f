"""The state of one block between its calls."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from operator import methodcaller
from typing import TYPE_CHECKING

import torch

from .. import _C
from ..errors import CommunicationError
from .recompute import left_behind
from .schedule import Event, Phase

if TYPE_CHECKING:
    from .block_ref import BlockRef
    from .engine import Engine
    from .island import BlockCall
    from .pending import PendingUpdate
    from .policy import BlockPolicy

__all__ = ["BlockRuntime"]

_SHARDED = _C.ShardGroup.State.SHARDED
_VERSION = methodcaller("version")


class BlockRuntime:
    """Gathers, binds, releases and reduces the flat buffers of one block.

    A block is *sharded* between calls; ``open`` gathers and binds it, ``close`` unbinds it and releases it unless it
    is to stay for its backward. It may be gathered ahead of a call (see :class:`Schedule`).
    """

    def __init__(
        self, engine: Engine, label: str, groups: Sequence[_C.ShardGroup], policy: BlockPolicy
    ) -> None:
        self.engine = engine
        self.label = label
        self.groups = tuple(groups)
        self.policy = policy
        self.number = engine.schedule.take_number()
        #: Its calls, as the schedule notes them.
        self.events = {phase: Event(self.number, phase) for phase in Phase}
        engine.runtimes.add(self)
        #: Of its calls.
        self.shore = _C.IslandShore(engine.islands, left_behind(label))
        self.is_bound = False
        #: The stage of a pipeline that alone runs the block, if it is not this rank's.
        self.other_stage: int | None = None
        #: How its parameters refer to the Block.
        self.reference: BlockRef | None = None
        #: Optimizer steps of the block's parameters that are still being computed.
        self.pending: list[PendingUpdate] = []
        #: Forwards whose backward is still to come, or has failed or kept its graph.
        self.open_calls: weakref.WeakSet[BlockCall] = weakref.WeakSet()
        self._gathered_version = -1
        self._gathered_round = -1
        self._seen_step = 0
        self._is_gathered = False  # or being gathered, of at least one of the groups
        self._is_held = False
        self._defers = False
        self._deferred: list[_C.ShardGroup] = []

    def replace_groups(self, groups: Sequence[_C.ShardGroup]) -> None:
        """Goes on with other buffers; what is under way is dropped."""
        self.engine.schedule.drop_ahead()
        self.drop_gathered()
        self.groups = tuple(groups)
        self._is_gathered = False

    def version(self) -> int:
        """Changes whenever a parameter is modified in place."""
        return sum(map(_VERSION, self.groups))

    def open(self, phase: Phase) -> None:
        """Makes the parameters full tensors; `close` or `abandon` must follow, after an error too. Collective."""
        engine = self.engine
        self._seen_step = engine.lagging_steps
        if self.pending:
            self.finish_updates()
        if phase is not Phase.BACKWARD:
            engine.drop_stale_reductions()
        if self._adopt_data() and phase is not Phase.BACKWARD:
            self.drop_gathered()
        if not self._is_held:
            engine.schedule.enter(self, phase)
        self._start_gather()
        engine.observer.awaiting_gather(self)
        for group in self.groups:
            group.finish_gather()
        engine.observer.gathered(self)
        for group in self.groups:
            group.bind()
        self.is_bound = True
        if not self._is_held:
            engine.schedule.gather_ahead()
        engine.observer.computing(self, phase)

    def owns_storage(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the gathered parameters."""
        for group in self.groups:  # noqa: SIM110 (a generator costs as much again, for each saved tensor)
            if group.owns_storage(tensor):
                return True
        return False

    def finish_updates(self) -> None:
        """Waits for optimizer steps under way. See [Note: Updates that overlap]."""
        with self.engine.observer.waiting(self.label, "update"):
            for update in tuple(self.pending):
                update.finish()

    def _adopt_data(self) -> bool:
        """Takes over what users put in place of shards (``param.data = tensor``); whether there was anything."""
        adopted = False
        for group in self.groups:
            if group.adopt_data():
                adopted = True
                if self.reference is not None:
                    self.reference.add_home(group.shard)
        return adopted

    def close(self, *, keep: bool) -> None:
        """Makes the parameters shards again; ``keep`` leaves the gathered buffer for the backward to come."""
        self._end_call(keep)
        self.engine.schedule.gather_late()

    def _end_call(self, keep: bool) -> None:
        self.engine.observer.computed(self)
        for group in self.groups:
            group.unbind()
        self.is_bound = False
        self._keep_or_drop(keep)

    def _keep_or_drop(self, keep: bool) -> None:
        """Releases the gathered parameters, unless the policy or the backward to come wants them."""
        if self.policy.level == 1:
            return
        accumulation = self.engine.accumulation
        if self.policy.keep_gathered and accumulation.is_open:
            accumulation.stays_gathered(self)
        elif not keep:
            self.drop_gathered()

    def abandon(self) -> None:
        """After an error or Ctrl-C: whatever had begun, the parameters are shards and nothing is gathered."""
        with suppress(CommunicationError):  # of a gather under way: the caller raises what matters
            self._end_call(keep=False)
            self.drop_gathered()
            self.engine.schedule.drop_ahead()

    def keeps_for_backward(self) -> bool:
        """Whether the gathered parameters should stay until backward."""
        return self.policy.level <= 2 or self.engine.schedule.expects_backward_of(self)

    def may_lag(self) -> bool:
        """Whether the host may have to wait for the block's update; the same on all ranks, whatever they wait for."""
        return self._seen_step != self.engine.lagging_steps

    def start_gather_ahead(self) -> bool:
        """Starts a gather for a coming call; False if the parameters are gathered already."""
        if self.is_bound or (self._is_gathered and (self.policy.level != 1 or self.is_of_this_round())):
            return False
        self.drop_gathered()
        if self.pending:
            self.finish_updates()
        self._adopt_data()
        self._start_gather()
        return True

    def _start_gather(self) -> None:
        """Starts the gather, unless the parameters are gathered."""
        if self._is_gathered:
            return
        engine = self.engine
        self._gathered_version = self.version()
        self._gathered_round = engine.accumulation.round
        engine.observer.gathering(self)
        self._is_gathered = True
        with engine.observer.waiting(self.label, "gather"):
            for group in self.groups:
                group.start_gather(in_place=True)

    def is_of_this_round(self) -> bool:
        """Whether what is gathered holds for another forward: the policy keeps it, and nothing has changed since."""
        return (
            (self.policy.level == 1 or (self.policy.keep_gathered and self.engine.accumulation.is_open))
            and self._gathered_round == self.engine.accumulation.round
            and self.gathered_is_current()
        )

    def gathered_is_current(self) -> bool:
        """Whether no parameter was modified in place since the gather ahead was started."""
        return self._gathered_version == self.version()

    def drop_gathered(self) -> None:
        """Gives gathered memory back, unless it is in use."""
        if self._is_gathered and not (self.is_bound or self._is_held):
            self._is_gathered = False
            for group in self.groups:
                if group.state != _SHARDED:  # as after a gather that failed
                    group.release()

    def hold(self) -> None:
        """Keeps the parameters until :meth:`let_go`: several calls follow.

        They are gathered anew at the next one, unless the policy has kept them and they are what they were.
        """
        self._is_held = False
        if not self.is_of_this_round():
            self.drop_gathered()
        self._is_held = True

    def let_go(self) -> None:
        """Ends :meth:`hold`."""
        self._is_held = False
        self._keep_or_drop(keep=False)

    def begin_backward(self, trains: Mapping[_C.ShardGroup, list[bool]]) -> None:
        """Prepares groups to receive gradients of the parameters marked, on top of those of deferred calls."""
        engine = self.engine
        engine.finish_reduction_of(trains)
        under_way = engine.reductions_under_way()
        with engine.observer.waiting(self.label, "reduce"):
            for group, flags in trains.items():
                if group in self._deferred:
                    group.join_backward(flags)
                else:
                    group.begin_backward(flags, under_way)

    def cancel_backward(self, groups: Sequence[_C.ShardGroup]) -> None:
        """Forgets the gradients of a backward that failed."""
        for group in groups:
            group.cancel_backward()
        self._deferred = [group for group in self._deferred if group not in groups]

    def drop_unsent(self, params: Container[int]) -> bool:
        """Drops what waits for ``params``, given by identity; whether gradients of others wait on."""
        self._deferred = [
            group
            for group in self._deferred
            if group.drop_gradients([id(param) in params for param in group.parameters])
        ]
        return bool(self._deferred)

    @property
    def defers(self) -> bool:
        """Whether :meth:`defer_reduction` is in force."""
        return self._defers

    def defer_reduction(self) -> None:
        """Lets the gradients of the backwards to come add up, until :meth:`reduce_deferred`."""
        self._defers = True

    def reduce_deferred(self) -> None:
        """Ends :meth:`defer_reduction`."""
        self._defers = False
        groups, self._deferred = self._deferred, []
        self.start_reduce(groups)

    def start_reduce(self, groups: Sequence[_C.ShardGroup]) -> None:
        """Sends the gradients of ``groups`` off to the shards; they are complete when backward returns."""
        accumulation = self.engine.accumulation
        accumulates = self.policy.keep_gradients and accumulation.is_on
        if self._defers or accumulates:
            self._deferred += [group for group in groups if group not in self._deferred]
            if accumulates and groups:
                accumulation.add_block(self)
            return
        if self._deferred:
            groups = [*self._deferred, *(group for group in groups if group not in self._deferred)]
            self._deferred = []
        accumulation.block_is_sent(self)
        engine = self.engine
        engine.observer.reducing(self, groups)
        with engine.observer.waiting(self.label, "reduce"):
            for group in groups:
                group.start_reduce()
        engine.add_reduction(self, groups)
