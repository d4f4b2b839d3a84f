"""Calls of blocks: gathering, prefetching and releasing their parameters, and the state that all blocks share.

[Note: Overlap of gather and compute]
When a block starts, the gather of the block expected next is started, so that communication overlaps with compute. The
expected call is the one that followed the last time the same two calls followed each other: nothing is declared;
forward, backward, shared blocks and evaluation follow one rule; and a program that takes another path loses the overlap
of that one step only. A prefetched gather is used only by the very next block call; otherwise it is dropped, so it
never shows parameters older than the call before (optimizer steps and loads drop it as well). All ranks make the same
calls in the same order, so they expect the same blocks, and their collectives match.

Where the CPU updates parameters of a device, the host must wait for the update before it can start the gather. In the
first forward after a step it therefore prefetches only when the present block's kernels have been launched, so that
the device computes while the host waits. Ranks wait for different times, but decide by the step alone.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias

import torch

from .._C import BufferPool, DeferredProducts, HostLane, OpenIslands, ShardedBuffer
from .._ranks.context import Context
from ..errors import CommunicationError
from .block_state import BlockState
from .disk_tier import DiskTier
from .drives import Drives
from .gradients import Gradients
from .host_activations import CudaMover, HostStack, Mover
from .observer import Observer
from .phase import Event, Phase
from .policy import BlockPolicy
from .reads import Reads
from .replaced import ReplacedParameters
from .virtual_sum import VirtualSum
from .wrapped import WrappedModels

#: Idle buffers kept per size. A backward uses up to five (the gathered block and the prefetched one; a gradient being
#: accumulated, one being sent and one being received), a forward two: more idle ones would add to its activations.
SLOTS_PER_CLASS = 2
_NO_WAIT = nullcontext()

_Call: TypeAlias = tuple[Event, BlockState]
_Follower: TypeAlias = "tuple[Event, weakref.ref[BlockState]]"


class Schedule:
    """The order of block calls. It knows which call is expected next, and starts nothing."""

    def __init__(self) -> None:
        self._last: Event | None = None
        self._before_last: Event | None = None
        self._followers: dict[tuple[Event | None, Event], _Follower] = {}
        self._follower: _Follower | None = None  # of the last two calls

    def enter(self, block: BlockState, phase: Phase) -> None:
        """Records that a call of ``block`` starts."""
        event, last = block.events[phase], self._last
        if last is not None:
            if self._follower is None or self._follower[0] is not event:
                self._followers[self._before_last, last] = event, weakref.ref(block)
            starts_a_pass = phase is not Phase.BACKWARD and phase is not last.phase
            self._before_last = None if starts_a_pass else last
        self._last = event
        self._follower = self._followers.get((self._before_last, event))

    def expected(self, last: Event | None = None, follower: _Follower | None = None) -> _Call | None:
        """Returns the call expected after the current one, or after ``last``; None if it cannot be predicted."""
        last, follower = last or self._last, follower or self._follower
        if last is None or follower is None:
            return None
        event, block = follower[0], follower[1]()
        # Parameters change between a backward and the next forward, and may change between two evaluations, or between
        # the forward of one model and the evaluation of another (a momentum teacher): neither another kind of pass nor
        # a return to an earlier block is a reason to gather.
        is_return = event.phase is not last.phase or event.block <= last.block
        return None if block is None or (is_return and event.phase is not Phase.BACKWARD) else (event, block)

    def upcoming(self) -> Iterator[_Call]:
        """Yields the calls expected after the current one, as far as they can be predicted."""
        last, found = self._last, self.expected()
        while last is not None and found is not None:
            yield found
            follower, last = self._followers.get((last, found[0])), found[0]
            found = None if follower is None else self.expected(last, follower)

    def expects_backward_of(self, block: BlockState) -> bool:
        """Whether the backward of the running block is expected right after it."""
        follower = self.expected()
        return follower is not None and follower[0] is block.events[Phase.BACKWARD]


class Engine:
    """Runs the blocks of a process, one call after the other. See [Note: Overlap of gather and compute].

    Attributes:
        default_policy: policy for Blocks built without one (set by `default_policy`).
        pool: memory of gathered parameters and full gradients.
        blocks: all live blocks.
        num_blocks: how many there have been; it is the number that the next one gets.
        schedule: the learnt order of calls.
        gradients: gradients that have not reached their shards.
        islands: islands of blocks in which autograd is running.
        later: receives the products that are gradients of weights, in a backward of inputs alone; None: made at once.
        calls: the calls whose forward is running, outermost first.
        lagging_steps: number of steps whose updates the CPU computes while the device runs.
        observer: receives the events of a step; None if nothing records them.
        drives, tier: where files are made, and the transfers of parameters and gradients; None without.
        mover, host_lane: move activations, and shards on the host, between device and host; None on CPU runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.default_policy: BlockPolicy | None = None
        self.pool = BufferPool(SLOTS_PER_CLASS, bool(int(os.environ.get("BMTRAIN_POISON_BUFFERS", "0"))))
        self.blocks: weakref.WeakSet[BlockState] = weakref.WeakSet()
        self.num_blocks = 0
        self.schedule = Schedule()
        self.islands = OpenIslands()
        self.later: DeferredProducts | None = None
        self.rows: slice | None = None  # of `on_rows` of a pipeline
        self.gradients = Gradients(self)
        self.virtual = VirtualSum(self.gradients.unsent)
        self.calls: list[Any] = []
        self.lagging_steps = 0
        self.observer: Observer | None = None
        self.drives: Drives | None = None
        self.tier: DiskTier | None = None
        self.reads = Reads()
        self.replaced = ReplacedParameters()
        self.wrapped = WrappedModels()
        self.mover: Mover | None = CudaMover(device) if device.type == "cuda" else None
        self.host_lane: HostLane | None = None
        self.host_stack = HostStack()
        self._ahead: BlockState | None = None  # gathered for the next call
        self._late: BlockState | None = None  # to be gathered once the present block has been launched

    def add_block(self, block: BlockState) -> int:
        """Adds a new block, and returns its number."""
        self.blocks.add(block)
        self.num_blocks += 1
        return self.num_blocks - 1

    def replace_buffers(self, block: BlockState, buffers: Sequence[ShardedBuffer]) -> None:
        """Gives a block other buffers; pending operations on the old ones are dropped."""
        self.drop_ahead()
        block.drop_gathered()
        block.buffers = tuple(buffers)
        block.is_gathered = False

    # ---- one call, from open() to close()

    def open(self, block: BlockState, phase: Phase) -> None:
        """Makes a block's parameters full tensors; `close` or `abandon` must follow, after errors too. Collective."""
        block.seen_step = self.lagging_steps
        if block.pending:
            self._finish_updates(block)
        if phase is not Phase.BACKWARD:
            self.gradients.drop_stale()
        adopted = block.adopt_data()
        if block.is_gathered and ((adopted and phase is not Phase.BACKWARD) or not block.is_current()):
            block.drop_gathered()
        if not block.is_held:
            self._enter(block, phase)
            if self.tier is not None:
                self.tier.look_ahead(block, self.schedule.upcoming())
        self._start_gather(block)
        observer = self.observer
        if observer is not None:
            observer.awaiting_gather(block)
        block.finish_gather()
        if observer is not None:
            observer.gathered(block)
        block.bind(is_watched=phase is not Phase.BACKWARD)
        if not block.is_held:
            self._gather_ahead()
        if observer is not None:
            observer.computing(block, phase)

    def keeps_for_backward(self, block: BlockState) -> bool:
        """Whether the gathered parameters of the running block should stay until its backward."""
        return block.policy.level <= 2 or self.schedule.expects_backward_of(block)

    def close(self, block: BlockState, *, keep: bool) -> None:
        """Makes the parameters shards again; ``keep`` leaves the gathered buffers for the backward."""
        self.end_call(block, keep)
        late, self._late = self._late, None
        if late is not None:  # the host must wait for its update; the present block has been launched
            self._prefetch(late)

    def abandon(self, block: BlockState) -> None:
        """Makes the parameters shards after an error or Ctrl-C, whatever had begun, and drops gathered memory."""
        with suppress(CommunicationError):  # of a pending gather: the caller raises the first error
            self.end_call(block, keep=False)
            block.drop_gathered()
            self.drop_ahead()

    def end_call(self, block: BlockState, keep: bool) -> None:
        if self.observer is not None:
            self.observer.computed(block)
        block.unbind()
        self.keep_or_drop(block, keep)

    def keep_or_drop(self, block: BlockState, keep: bool) -> None:
        """Releases the gathered parameters, unless the policy or a pending backward keeps them."""
        if block.policy.level == 1:
            return
        if block.policy.keep_gathered and self.gradients.is_window_open():
            self.gradients.unsent.gathered[block.number] = block
        elif not keep:
            block.drop_gathered()

    def _finish_updates(self, block: BlockState) -> None:
        """Waits for pending optimizer updates. See [Note: Updates that overlap]."""
        with self.waiting(block.label, "update"):
            for update in tuple(block.pending):
                update.finish_together()

    # ---- gathers

    def _enter(self, block: BlockState, phase: Phase) -> None:
        """Records the call, and drops gathered parameters that must not be used in it, or not be used any more."""
        self.schedule.enter(block, phase)
        self._late = None
        if self._ahead is block:  # open() has dropped gathers that are not current
            self._ahead = None
            return
        self.drop_ahead()
        if phase is not Phase.BACKWARD and not self.is_of_this_round(block):
            block.drop_gathered()  # kept for a backward that did not run: perhaps of older parameters

    def _start_gather(self, block: BlockState) -> None:
        """Starts the gather, unless the parameters are gathered."""
        if block.is_gathered:
            return
        if self.observer is not None:
            self.observer.gathering(block)
        with self.waiting(block.label, "gather"):
            block.start_gather(self.gradients.round)

    def _gather_ahead(self) -> None:
        """Starts the gather of the block expected next, unless :meth:`close` does."""
        follower = self.schedule.expected()
        if follower is None:
            return
        event, block = follower
        # The same on all ranks, which wait for different times.
        if event.phase is not Phase.BACKWARD and block.seen_step != self.lagging_steps:
            self._late = block
        else:
            self._prefetch(block)

    def _prefetch(self, block: BlockState) -> None:
        """Starts a gather for a later call, unless the parameters are gathered already."""
        stays = block.is_gathered and (block.policy.level != 1 or self.is_of_this_round(block))
        if block.is_bound or stays:
            return
        block.drop_gathered()
        if block.pending:
            self._finish_updates(block)
        block.adopt_data()
        self._start_gather(block)
        self._ahead = block

    def drop_ahead(self) -> None:
        """Drops a prefetched gather that is not used (it is waited for first)."""
        ahead, self._ahead, self._late = self._ahead, None, None
        if ahead is not None:
            ahead.drop_gathered()

    def is_of_this_round(self, block: BlockState) -> bool:
        """Whether the gathered parameters are valid for another forward: kept by the policy, and unchanged."""
        return (
            (block.policy.level == 1 or (block.policy.keep_gathered and self.gradients.is_window_open()))
            and block.gathered_round == self.gradients.round
            and block.is_current()
        )

    # ---- shared by all blocks, and parameters outside them

    def waiting(self, name: str, reason: str) -> AbstractContextManager[None]:
        """Context manager for waits of this rank, for the observer. See :meth:`Observer.waiting`."""
        return _NO_WAIT if self.observer is None else self.observer.waiting(name, reason)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses steps of parameters that the wrapper has replaced, and warns of plain ones put in since."""
        self.replaced.check(optimizer)
        self.wrapped.check_step()

    def refuse_shard(self, collective: str, x: torch.Tensor) -> None:
        """See :meth:`WrappedModels.refuse_shard`."""
        self.wrapped.refuse_shard(collective, x)

    @property
    def is_summing_virtual_shards(self) -> bool:
        """Whether a step of :func:`bmtrain.virtual_shards` is under way."""
        return self.virtual.is_open


def current_engine(context: Context) -> Engine:
    """Returns the engine of ``context``, with its own type."""
    return context.engine  # type: ignore[return-value]  # init_distributed made it
