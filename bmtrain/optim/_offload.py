"""Base class of optimizers with state in host memory."""

from __future__ import annotations

from ._sharded import ShardedOptimizer


class OffloadOptimizer(ShardedOptimizer):
    """An optimizer whose place is `OnHost`."""

    @property
    def resident_fraction(self) -> float:
        """Share of the blocks whose state is on the run device, known from the first step on."""
        return float(self._place.resident_fraction)

    @property
    def staging_bytes(self) -> int:
        """Bytes of page-locked host memory for copies of a GPU's gradients and parameters; 0 on CPU ranks."""
        return int(self._place.staging_bytes)
