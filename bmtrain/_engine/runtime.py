"""The state of one block between its calls."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from operator import methodcaller
from typing import TYPE_CHECKING, Protocol

import torch

from .._C import IslandShore, ShardGroup
from ..errors import CommunicationError
from .copies import warn_of_lost_write
from .running import Event, Phase, RunningCall

if TYPE_CHECKING:
    from .._shards.block_ref import BlockRef
    from .engine import Engine
    from .policy import BlockPolicy

__all__ = ["BlockRuntime", "unreturned_tensor_error"]

_SHARDED = ShardGroup.State.SHARDED
_VERSION = methodcaller("version")


class _Update(Protocol):
    def finish(self) -> None: ...


class BlockRuntime:
    """Gathers, binds, releases and reduces the flat buffers of one block.

    A block is *sharded* between calls; ``open`` gathers and binds it, ``close`` unbinds it and releases it unless it
    stays for its backward. It may be prefetched before a call (see :class:`Schedule`).
    """

    def __init__(self, engine: Engine, label: str, groups: Sequence[ShardGroup], policy: BlockPolicy) -> None:
        self.engine = engine
        self.label = label
        self.groups = tuple(groups)
        self.policy = policy
        self.number = engine.schedule.take_number()
        #: Events of its calls, recorded by the schedule.
        self.events = {phase: Event(self.number, phase) for phase in Phase}
        engine.runtimes.add(self)
        #: Of its calls.
        self.shore = IslandShore(engine.islands, unreturned_tensor_error(label))
        self.is_bound = False
        #: The stage of a pipeline that runs the block, if it is another rank's.
        self.other_stage: int | None = None
        #: The parameters' reference to the Block.
        self.reference: BlockRef | None = None
        #: Optimizer steps of the block's parameters that are still being computed.
        self.pending: list[_Update] = []
        #: Forwards whose backward is pending, has failed, or has kept its graph.
        self.open_calls: weakref.WeakSet[RunningCall] = weakref.WeakSet()
        self._gathered_version = -1
        self._is_watched = False  # for writes to the gathered parameters, which would be lost
        self._gathered_round = -1
        self._seen_step = 0
        self._is_gathered = False  # or being gathered, for at least one of the buffers
        self._is_held = False
        self._defers = False
        self._deferred: list[ShardGroup] = []

    def replace_groups(self, groups: Sequence[ShardGroup]) -> None:
        """Replaces the buffers; pending operations on the old ones are dropped."""
        self.engine.schedule.drop_ahead()
        self.drop_gathered()
        self.groups = tuple(groups)
        self._is_gathered = False

    def version(self) -> int:
        """Sum of torch's version counters of the parameters, which do not count writes through ``.data``."""
        return sum(map(_VERSION, self.groups))

    def _value_version(self) -> int:
        """The version, with writes through ``.data`` counted too."""
        through_data = None if self.reference is None else self.reference._data_version
        version: int = sum(map(_VERSION, self.groups))
        return version if through_data is None else version + through_data.value

    def open(self, phase: Phase) -> None:
        """Makes the parameters full tensors; `close` or `abandon` must follow, also after an error. Collective."""
        engine = self.engine
        self._seen_step = engine.lagging_steps
        if self.pending:
            self.finish_updates()
        if phase is not Phase.BACKWARD:
            engine.drop_stale_reductions()
        adopted = self._adopt_data()
        if self._is_gathered and (
            (adopted and phase is not Phase.BACKWARD) or self._gathered_version != self._value_version()
        ):
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
        self._is_watched = phase is not Phase.BACKWARD
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
        """Waits for pending optimizer updates. See [Note: Updates that overlap]."""
        with self.engine.observer.waiting(self.label, "update"):
            for update in tuple(self.pending):
                update.finish()

    def _adopt_data(self) -> bool:
        """Copies tensors that users assigned (``param.data = tensor``) into the shards; False if there are none."""
        adopted = False
        for group in self.groups:
            if group.adopt_data():
                adopted = True
                if self.reference is not None:
                    self.reference.add_home(group.shard)
        return adopted

    def close(self, *, keep: bool) -> None:
        """Makes the parameters shards again; ``keep`` leaves the gathered buffer for the backward."""
        self._end_call(keep)
        self.engine.schedule.gather_late()

    def _end_call(self, keep: bool) -> None:
        self.engine.observer.computed(self)
        if self.is_bound and self._is_watched and self._value_version() != self._gathered_version:
            warn_of_lost_write(
                self.label,
                f"a write to a parameter in the forward of {self.label}",
                "a Block's parameters are",
            )
        for group in self.groups:
            group.unbind()
        self.is_bound = False
        self._keep_or_drop(keep)

    def _keep_or_drop(self, keep: bool) -> None:
        """Releases the gathered parameters, unless the policy or a pending backward keeps them."""
        if self.policy.level == 1:
            return
        accumulation = self.engine.accumulation
        if self.policy.keep_gathered and accumulation.is_open:
            accumulation.stays_gathered(self)
        elif not keep:
            self.drop_gathered()

    def abandon(self) -> None:
        """Makes the parameters shards after an error or Ctrl-C, whatever had begun, and drops gathered memory."""
        with suppress(CommunicationError):  # of a pending gather: the caller raises the first error
            self._end_call(keep=False)
            self.drop_gathered()
            self.engine.schedule.drop_ahead()

    def keeps_for_backward(self) -> bool:
        """Whether the gathered parameters should stay until backward."""
        return self.policy.level <= 2 or self.engine.schedule.expects_backward_of(self)

    def may_lag(self) -> bool:
        """Whether the host may wait for the block's update; the same on all ranks."""
        return self._seen_step != self.engine.lagging_steps

    def start_gather_ahead(self) -> bool:
        """Starts a gather for a later call; returns False if the parameters are gathered already."""
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
        self._gathered_version = self._value_version()
        self._gathered_round = engine.accumulation.round
        engine.observer.gathering(self)
        self._is_gathered = True
        with engine.observer.waiting(self.label, "gather"):
            for group in self.groups:
                group.start_gather(in_place=True)

    def is_of_this_round(self) -> bool:
        """Whether the gathered parameters are valid for another forward: kept by the policy, and unchanged."""
        return (
            (self.policy.level == 1 or (self.policy.keep_gathered and self.engine.accumulation.is_open))
            and self._gathered_round == self.engine.accumulation.round
            and self._gathered_version == self._value_version()
        )

    def drop_gathered(self) -> None:
        """Releases gathered memory, unless it is in use."""
        if self._is_gathered and not (self.is_bound or self._is_held):
            self._is_gathered = False
            for group in self.groups:
                if group.state != _SHARDED:  # as after a gather that failed
                    group.release()

    def hold(self) -> None:
        """Keeps the parameters gathered for several calls, until :meth:`let_go`.

        The next call gathers them again, unless the policy has kept them and they are unchanged.
        """
        self._is_held = False
        if not self.is_of_this_round():
            self.drop_gathered()
        self._is_held = True

    def let_go(self) -> None:
        """Ends :meth:`hold`."""
        self._is_held = False
        self._keep_or_drop(keep=False)

    def begin_backward(self, trains: Mapping[ShardGroup, list[bool]]) -> None:
        """Prepares buffers to receive gradients of the marked parameters, added to gradients of deferred calls."""
        engine = self.engine
        engine.finish_reduction_of(trains)
        under_way = engine.reductions_under_way()
        with engine.observer.waiting(self.label, "reduce"):
            for group, flags in trains.items():
                if group in self._deferred:
                    group.join_backward(flags)
                else:
                    group.begin_backward(flags, under_way)

    def cancel_backward(self, groups: Sequence[ShardGroup]) -> None:
        """Drops the gradients of a backward that failed."""
        for group in groups:
            group.cancel_backward()
        self._deferred = [group for group in self._deferred if group not in groups]

    def drop_unsent(self, params: Container[int]) -> bool:
        """Drops the unsent gradients of ``params``, given by identity; returns whether others are unsent."""
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
        """Accumulates the gradients of the following backwards, until :meth:`reduce_deferred`."""
        self._defers = True

    def reduce_deferred(self) -> None:
        """Ends :meth:`defer_reduction`."""
        self._defers = False
        groups, self._deferred = self._deferred, []
        self.start_reduce(groups)

    def start_reduce(self, groups: Sequence[ShardGroup]) -> None:
        """Starts the reduction of the gradients of ``groups``, which completes when backward returns."""
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


def unreturned_tensor_error(label: str) -> str:
    """Returns the error text for gradients that enter a block other than through its results."""
    return (
        f"{label}: backward reached a tensor that the block's forward made and did not return (it was left in an "
        "attribute or a list, or taken by a hook); return it as a further result, so that its gradient can flow"
    )
