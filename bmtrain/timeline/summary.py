"""What a timeline says in one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .trace import Span

__all__ = ["BlockTime", "RankTime", "Summary", "summarize"]

_SHOWN_RANKS = 16
_COLUMNS = ("total", "compute", "gather", "reduce", "optim", "other", "exposed")


@dataclass(frozen=True)
class RankTime:
    """Seconds of one rank, all recorded steps together.

    Args:
        total: from the first step's begin to the last one's end.
        compute: blocks run.
        gather_wait: nothing goes on because parameters are not there.
        reduce_wait: nothing goes on because gradients are not there (summing them included).
        optimizer: optimizers step.
    """

    rank: int
    num_steps: int
    total: float
    compute: float
    gather_wait: float
    reduce_wait: float
    optimizer: float

    @property
    def other(self) -> float:
        """Everything else: what runs outside blocks."""
        return max(self.total - self.compute - self.gather_wait - self.reduce_wait - self.optimizer, 0.0)

    @property
    def exposed(self) -> float:
        """The share of the time in which the rank waits for communication."""
        return (self.gather_wait + self.reduce_wait) / self.total if self.total else 0.0


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block in a step, the mean over ranks and steps."""

    name: str
    compute: float
    wait: float


@dataclass(frozen=True)
class Summary:
    """Where the time of the recorded steps went.

    Attributes:
        ranks: by rank.
        blocks: by name, in the order in which they ran first.
    """

    ranks: tuple[RankTime, ...]
    blocks: tuple[BlockTime, ...]

    @property
    def exposed_communication(self) -> float:
        """Mean over the ranks of the share of time spent waiting for communication, 0 to 1."""
        return sum(rank.exposed for rank in self.ranks) / len(self.ranks)

    @property
    def slowest_rank(self) -> int:
        """The rank that computes longest; the others wait for it."""
        return max(self.ranks, key=lambda rank: rank.compute + rank.optimizer + rank.other).rank

    @property
    def slowest_block(self) -> BlockTime | None:
        """The block that takes longest, waiting included."""
        return max(self.blocks, key=lambda block: block.compute + block.wait, default=None)

    def __str__(self) -> str:
        lines = [
            f"{'ms per step':<12}" + "".join(f"{column:>9}" for column in _COLUMNS),
        ]
        for rank in self.ranks[:_SHOWN_RANKS]:
            parts = (rank.total, rank.compute, rank.gather_wait, rank.reduce_wait, rank.optimizer, rank.other)
            steps = max(rank.num_steps, 1)
            lines.append(
                f"{f'rank {rank.rank}':<12}"
                + "".join(f"{seconds / steps * 1e3:>9.2f}" for seconds in parts)
                + f"{rank.exposed:>9.1%}"
            )
        if len(self.ranks) > _SHOWN_RANKS:
            lines.append(f"... and {len(self.ranks) - _SHOWN_RANKS} more ranks")
        lines.append(f"exposed communication: {self.exposed_communication:.1%} (gather and reduce are waits)")
        block = self.slowest_block
        if block is not None:
            lines.append(
                f"slowest block: {block.name}, {block.compute * 1e3:.2f} ms of compute and "
                f"{block.wait * 1e3:.2f} ms of waits a step"
            )
        lines.append(f"slowest rank: {self.slowest_rank} (of what it does itself)")
        return "\n".join(lines)


def summarize(spans: Mapping[int, Sequence[Span]]) -> Summary:
    """Add up the spans of each rank, complete steps only.

    Args:
        spans: rank -> what it recorded.

    Raises:
        ValueError: no rank recorded a complete step.
    """
    ranks: list[RankTime] = []
    blocks: dict[str, dict[str, float]] = {}
    for rank, recorded in sorted(spans.items()):
        steps = [span for span in recorded if span.kind == "step"]
        if not steps:
            continue
        begin, end = steps[0].begin, steps[-1].end
        inside = [span for span in recorded if span.begin >= begin and span.end <= end]
        ranks.append(_rank_time(rank, len(steps), end - begin, inside))
        for span in inside:
            if span.kind in ("compute", "wait"):
                sums = blocks.setdefault(span.name, {"compute": 0.0, "wait": 0.0})
                sums[span.kind] += span.seconds / len(steps)
    if not ranks:
        raise ValueError("timeline: expected at least one optimizer step in the recording, got none")
    times = [
        BlockTime(name, sums["compute"] / len(ranks), sums["wait"] / len(ranks))
        for name, sums in blocks.items()
    ]
    return Summary(tuple(ranks), tuple(times))


def _rank_time(rank: int, num_steps: int, total: float, spans: Sequence[Span]) -> RankTime:
    def seconds(kind: str, *details: str) -> float:
        return sum(s.seconds for s in spans if s.kind == kind and (not details or s.detail in details))

    return RankTime(
        rank=rank,
        num_steps=num_steps,
        total=total,
        compute=seconds("compute"),
        gather_wait=seconds("wait", "gather"),
        reduce_wait=seconds("wait", "reduce"),
        optimizer=seconds("optimizer"),
    )
