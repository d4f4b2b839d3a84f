"""Assignment of each rank's copy to the rank that keeps it, on another host where that is possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Ring:
    """The ranks in a circle, in which each keeps the copy of the one before: its *ward*.

    Neighbours are on different hosts as long as no host has more than half of the ranks.

    Args:
        hosts: the host of each rank.

    Example:
        >>> ring = Ring(["a", "a", "b", "b", "c"])
        >>> [ring.keeper_of(rank) for rank in range(5)]
        [3, 4, 0, 1, 2]
        >>> Ring(["a", "a", "a"]).keeper_of(2)
        0
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        sizes = Counter(hosts)
        by_host = sorted(range(len(hosts)), key=lambda rank: (-sizes[hosts[rank]], hosts[rank], rank))
        circle = list(by_host)
        if len(sizes) > 1:
            circle[::2], circle[1::2] = by_host[: len(circle[::2])], by_host[len(circle[::2]) :]
        self._keepers = dict(zip(circle, circle[1:] + circle[:1], strict=True))
        self._wards = {keeper: rank for rank, keeper in self._keepers.items()}

    def keeper_of(self, rank: int) -> int:
        """Returns the rank that keeps this one's copy."""
        return self._keepers[rank]

    def ward_of(self, rank: int) -> int:
        """Returns the rank whose copy this one keeps."""
        return self._wards[rank]
