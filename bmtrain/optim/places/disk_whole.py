"""The passage of whole arenas in a step: a matrix that one rank transforms must be in memory as a whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from ..._engine.disk_tier import DiskTier, Transfer
from ..formulas import Part
from .disk_arena import Chunk, failure_of


def pass_whole(tier: DiskTier, chunks: Sequence[Chunk], compute: Callable[[list[Part]], None] | None) -> None:
    """Has the parts of arenas computed, while the next arena is read and the one before is written.

    A failed drive ends the transfers, not the computation: other ranks wait for the matrices of this one.

    Args:
        tier: moves them.
        chunks: whole arenas, in an order that is the same on all ranks.
        compute: computes parts, together with the other ranks; None: the arenas are compared with the written values.

    Raises:
        DiskError: at the end, if an arena could not be read or written, or differs from the values written.
    """
    passing: deque[_Passage] = deque()
    try:
        for number in range(len(chunks) + 1):
            if number < len(chunks):
                passing.append(_Passage(tier, chunks[number]))
            if number > 0:
                here = passing[-2] if number < len(chunks) else passing[-1]
                here.wait()
                if compute is not None:
                    compute(chunks[number - 1].parts(here.arrays))
                    here.write()
            if len(passing) > 2:
                passing.popleft().wait()
    finally:
        for passage in passing:
            passage.wait()
    tier.drives.check()
    for chunk in chunks if compute is not None else ():
        chunk.arena.is_sealed = True


class _Passage:
    """An arena in memory."""

    def __init__(self, tier: DiskTier, chunk: Chunk) -> None:
        self._tier, self._chunk = tier, chunk
        self._spans = chunk.transfers()
        self._memory = [tier.take(span.nbytes) for span in self._spans]
        self._transfers: list[tuple[str, Transfer]] = []
        self._start(is_write=False)

    @property
    def arrays(self) -> dict[str, Tensor]:
        return {
            span.name: memory[: self._chunk.numel * span.dtype.itemsize].view(span.dtype)
            for span, memory in zip(self._spans, self._memory, strict=True)
        }

    def _start(self, *, is_write: bool) -> None:
        for span, memory in zip(self._spans, self._memory, strict=True):
            if self._tier.drives.failure is None and (span.is_written or not is_write):
                place = span.file, span.offset, memory, f"state of {self._chunk.label}"
                self._transfers.append((span.name, Transfer(self._tier, *place, is_write=is_write)))

    def write(self) -> None:
        self._start(is_write=True)

    def wait(self) -> None:
        """Waits until it is read or written. A failure is noted in the tier."""
        transfers, self._transfers = self._transfers, []
        for name, transfer in transfers:
            transfer.complete()
            if transfer.error is not None:
                self._tier.drives.note(failure_of(name, self._chunk, transfer.error))
