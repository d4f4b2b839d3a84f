"""Prefetch schedule: the order of block calls, learnt from earlier steps.

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

import weakref
from typing import TypeAlias

from .running import Event, Phase, RunningBlock

__all__ = ["Schedule"]


_Follower: TypeAlias = "tuple[Event, weakref.ref[RunningBlock]]"


class Schedule:
    """The order of block calls, and the prefetched gather."""

    def __init__(self) -> None:
        self._last: Event | None = None
        self._before_last: Event | None = None
        self._followers: dict[tuple[Event | None, Event], _Follower] = {}
        self._follower: _Follower | None = None  # of the last two calls
        self._ahead: RunningBlock | None = None
        # To be prefetched once the present block has been launched.
        self._late: RunningBlock | None = None
        #: The number that the next block gets, in order of construction.
        self.next_number = 0

    def take_number(self) -> int:
        """Returns the number of a new block."""
        self.next_number += 1
        return self.next_number - 1

    def enter(self, runtime: RunningBlock, phase: Phase) -> None:
        """Records that `runtime` starts, and drops a gather that was prefetched for another block."""
        event, last = runtime.events[phase], self._last
        self._late = None
        if last is not None:
            if self._follower is None or self._follower[0] is not event:
                self._followers[self._before_last, last] = event, weakref.ref(runtime)
            starts_a_pass = phase is not Phase.BACKWARD and phase is not last.phase
            self._before_last = None if starts_a_pass else last
        self._last = event
        self._follower = self._followers.get((self._before_last, event))
        if self._ahead is runtime:  # which has dropped gathers that are not current
            self._ahead = None
        else:
            self.drop_ahead()
            if phase is not Phase.BACKWARD and not runtime.is_of_this_round():
                runtime.drop_gathered()  # kept for a backward that did not run: perhaps of older parameters

    def expected(self) -> tuple[Event, RunningBlock] | None:
        """Returns the call expected after the current one, or None if it cannot be predicted."""
        if self._last is None or self._follower is None:
            return None
        event, reference = self._follower
        runtime = reference()
        if runtime is None:
            return None
        # Parameters change between a backward and the next forward, may change between two evaluations, and between
        # the forward of one model and the evaluation of another (a momentum teacher): neither another kind of pass
        # nor a return to an earlier block is a reason to gather.
        if event.phase is not Phase.BACKWARD and (
            event.phase is not self._last.phase or event.block <= self._last.block
        ):
            return None
        return event, runtime

    def expects_backward_of(self, runtime: RunningBlock) -> bool:
        """Whether the backward of the running block is expected right after it."""
        follower = self.expected()
        return follower is not None and follower[0] is runtime.events[Phase.BACKWARD]

    def gather_ahead(self) -> None:
        """Starts the gather of the block expected next, unless that is for :meth:`gather_late`."""
        follower = self.expected()
        if follower is None:
            return
        event, runtime = follower
        if event.phase is not Phase.BACKWARD and runtime.may_lag():
            self._late = runtime
        elif runtime.start_gather_ahead():
            self._ahead = runtime

    def gather_late(self) -> None:
        """Prefetches a block whose update the host must wait for, after the present block was launched."""
        late, self._late = self._late, None
        if late is not None and late.start_gather_ahead():
            self._ahead = late

    def drop_ahead(self) -> None:
        """Drops a prefetched gather that is not used (it is waited for first)."""
        ahead, self._ahead, self._late = self._ahead, None, None
        if ahead is not None:
            ahead.drop_gathered()
