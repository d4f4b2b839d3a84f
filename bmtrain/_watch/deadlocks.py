"""Deadlocks, in which each rank waits for another: detected in seconds, not at the time-out.

[Note: Detection of deadlocks]
A rank that waits longer than a moment asks the hub, which asks all ranks. If every awaited rank is itself blocked, and
the next round of answers shows each rank in the same operation, then all were in their operations at one moment,
between the rounds. Different operations at one place of a group never match: that is a failure. Ranks in different
groups may have a second thread that is about to start the awaited operation: that is only reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import blame


class Rounds:
    """The answers of all ``world`` ranks, round by round."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._states: dict[int, Mapping[str, Any]] = {}
        self._before: frozenset[Any] | None = None
        self._told: set[frozenset[Any]] = set()

    def begin(self) -> None:
        """Starts a new round of questions to all ranks."""
        self._states = {}

    def add(self, rank: int, state: Mapping[str, Any]) -> tuple[blame.Verdict, bool, int] | None:
        """Takes an answer. Returns the deadlock of a complete round, whether it is certain, and the round's number.

        None while there is nothing to report, or if the deadlock was reported before.
        """
        self._states[rank] = state
        if len(self._states) < self._world:
            return None
        where = frozenset(
            (rank, group["group"], record["id"])
            for rank, state in self._states.items()
            for group in state["groups"]
            for record in group["blocked"]
        )
        same, self._before = where == self._before, where
        found = blame.deadlock(self._states) if same and where not in self._told else None
        if found is None:
            return None
        self._told.add(where)
        return *found, len(self._told)
