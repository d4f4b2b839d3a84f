"""Which block runs next: learnt from the last time, used to start its gather early.

[Note: Overlap of gather and compute]
When a block starts, the gather of the block that is expected to run next is started, so that it travels while this one
computes. What comes next is what came next the last time the same two calls followed each other: nothing is declared,
forward and backward, shared blocks and evaluation are all the same rule, and a program that takes another path only
loses the overlap of that one step. A gather started early is used only by the very next block call; otherwise it is
dropped, so it can never show parameters older than the call before (optimizer steps and loads drop it as well). All
ranks make the same calls in the same order, so they expect the same blocks and their collectives stay in step.

Where the CPU updates parameters of a device, the host has to wait for the update before it can start the gather. In the
first forward after a step it therefore gathers ahead only when the present block's kernels have been launched, so that
the device computes while the host waits. Ranks wait for different times, but decide by the step alone.
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from .runtime import BlockRuntime

__all__ = ["Event", "Phase", "Schedule"]


class Phase(enum.Enum):
    """What a block call is for."""

    FORWARD = "forward"  # a forward that may be followed by a backward
    BACKWARD = "backward"  # the recomputation and gradient of an earlier forward
    EVALUATE = "evaluate"  # a forward without gradients

    # Members are single objects: enum's own hash, of the name, is a call of Python for each look-up.
    __hash__ = object.__hash__


class Event(NamedTuple):
    """One block call: the block's number and what it was called for."""

    block: int
    phase: Phase


_Follower: TypeAlias = "tuple[Event, weakref.ref[BlockRuntime]]"


class Schedule:
    """The order of block calls, and the gather that was started ahead of it."""

    def __init__(self) -> None:
        self._last: Event | None = None
        self._before_last: Event | None = None
        self._followers: dict[tuple[Event | None, Event], _Follower] = {}
        self._follower: _Follower | None = None  # of the last two
        self._ahead: BlockRuntime | None = None
        # To be gathered ahead once the present block has been launched.
        self._late: BlockRuntime | None = None
        #: The number that the next block gets, in order of construction.
        self.next_number = 0

    def take_number(self) -> int:
        """A number for a new block."""
        self.next_number += 1
        return self.next_number - 1

    def enter(self, runtime: BlockRuntime, phase: Phase) -> None:
        """Records that `runtime` starts now, and drops a gather that was started for another block."""
        event, last = runtime.events[phase], self._last
        self._late = None
        if last is not None:
            if self._follower is None or self._follower[0] is not event:
                self._followers[self._before_last, last] = event, weakref.ref(runtime)
            starts_a_pass = phase is not Phase.BACKWARD and phase is not last.phase
            self._before_last = None if starts_a_pass else last
        self._last = event
        self._follower = self._followers.get((self._before_last, event))
        if self._ahead is runtime and runtime.gathered_is_current():
            self._ahead = None
        else:
            self.drop_ahead()
            if phase is not Phase.BACKWARD and not runtime.is_of_this_round():
                runtime.drop_gathered()  # kept for a backward that never came: perhaps of older parameters

    def expected(self) -> tuple[Event, BlockRuntime] | None:
        """The call expected after the current one, or None if there is no telling."""
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

    def expects_backward_of(self, runtime: BlockRuntime) -> bool:
        """Whether the backward of the block that runs now is expected right after it."""
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
        """The same for a block whose update the host has to wait for, now that the present block is launched."""
        late, self._late = self._late, None
        if late is not None and late.start_gather_ahead():
            self._ahead = late

    def drop_ahead(self) -> None:
        """Gives back a gather that was started early and is not wanted any more (it is waited for first)."""
        ahead, self._ahead, self._late = self._ahead, None, None
        if ahead is not None:
            ahead.drop_gathered()
