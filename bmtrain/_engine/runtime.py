"""The state of one block between its calls, and of all blocks together."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import TYPE_CHECKING

import torch

from .. import _C
from .accumulation import Accumulation
from .host_activations import CudaMover, HostStack, Mover
from .observer import Observer
from .reads import Reads
from .recompute import left_behind
from .schedule import Event, Phase, Schedule
from .virtual_sum import VirtualSum

if TYPE_CHECKING:
    from ..parameter import DistributedParameter
    from .island import BlockCall
    from .pending import PendingUpdate
    from .policy import BlockPolicy

__all__ = ["BlockRuntime", "Engine"]

_SHARDED = _C.ShardGroup.State.SHARDED
_VERSION = methodcaller("version")

#: Idle buffers kept per size. A backward has up to five in use (the gathered block and the one ahead, a gradient that
#: arrives, one on its way and what it meets), a forward two: more idle ones would stand beside its activations.
SLOTS_PER_CLASS = 2


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
            adopted |= group.adopt_data()
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
                if group not in self._deferred:
                    group.begin_backward(flags, under_way)

    def cancel_backward(self, groups: Sequence[_C.ShardGroup]) -> None:
        """Forgets the gradients of a backward that failed."""
        for group in groups:
            group.cancel_backward()
        self._deferred = [group for group in self._deferred if group not in groups]

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


class Engine:
    """What all blocks of a process share: buffers, the learnt order of calls, and reductions under way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: Of Blocks that are built now and given none of their own.
        self.default_policy: BlockPolicy | None = None
        #: How many blocks run their forward again right now.
        self.recomputing = 0
        #: The blocks' islands that autograd runs inside of.
        self.islands = _C.OpenIslands()
        #: The calls whose forward runs right now, the outermost first.
        self.calls: list[BlockCall] = []
        #: All blocks, as long as somebody else refers to them.
        self.runtimes: weakref.WeakSet[BlockRuntime] = weakref.WeakSet()
        self.pool = _C.BufferPool(SLOTS_PER_CLASS, bool(int(os.environ.get("BMTRAIN_POISON_BUFFERS", "0"))))
        self.schedule = Schedule()
        self.reads = Reads()
        #: Of activations, on devices that are not the host.
        self.mover: Mover | None = CudaMover(device) if device.type == "cuda" else None
        self.host_stack = HostStack()
        self.accumulation = Accumulation()
        self.virtual = VirtualSum()
        self._reductions: list[tuple[BlockRuntime, Sequence[_C.ShardGroup]]] = []
        #: Called when the gradients of a block have reached their shards. See [Note: Stepping in backward].
        self.after_reduction: Callable[[BlockRuntime], None] | None = None
        #: Steps whose updates the CPU goes on computing while the device runs. See `Schedule`.
        self.lagging_steps = 0
        self._callback_task = -1
        self._is_ending = False
        self._accumulated: dict[int, DistributedParameter] = {}
        #: Told what begins and ends; a recording puts itself here.
        self.observer = Observer()

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """While a block runs its forward again."""
        self.recomputing += 1
        try:
            yield
        finally:
            self.recomputing -= 1

    def add_reduction(self, runtime: BlockRuntime, groups: Sequence[_C.ShardGroup]) -> None:
        """Takes over a reduction under way; completes the one before, so that at most one overlaps with compute.

        A sum over replicas, which follows that over the ranks that share a block, overlaps with one block more.
        """
        under_way = self._reductions
        if under_way:
            latest = under_way.pop()
            self.finish_reductions()
            under_way.append(latest)
            goes_on = False
            for group in latest[1]:
                goes_on |= group.continue_reduce()
            if not goes_on:
                self.finish_reductions()
        under_way.append((runtime, groups))
        if not self._is_ending:
            self.call_at_end_of_backward()

    def note_accumulated(self, param: DistributedParameter) -> None:
        """Lets the post-accumulate hooks of ``param`` run at the end of this backward, when all gradients are there."""
        if self.virtual.is_open or self.accumulation.keeps_outside(param):
            return  # autograd tells of a gradient that went to the sum, or waits, instead
        self._accumulated[id(param)] = param
        if self.islands.count == 0 and not self._is_ending:  # else the island, or the end, sees to it
            self.call_at_end_of_backward()

    def call_at_end_of_backward(self) -> None:
        """Lets all gradients be complete when the backward that runs now returns."""
        task = torch._C._current_graph_task_id()
        if task != self._callback_task:
            self._callback_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_ending = True
        try:
            if self.islands.count == 0 and not self.accumulation.is_on:
                self.accumulation.close()
            self.finish_reductions()
        finally:
            self._is_ending = False
        if self.islands.count == 0:
            self._run_accumulated_hooks()

    def publish_virtual(self, num_shards: int) -> None:
        """Completes the gradients of a step of virtual shards."""
        self._is_ending = True
        try:
            self.virtual.publish(num_shards)
        finally:
            self._is_ending = False
        self._run_accumulated_hooks()

    def _run_accumulated_hooks(self) -> None:
        accumulated, self._accumulated = self._accumulated, {}
        for param in accumulated.values():
            param._run_accumulated_hooks()

    def reductions_under_way(self) -> list[_C.ShardGroup]:
        """Groups whose gradients may be summed as soon as they come; trees (:attr:`virtual`) keep an order."""
        return [] if self.virtual.is_open else [group for _, groups in self._reductions for group in groups]

    def finish_reduction_of(self, groups: Iterable[_C.ShardGroup]) -> None:
        """Completes the reduction under way if it is of one of ``groups`` (a block that ran twice in a row)."""
        for _, under_way in self._reductions:
            if not set(under_way).isdisjoint(groups):
                self.finish_reductions()
                return

    def drop_stale_reductions(self) -> None:
        """Forgets what a backward that failed left under way: by now the gradients may have been zeroed."""
        if (self._reductions or self._accumulated) and torch._C._current_graph_task_id() == -1:
            self._accumulated.clear()
            while self._reductions:
                for group in self._reductions.pop(0)[1]:
                    group.cancel_backward()

    def finish_reductions(self) -> None:
        """Waits until every gradient sent off has reached its shard."""
        while self._reductions:
            runtime, groups = self._reductions.pop(0)
            self.observer.awaiting_reduction(groups)
            for group in groups:
                group.await_reduce()
            self.observer.reduced(groups)
            for group in groups:
                self.virtual.finish_reduce(group)
            if self.after_reduction is not None:
                self.after_reduction(runtime)
