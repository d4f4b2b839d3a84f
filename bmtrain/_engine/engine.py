"""State shared by all blocks of a process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .._C import BufferPool, OpenIslands, ShardGroup
from ..global_var import context
from .accumulation import Accumulation
from .host_activations import CudaMover, HostStack, Mover
from .observer import Observer
from .policy import BlockPolicy
from .reads import Reads
from .replaced import ReplacedParameters
from .running import ReductionListener, RunningBlock, RunningCall
from .schedule import Schedule
from .virtual_sum import VirtualSum
from .wrapped import WrappedModels

if TYPE_CHECKING:
    from .._ranks.context import Context
    from ..parameter import DistributedParameter

__all__ = ["Engine", "current_engine", "default_policy"]

#: Idle buffers kept per size. A backward uses up to five (the gathered block and the prefetched one; a gradient being
#: accumulated, one being sent and one being received), a forward two: more idle ones would add to its activations.
SLOTS_PER_CLASS = 2


class Engine:
    """State shared by all blocks of a process: buffers, the learnt order of calls, and pending reductions."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: Policy for Blocks built without one (set by `default_policy`).
        self.default_policy: BlockPolicy | None = None
        #: Number of blocks that are recomputing their forward.
        self.recomputing = 0
        #: Islands of blocks in which autograd is running.
        self.islands = OpenIslands()
        #: The calls whose forward is running, outermost first.
        self.calls: list[RunningCall] = []
        #: All live blocks.
        self.runtimes: weakref.WeakSet[RunningBlock] = weakref.WeakSet()
        self.pool = BufferPool(SLOTS_PER_CLASS, bool(int(os.environ.get("BMTRAIN_POISON_BUFFERS", "0"))))
        self.schedule = Schedule()
        self.reads = Reads()
        self.replaced = ReplacedParameters()
        self.wrapped = WrappedModels()
        #: Moves activations between device and host; None on CPU runs.
        self.mover: Mover | None = CudaMover(device) if device.type == "cuda" else None
        self.host_stack = HostStack()
        self.accumulation = Accumulation()
        self.virtual = VirtualSum()
        self._reductions: list[tuple[RunningBlock, Sequence[ShardGroup]]] = []
        #: Listeners, notified when the gradients of a block have reached their shards.
        self.after_reduction: weakref.WeakSet[ReductionListener] = weakref.WeakSet()
        #: Number of steps whose updates the CPU computes while the device runs. See `Schedule`.
        self.lagging_steps = 0
        self._callback_task = -1
        self._is_ending = False
        self._accumulated: dict[int, DistributedParameter] = {}
        #: Receives the events of a step; a recording replaces it.
        self.observer = Observer()

    @property
    def is_summing_virtual_shards(self) -> bool:
        """Whether a step of :func:`bmtrain.virtual_shards` is under way."""
        return self.virtual.is_open

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """Context manager for the recomputation of a block's forward."""
        self.recomputing += 1
        try:
            yield
        finally:
            self.recomputing -= 1

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses steps of parameters that the wrapper has replaced, and warns of plain ones put in since."""
        self.replaced.check(optimizer)
        self.wrapped.check_step()

    def add_reduction(self, runtime: RunningBlock, groups: Sequence[ShardGroup]) -> None:
        """Takes over a started reduction, and completes the previous one: at most one overlaps with compute.

        The sum over replicas, which follows the sum over the ranks that share a block, overlaps with one more block.
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

    def to_reduce_now(self, param: DistributedParameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Decides where the full gradient of a parameter outside Blocks goes.

        Returns:
            The gradient to reduce into the shard in this backward, including unsent gradients; None if the sum over
            virtual shards or ``no_sync()`` has taken it.
        """
        if self.virtual.is_open:
            self.virtual.add_outside(param, gradient)
            return None
        if self.accumulation.is_on:
            self.accumulation.add_outside(param, gradient)
            return None
        if self.accumulation.is_open:
            self.call_at_end_of_backward()
        return self.accumulation.with_unsent(param, gradient)

    def note_accumulated(self, param: DistributedParameter) -> None:
        """Schedules the post-accumulate hooks of ``param`` for the end of backward, when gradients are complete."""
        if self.virtual.is_open or self.accumulation.keeps_outside(param):
            return  # autograd calls this for a gradient that went to the sum, or is unsent, too
        self._accumulated[id(param)] = param
        if (
            self.islands.count == 0 and not self._is_ending
        ):  # else the island, or the end of backward, does it
            self.call_at_end_of_backward()

    def call_at_end_of_backward(self) -> None:
        """Makes all gradients complete when the running backward returns."""
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

    def reductions_under_way(self) -> list[ShardGroup]:
        """Buffers whose gradients may be summed on arrival; trees (:attr:`virtual`) have a fixed order."""
        return [] if self.virtual.is_open else [group for _, groups in self._reductions for group in groups]

    def finish_reduction_of(self, groups: Iterable[ShardGroup]) -> None:
        """Completes the pending reduction if it involves one of ``groups`` (a block that ran twice in a row)."""
        for _, under_way in self._reductions:
            if not set(under_way).isdisjoint(groups):
                self.finish_reductions()
                return

    def drop_stale_reductions(self) -> None:
        """Drops pending reductions of a backward that failed: the gradients may have been zeroed since."""
        if (self._reductions or self._accumulated) and torch._C._current_graph_task_id() == -1:
            self._accumulated.clear()
            while self._reductions:
                for group in self._reductions.pop(0)[1]:
                    group.cancel_backward()

    def finish_reductions(self) -> None:
        """Waits until every gradient sent has reached its shard."""
        while self._reductions:
            runtime, groups = self._reductions.pop(0)
            self.observer.awaiting_reduction(groups)
            for group in groups:
                group.await_reduce()
            self.observer.reduced(groups)
            for group in groups:
                group.finish_reduce(self.virtual.tree_of(group) if self.virtual.is_open else None)
            for user in tuple(self.after_reduction):
                user.reduced(runtime)


def current_engine(context: Context) -> Engine:
    """Returns the engine of ``context``, with its own type."""
    return context.engine  # type: ignore[return-value]  # init_distributed made it


@contextmanager
def default_policy(policy: BlockPolicy) -> Iterator[None]:
    """Context manager that sets the policy of Blocks built in it; their own arguments take precedence.

    Args:
        policy: for Blocks built without ``policy``, ``zero_level`` and ``use_checkpoint``.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`.
        TypeError: ``policy`` is not a :class:`BlockPolicy`.

    Example:
        >>> with bmtrain.default_policy(bmtrain.BlockPolicy(level=2)):
        ...     model = bmtrain.BMTrainModelWrapper(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    """
    if not isinstance(policy, BlockPolicy):
        raise TypeError(f"policy: expected a BlockPolicy, got {policy!r:.80} ({type(policy).__name__})")
    engine = current_engine(context())
    before, engine.default_policy = engine.default_policy, policy
    try:
        yield
    finally:
        engine.default_policy = before
