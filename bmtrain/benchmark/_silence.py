"""What a step costs without communication: the same shards and buffers, and nothing moves between the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from .. import _C
from ..global_var import context

__all__ = ["silence"]


@contextmanager
def silence() -> Iterator[None]:
    """What is built meanwhile gets communicators that move nothing and lend the same memory as ever."""
    current = context()
    real, groups = current.groups["zero"], current.groups
    silent = dataclasses.replace(
        real, comm=_C.SilentCommunicator(real.comm), reduce_comm=_C.SilentCommunicator(real.reduce_comm)
    )
    object.__setattr__(current, "groups", {**groups, "zero": silent})  # read-only to everybody else
    try:
        yield
    finally:
        object.__setattr__(current, "groups", groups)
