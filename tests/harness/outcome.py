"""What became of a call on a group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Outcome", "RankError", "Status"]


class Status(Enum):
    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"  # the process ended during the call
    # Still running at the limit, or when the grace period after another rank's failure was over.
    HUNG = "hung"


@dataclass
class Outcome:
    """What became of one rank's call.

    `value` is the result of a rank that returned; `error` and `message` tell what one that raised has raised,
    `mro` names that error's classes; `exitcode` is how one that died ended (negative: the signal). `detail`
    holds the traceback, or the stacks of a rank that hung; `output` what it printed.
    """

    rank: int
    status: Status
    value: Any = None
    error: str = ""
    message: str = ""
    mro: tuple[str, ...] = ()
    exitcode: int | None = None
    detail: str = ""
    output: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        headline = {
            Status.RETURNED: "returned",
            Status.RAISED: f"raised {self.error}: {self.message}",
            Status.DIED: f"died, exit status {self.exitcode}",
            Status.HUNG: f"was still running after {self.seconds:.1f} s and was killed; its stacks:",
        }[self.status]
        parts = [f"--- rank {self.rank} {headline}", self.detail]
        if self.output:
            parts.append(f"--- rank {self.rank} printed\n{self.output}")
        return "\n".join(part.rstrip() for part in parts if part)


class RankError(Exception):
    """A call did not return on every rank. `outcomes` has all ranks, `first` is the one that failed first."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failed = [outcome for outcome in outcomes if outcome.status is not Status.RETURNED]
        self.first = min(failed, key=lambda outcome: (outcome.status is Status.HUNG, outcome.seconds))
        told = "\n".join(
            str(outcome) for outcome in sorted(failed, key=lambda outcome: outcome is not self.first)
        )
        super().__init__(f"{name} failed on {len(failed)} of {len(outcomes)} ranks\n{told}")
