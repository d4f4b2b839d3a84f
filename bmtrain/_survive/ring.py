"""Assignment of each rank's copy to the rank that keeps it, on another host where that is possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .._watch.blame import ranks_text


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

    def why_not(self, reports: Mapping[int, Mapping[str, Any]], sizes: set[int]) -> str:
        """Returns the reason why the ranks that report cannot continue alone; empty if they can.

        Args:
            reports: by rank; ``"damage"`` is what is wrong with the copy that a rank keeps.
            sizes: numbers of ranks that share a parameter.
        """
        num_ranks = len(self._keepers)
        lost = sorted(set(range(num_ranks)) - set(reports))
        if 2 * len(lost) >= num_ranks:  # the others may be alive, and think the same of these
            return f"{ranks_text(lost)} of {num_ranks} lost, and only more than half may continue"
        for size in sizes - {num_ranks}:
            for rank in range(size):
                if set(same := list(range(rank, num_ranks, size))) <= set(lost):
                    return f"{ranks_text(same)} had the same shards, and were lost at once"
        for rank in lost if num_ranks in sizes else ():
            keeper = self.keeper_of(rank)
            if keeper in lost:
                return f"{ranks_text([rank])} and the keeper of its copy, {ranks_text([keeper])}, were lost at once"
            if damage := reports[keeper]["damage"]:
                return f"{ranks_text([rank])} was lost and cannot be replaced, as there is damage: {damage}"
        return ""
