"""The choices of a run that the planner weighs."""

from __future__ import annotations

from dataclasses import dataclass

from .._engine.policy import BlockPolicy, Recompute

__all__ = ["TrainingPolicy"]


@dataclass(frozen=True)
class TrainingPolicy:
    """How a model is trained.

    Args:
        micro_batch: samples of one forward of one rank, or of one group of tensor-parallel ranks.
        level: ZeRO level of every block, 2 or 3.
        recompute: keep only the blocks' inputs, and run forwards again in backward.
        offload: share of the optimizer's work and state that is on the host, from 0 to 1.
        accumulate: forwards and backwards before one optimizer step.
        tp_size: tensor-parallel ranks.
        pipe_size: pipeline stages.

    Raises:
        ValueError: a number out of its range.
    """

    micro_batch: int = 1
    level: int = 3
    recompute: bool = True
    offload: float = 0.0
    accumulate: int = 1
    tp_size: int = 1
    pipe_size: int = 1

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulate", "tp_size", "pipe_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 <= self.offload <= 1:
            raise ValueError(f"offload: expected 0 to 1, got {self.offload}")
        self.block_policy()

    def block_policy(self) -> BlockPolicy:
        """The same choice as a Block takes it."""
        return BlockPolicy(self.level, Recompute.WHOLE if self.recompute else Recompute.OFF)
