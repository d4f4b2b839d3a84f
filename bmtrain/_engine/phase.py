"""Phases of block calls, and the events that a schedule learns."""

from __future__ import annotations

import enum
from typing import NamedTuple


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
