"""What a block may be asked to do differently: data, not code."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["BlockMode", "BlockPolicy", "Recompute"]


class Recompute(enum.Enum):
    """What backward runs again."""

    OFF = "off"  # activations are kept; the inner forward runs once
    WHOLE = "whole"  # only the inputs are kept; the inner forward runs again in backward


class BlockMode(enum.Enum):
    """Which ranks share a block's parameters."""

    BLOCK = "BLOCK"  # all ranks (of a tensor-parallel slot)
    PIPE = "PIPE"  # the ranks of one pipeline stage


@dataclass(frozen=True)
class BlockPolicy:
    """How one block is gathered and recomputed.

    Args:
        level: ZeRO level. 3 frees the full parameters after forward and gathers them again for backward; 2 keeps
            them from forward to backward. Results are identical.
        recompute: what backward runs again.

    Raises:
        ValueError: for any other level.
    """

    level: int = 3
    recompute: Recompute = Recompute.WHOLE

    def __post_init__(self) -> None:
        if self.level not in (2, 3):
            raise ValueError(f"zero_level: expected 2 or 3, got {self.level!r}")

    @property
    def recomputes(self) -> bool:
        return self.recompute is not Recompute.OFF
