"""The state of one block between its calls."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch

from .._C import Communicator, IslandShore, ShardedBuffer
from .._shards.block_ref import BlockRef
from .copies import warn_of_lost_write
from .phase import Event, Phase
from .policy import BlockPolicy

_SHARDED = ShardedBuffer.State.SHARDED
_VERSION = methodcaller("version")


class BlockState:
    """The flat buffers of one block: sharded between calls, or gathered, and in a call also bound to the parameters.

    The :class:`Engine` decides when each changes; a block knows no other block.

    Attributes:
        number: in order of construction, the same on all ranks.
        events: the events of its calls, by phase.
        shore: guards the leaves of its calls.
        other_stage: the stage of a pipeline that runs the block, if it is another rank's.
        reference: the parameters' reference to the Block.
        pending: optimizer steps of the block's parameters that are still being computed.
        open_calls: forwards whose backward is pending, has failed, or has kept its graph.
        defers: whether a pipeline accumulates the gradients of several backwards in the buffers.
    """

    def __init__(
        self, engine: Any, label: str, buffers: Sequence[ShardedBuffer], policy: BlockPolicy
    ) -> None:
        self.engine = engine  # an Engine, which imports this module
        self.label = label
        self.buffers = tuple(buffers)
        self.policy = policy
        self.recomputes = policy.recomputes
        self.number = engine.add_block(self)
        self.events = {phase: Event(self.number, phase) for phase in Phase}
        self.shore = IslandShore(engine.islands, unreturned_tensor_error(label))
        self.other_stage: int | None = None
        self.reference: BlockRef | None = None
        self.pending: list[Any] = []
        self.open_calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_bound = False  # its parameters are full tensors, in a call
        self.is_gathered = False  # or being gathered, at least one of the buffers
        self.is_held = False  # stays gathered for several calls
        self.gathered_version = -1  # of the parameters, when the gather was started
        self.gathered_round = -1  # the number of backwards before that (`Gradients.round`)
        self.seen_step = 0  # the number of lagging steps before its last call
        self.defers = False
        self.unsent: list[ShardedBuffer] = []  # buffers with gradients of earlier backwards
        self._is_watched = False  # for writes to the gathered parameters, which would be lost

    def store(self, shards: Sequence[Any], comm: Communicator) -> None:
        """Called with the shards of the buffers that are on a drive, or None for each, and the ranks that call it."""

    # ---- versions

    def version(self) -> int:
        """Sum of torch's version counters of the parameters, which do not count writes through ``.data``."""
        return sum(map(_VERSION, self.buffers))

    def _value_version(self) -> int:
        """The version, with writes through ``.data`` counted too."""
        through_data = None if self.reference is None else self.reference._data_version
        return self.version() + (0 if through_data is None else through_data.value)

    def is_current(self) -> bool:
        """Whether the parameters are unchanged since they were gathered."""
        return self.gathered_version == self._value_version()

    # ---- gathered parameters

    def adopt_data(self) -> bool:
        """Copies tensors that users assigned (``param.data = tensor``) into the shards; False if there are none."""
        adopted = False
        for buffer in self.buffers:
            if buffer.adopt_data():
                adopted = True
                if self.reference is not None:
                    self.reference.add_home(buffer.shard)
        return adopted

    def start_gather(self, round_: int) -> None:
        """Starts the gather, in the round ``round_`` of :class:`~bmtrain._engine.gradients.Gradients`. Collective."""
        self.gathered_version = self._value_version()
        self.gathered_round = round_
        self.is_gathered = True
        for buffer in self.buffers:
            buffer.start_gather(in_place=True)

    def finish_gather(self) -> None:
        """Waits for the gather."""
        for buffer in self.buffers:
            buffer.finish_gather()

    def bind(self, *, is_watched: bool) -> None:
        """Makes the parameters full tensors; ``is_watched`` warns of writes to them, which are lost."""
        for buffer in self.buffers:
            buffer.bind()
        self.is_bound = True
        self._is_watched = is_watched

    def unbind(self) -> None:
        """Makes the parameters shards."""
        if self.is_bound and self._is_watched and not self.is_current():
            warn_of_lost_write(
                self.label,
                f"a write to a parameter in the forward of {self.label}",
                "a Block's parameters are",
            )
        for buffer in self.buffers:
            buffer.unbind()
        self.is_bound = False

    def drop_gathered(self) -> None:
        """Releases gathered memory, unless it is in use."""
        if self.is_gathered and not (self.is_bound or self.is_held):
            self.is_gathered = False
            for buffer in self.buffers:
                if buffer.state != _SHARDED:  # as after a gather that failed
                    buffer.release()

    def owns_storage(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the gathered parameters."""
        for buffer in self.buffers:  # noqa: SIM110 (a generator costs as much again, for each saved tensor)
            if buffer.owns_storage(tensor):
                return True
        return False

    # ---- gradients

    def begin_backward(
        self, trains: Mapping[ShardedBuffer, list[bool]], under_way: Sequence[ShardedBuffer], in_turn: bool
    ) -> None:
        """Prepares buffers to receive gradients of the marked parameters, added to unsent gradients.

        Args:
            trains: which parameters of a buffer are trained.
            under_way: buffers whose gradients may be summed meanwhile.
            in_turn: whether they are summed first, which frees the memory in which they were sent.
        """
        for buffer, flags in trains.items():
            if buffer in self.unsent:
                buffer.join_backward(flags)
            else:
                buffer.begin_backward(flags, under_way, in_turn)

    def prepare_reduce(self, buffers: Sequence[ShardedBuffer]) -> None:
        """Called before the reductions start, where anything is on a drive."""

    def end_reduce(self, buffers: Sequence[ShardedBuffer]) -> None:
        """Called when the gradients have reached their shards, and the listeners have used them."""

    def cancel_backward(self, buffers: Sequence[ShardedBuffer]) -> None:
        """Drops the gradients of a backward that failed."""
        for buffer in buffers:
            buffer.cancel_backward()
        self.unsent = [buffer for buffer in self.unsent if buffer not in buffers]

    def keep_unsent(self, buffers: Sequence[ShardedBuffer]) -> None:
        """Leaves the gradients of a backward in their buffers."""
        self.unsent += [buffer for buffer in buffers if buffer not in self.unsent]

    def take_unsent(self, buffers: Sequence[ShardedBuffer]) -> Sequence[ShardedBuffer]:
        """Returns ``buffers`` and before them those with unsent gradients, which all are to be sent."""
        if not self.unsent:
            return buffers
        unsent, self.unsent = self.unsent, []
        return [*unsent, *(buffer for buffer in buffers if buffer not in unsent)]

    def drop_unsent(self, params: Container[int]) -> bool:
        """Drops the unsent gradients of ``params``, given by identity; returns whether others are unsent."""
        self.unsent = [
            buffer
            for buffer in self.unsent
            if buffer.drop_gradients([id(param) in params for param in buffer.parameters])
        ]
        return bool(self.unsent)


def unreturned_tensor_error(label: str) -> str:
    """Returns the error text for gradients that enter a block other than through its results."""
    return (
        f"{label}: backward reached a tensor that the block's forward made and did not return (it was left in an "
        "attribute or a list, or taken by a hook); return it as a further result, so that its gradient can flow"
    )
