"""Operations that wait for a rank that is gone, where the transport does not notice.

Transports notice mostly by themselves, but not always: Gloo sometimes loses the end of a connection, and shared memory
has none. A rank that is gone may have ended well after its last operation, while others are still in that one: so the
hub first asks whether all who are left have come to it. Without a hub it takes longer, and a reduction to one rank does
not count, in which a rank may be ahead of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import _blame

__all__ = ["Suspicion"]

# How long an operation may go on that waits for a rank that is gone, and when to ask again if that was in order.
_SECONDS = 0.3
_ALONE_SECONDS = 1.5
_AGAIN_SECONDS = 1.0


class Suspicion:
    """Which ranks' connections ended without a word, and what waits for them."""

    def __init__(self) -> None:
        self._gone: dict[int, float] = {}  # and from when on that counts

    def add(self, rank: int) -> None:
        """A rank is gone."""
        self._gone[rank] = time.monotonic()

    def ranks(self) -> list[int]:
        """Those that are gone. Any thread may ask."""
        return sorted(list(self._gone))  # noqa: C414 - copied in one step, while the watchdog may add one

    def dismiss(self) -> None:
        """What was found is in order, for now."""
        self._gone = dict.fromkeys(self._gone, time.monotonic() + _AGAIN_SECONDS)

    def find(self, groups: Callable[[], Iterable[Mapping[str, Any]]], alone: bool) -> dict[str, Any] | None:
        """A failure: an operation that has waited too long, by now, for a rank that is gone.

        Args:
            groups: `_C.Watchdog.groups`.
            alone: whether there is no hub to ask.
        """
        now = time.monotonic()
        patience = _ALONE_SECONDS if alone else _SECONDS
        gone = {rank for rank, since in self._gone.items() if now - since >= patience}
        for group in groups() if gone else ():
            for record in group["blocked"]:
                peer = record["peer"]
                awaited = set(group["members"] if peer is None else [group["members"][peer]])
                waited = time.time() - (record["started"] or time.time())
                if awaited & gone and waited >= patience and not (alone and record["op"] == "reduce"):
                    what = f"waits for {_blame.ranks_text(sorted(awaited & gone))}"
                    return {"kind": "suspicion", "what": what, "group": group["group"], "record": record}
        return None
