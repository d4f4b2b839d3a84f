"""Protocols of running blocks for the parts of the engine."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .._C import ShardGroup
    from .host_activations import HostActivations

__all__ = ["Event", "Phase", "ReductionListener", "RunningBlock", "RunningCall"]


class Phase(enum.Enum):
    """Purpose of a block call."""

    FORWARD = "forward"  # a forward that may be followed by a backward
    BACKWARD = "backward"  # the recomputation and gradient of an earlier forward
    EVALUATE = "evaluate"  # a forward without gradients

    # Members are single objects: enum's own hash, of the name, is a call of Python for each look-up.
    __hash__ = object.__hash__


class Event(NamedTuple):
    """One block call: the block's number and the call's purpose."""

    block: int
    phase: Phase


class RunningCall(Protocol):
    """One forward of a block (:class:`~bmtrain._engine.island.BlockCall`)."""

    recordings: Any
    host: HostActivations | None

    def kept_for_backward(self) -> Iterable[Tensor] | None: ...


class RunningBlock(Protocol):
    """The state of one block between its calls (:class:`~bmtrain._engine.runtime.BlockRuntime`)."""

    label: str
    number: int
    groups: tuple[ShardGroup, ...]
    events: dict[Phase, Event]
    open_calls: weakref.WeakSet[RunningCall]
    pending: list[Any]

    @property
    def defers(self) -> bool: ...

    def may_lag(self) -> bool: ...

    def is_of_this_round(self) -> bool: ...

    def start_gather_ahead(self) -> bool: ...

    def drop_gathered(self) -> None: ...

    def reduce_deferred(self) -> None: ...

    def drop_unsent(self, params: Container[int]) -> bool: ...


class ReductionListener(Protocol):
    """Listener for completed reductions."""

    def reduced(self, runtime: Any) -> None:
        """The gradients of a block have reached their shards."""
