"""How much of the time a rank waits for others, while it trains."""

from __future__ import annotations

import bmtrain as bmt

__all__ = ["Exposure"]


class Exposure:
    """The share of recent steps in which this rank had nothing to do but wait for parameters or gradients.

    It records one window of steps after the other (``bmtrain.timeline``), which costs less than a percent. Where
    BMTRAIN_TIMELINE records already, that goes first, and nothing is known here.

    Args:
        steps: of a window.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.window: bmt.timeline.Timeline | None = None
        self.shares: list[float] = []

    def after_step(self) -> None:
        """Take note of a window that is complete, and begin the next one."""
        if self.window is not None and not self.window.is_running:
            self.shares.append(self.window.summary().exposed_communication)
            self.window = None
        if self.window is None:
            window = bmt.timeline.record(steps=self.steps)
            try:
                self.window = window.start()
            except RuntimeError:  # BMTRAIN_TIMELINE
                return

    def last(self) -> float | None:
        """The share in the last window, 0 to 1; None before the first is complete."""
        return self.shares[-1] if self.shares else None

    def mean(self) -> float | None:
        """The share in all windows."""
        return sum(self.shares) / len(self.shares) if self.shares else None

    def close(self) -> None:
        """End the window that is open."""
        if self.window is not None:
            self.window.stop()
