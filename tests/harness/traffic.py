"""Counts of messages and bytes, as planned and as communicators count them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["by_operation"]


def by_operation(*counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Sums of messages and of bytes by collective, whatever the messages are of."""
    total: dict[str, tuple[int, int]] = {}
    for name, (messages, nbytes) in [item for each in counts for item in each.items()]:
        operation = name.partition(" of ")[0]
        before = total.get(operation, (0, 0))
        total[operation] = before[0] + messages, before[1] + nbytes
    return total
