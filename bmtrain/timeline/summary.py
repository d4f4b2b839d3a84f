"""Summary of a timeline, on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .trace import Span

__all__ = ["BlockTime", "RankTime", "Summary", "summarize"]

_SHOWN_RANKS = 16
_HOST_KINDS = ("compute", "wait", "optimizer")  # what the rank does itself
_COLUMNS = ("total", "compute", "gather", "reduce", "peers", "update", "optim", "other", "exposed")


@dataclass(frozen=True)
class RankTime:
    """Seconds of one rank, all recorded steps together.

    Args:
        total: from the first step's begin to the last one's end.
        compute: blocks run, without their waits.
        gather_wait: waits for parameters, and for whole matrices that an optimizer needs.
        reduce_wait: waits for gradients (summing the received ones is computing).
        peer_wait: waits for another pipeline stage, and for tokens of ranks that divide sequences or experts.
        update_wait: waits for updates of the optimizer in the background.
        optimizer: optimizers step.
        copies_wait: gradients for copies of lost ranks are exchanged, and copies updated (``survive=1``).
    """

    rank: int
    num_steps: int
    total: float
    compute: float
    gather_wait: float
    reduce_wait: float
    peer_wait: float
    update_wait: float
    optimizer: float
    copies_wait: float = 0.0

    @property
    def other(self) -> float:
        """Seconds of everything else: work outside blocks."""
        return max(self.total - self.compute - self._waits - self.optimizer, 0.0)

    @property
    def _waits(self) -> float:
        return self.gather_wait + self.reduce_wait + self.peer_wait + self.update_wait + self.copies_wait

    @property
    def exposed(self) -> float:
        """The share of the time in which the rank waits for communication of parameters or gradients."""
        return (self.gather_wait + self.reduce_wait) / self.total if self.total else 0.0

    @property
    def exposed_update(self) -> float:
        """The share of the time in which the rank waits for updates in the background."""
        return self.update_wait / self.total if self.total else 0.0

    @property
    def copies(self) -> float:
        """The share of the time that copies for the loss of a rank take."""
        return self.copies_wait / self.total if self.total else 0.0


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block in a step, the mean over ranks and steps."""

    name: str
    compute: float
    wait: float


@dataclass(frozen=True)
class Summary:
    """The distribution of the time of the recorded steps.

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
    def exposed_update(self) -> float:
        """Mean over the ranks of the share of time spent waiting for updates in the background, 0 to 1."""
        return sum(rank.exposed_update for rank in self.ranks) / len(self.ranks)

    @property
    def slowest_rank(self) -> int:
        """The rank that computes longest; the others wait for it."""
        return max(self.ranks, key=lambda rank: rank.compute + rank.optimizer + rank.other).rank

    @property
    def slowest_block(self) -> BlockTime | None:
        """The block that takes longest, waiting included."""
        return max(self.blocks, key=lambda block: block.compute + block.wait, default=None)

    def __str__(self) -> str:
        lines = [f"{'ms/step':<8}" + "".join(f"{column:>8}" for column in _COLUMNS)]
        for rank in self.ranks[:_SHOWN_RANKS]:
            parts = (
                rank.total,
                rank.compute,
                rank.gather_wait,
                rank.reduce_wait,
                rank.peer_wait,
                rank.update_wait,
                rank.optimizer,
                rank.other,
            )
            cells = "".join(f"{seconds / rank.num_steps * 1e3:>8.2f}" for seconds in parts)
            lines.append(f"{f'rank {rank.rank}':<8}{cells}{rank.exposed:>8.1%}")
        if len(self.ranks) > _SHOWN_RANKS:
            lines.append(f"... and {len(self.ranks) - _SHOWN_RANKS} more ranks")
        lines.append(f"exposed communication: {self.exposed_communication:.1%} (waits for gather and reduce)")
        if self.exposed_update:
            lines.append(f"exposed optimizer updates: {self.exposed_update:.1%}")
        if copies := sum(rank.copies for rank in self.ranks) / len(self.ranks):
            lines.append(f"copies for the loss of a rank: {copies:.1%}")
        block = self.slowest_block
        if block is not None:
            lines.append(
                f"slowest block: {block.name}, {block.compute * 1e3:.2f} ms compute, "
                f"{block.wait * 1e3:.2f} ms waits"
            )
        lines.append(f"slowest rank: {self.slowest_rank} (by its own work)")
        return "\n".join(lines)


def summarize(spans: Mapping[int, Sequence[Span]]) -> Summary:
    """Adds up the spans of each rank, complete steps only.

    Args:
        spans: rank -> its recorded spans.

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
        own = list(_own_seconds(span for span in inside if span.kind in _HOST_KINDS))
        ranks.append(_rank_time(rank, len(steps), end - begin, own))
        for span, seconds in own:
            if span.kind in ("compute", "wait"):
                sums = blocks.setdefault(span.name, {"compute": 0.0, "wait": 0.0})
                sums[span.kind] += seconds / len(steps)
    if not ranks:
        raise ValueError("timeline: expected at least one optimizer step in the recording, got none")
    times = [
        BlockTime(name, sums["compute"] / len(ranks), sums["wait"] / len(ranks))
        for name, sums in blocks.items()
    ]
    return Summary(tuple(ranks), tuple(times))


def _own_seconds(spans: Iterable[Span]) -> Iterator[tuple[Span, float]]:
    """Each span with its time, excluding nested spans: a block may wait, or hold another block."""
    open_spans: list[tuple[Span, float]] = []  # from the outermost; what is left of each
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while open_spans and open_spans[-1][0].end <= span.begin:
            yield open_spans.pop()
        if open_spans:
            around, left = open_spans.pop()
            open_spans.append((around, left - span.seconds))
        open_spans.append((span, span.seconds))
    while open_spans:
        yield open_spans.pop()


def _rank_time(rank: int, num_steps: int, total: float, own: Sequence[tuple[Span, float]]) -> RankTime:
    def seconds(kind: str, *details: str) -> float:
        return sum(s for span, s in own if span.kind == kind and (not details or span.detail in details))

    return RankTime(
        rank=rank,
        num_steps=num_steps,
        total=total,
        compute=seconds("compute"),
        gather_wait=seconds("wait", "gather", "owner"),
        reduce_wait=seconds("wait", "reduce"),
        peer_wait=seconds("wait", "stage", "tokens"),
        update_wait=seconds("wait", "update"),
        optimizer=seconds("optimizer"),
        copies_wait=seconds("wait", "copies"),
    )
