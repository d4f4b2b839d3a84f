"""How fast a rank trains, and how much of its time it waits for others."""

from __future__ import annotations

import math
import time

import bmtrain as bmt

__all__ = ["Pace"]


class Pace:
    """Tokens a second, and the share of recent steps in which this rank had nothing to do but wait for the others.

    The share comes from one window of steps after the other (``bmtrain.timeline``), which costs less than a percent.
    Where BMTRAIN_TIMELINE records already, that goes first, and no share is known here.

    Args:
        tokens: of a step, on all ranks together.
        window: number of steps.
    """

    def __init__(self, tokens: int, window: int = 10) -> None:
        self.tokens = tokens
        self.window = window
        self.num_steps = 0
        self.seconds = 0.0
        self.shares: list[float] = []
        self._recording: bmt.timeline.Timeline | None = None
        self._started = 0.0

    def begin_step(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def end_step(self) -> dict[str, float | None]:
        """The step is over.

        Returns:
            its ``tokens_per_second``, and the ``exposed_communication`` of the last window: the share of its time, 0
            to 1, that this rank waited; None before the first window is complete.
        """
        elapsed = time.perf_counter() - self._started
        self.num_steps += 1
        self.seconds += elapsed
        self._go_on_recording()
        return {
            "tokens_per_second": self.tokens / elapsed,
            "exposed_communication": self.shares[-1] if self.shares else None,
        }

    def tokens_per_second(self) -> float:
        """In all steps; NaN if there was none."""
        return self.num_steps * self.tokens / self.seconds if self.seconds else math.nan

    def exposed_communication(self) -> float | None:
        """The share in all windows; None if none was complete."""
        return sum(self.shares) / len(self.shares) if self.shares else None

    def close(self) -> None:
        """End the window that is open."""
        if self._recording is not None:
            self._recording.stop()

    def _go_on_recording(self) -> None:
        if self._recording is not None and not self._recording.is_running:
            self.shares.append(self._recording.summary().exposed_communication)
            self._recording = None
        if self._recording is None:
            try:
                self._recording = bmt.timeline.record(steps=self.window).start()
            except RuntimeError:  # BMTRAIN_TIMELINE
                return
