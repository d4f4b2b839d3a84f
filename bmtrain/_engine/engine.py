"""What all blocks of a process share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .. import _C
from .accumulation import Accumulation
from .host_activations import CudaMover, HostStack, Mover
from .observer import Observer
from .reads import Reads
from .replaced import ReplacedParameters
from .schedule import Schedule
from .virtual_sum import VirtualSum

if TYPE_CHECKING:
    from ..optim._ahead import SentAhead
    from ..optim._early import EarlySteps
    from ..parameter import DistributedParameter
    from .island import BlockCall
    from .policy import BlockPolicy
    from .runtime import BlockRuntime

__all__ = ["Engine"]

#: Idle buffers kept per size. A backward has up to five in use (the gathered block and the one ahead, a gradient that
#: arrives, one on its way and what it meets), a forward two: more idle ones would stand beside its activations.
SLOTS_PER_CLASS = 2


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
        self.replaced = ReplacedParameters()
        #: Of activations, on devices that are not the host.
        self.mover: Mover | None = CudaMover(device) if device.type == "cuda" else None
        self.host_stack = HostStack()
        self.accumulation = Accumulation()
        self.virtual = VirtualSum()
        self._reductions: list[tuple[BlockRuntime, Sequence[_C.ShardGroup]]] = []
        #: Told when the gradients of a block have reached their shards.
        self.after_reduction: weakref.WeakSet[EarlySteps | SentAhead] = weakref.WeakSet()
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
            for user in tuple(self.after_reduction):
                user.reduced(runtime)
