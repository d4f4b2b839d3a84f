"""Operations that wait for an exited rank and that the transport does not abort by itself.

Transports usually detect the exit of a peer, but not always: Gloo sometimes misses the end of a connection, and shared
memory has none. An exited rank may have completed its last operation while others are still in it, so the hub first
asks whether all remaining ranks have started that operation. Without a hub the check takes longer, and a reduction to
one rank is not counted, because a rank may be ahead of the others in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import blame

# Time that an operation may wait for an exited rank, and the interval of further checks if it proved in order.
_SECONDS = 0.3
_ALONE_SECONDS = 1.5
_AGAIN_SECONDS = 1.0


class Suspicion:
    """Ranks whose connections ended without a report, and the operations that wait for them."""

    def __init__(self) -> None:
        self._gone: dict[int, float] = {}  # rank -> time from which it counts

    def add(self, rank: int) -> None:
        """Records that a rank has exited."""
        self._gone[rank] = time.monotonic()

    def ranks(self) -> list[int]:
        """The exited ranks; callable from any thread."""
        return sorted(list(self._gone))  # noqa: C414 - copied in one step, while the watchdog may add one

    def dismiss(self) -> None:
        """Dismisses the last finding for a while."""
        self._gone = dict.fromkeys(self._gone, time.monotonic() + _AGAIN_SECONDS)

    def find(self, groups: Callable[[], Iterable[Mapping[str, Any]]], alone: bool) -> dict[str, Any] | None:
        """Finds an operation that has waited too long for an exited rank, as a failure."""
        now = time.monotonic()
        patience = _ALONE_SECONDS if alone else _SECONDS
        gone = {rank for rank, since in self._gone.items() if now - since >= patience}
        for group in groups() if gone else ():
            for record in group["blocked"]:
                peer = record["peer"]
                awaited = set(group["members"] if peer is None else [group["members"][peer]])
                waited = time.time() - (record["started"] or time.time())
                if awaited & gone and waited >= patience and not (alone and record["op"] == "reduce"):
                    what = f"waits for {blame.ranks_text(sorted(awaited & gone))}"
                    return {"kind": "suspicion", "what": what, "group": group["group"], "record": record}
        return None
