"""Predicted memory and time of a step, by purpose."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MemoryEstimate", "TimeEstimate"]

#: Memory of kernels and allocators beside tensors: a share of the tensors; and what libraries keep for products, which
#: grows with the widths of a model, and so with the tensors, up to a limit.
_SCRATCH_SHARE, _KEPT_SHARE, _KEPT_BYTES = 0.015, 0.035, 4 * 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device when there are most of them, by purpose; ``host`` is pinned memory of one node.

    Args:
        weights: shards.
        gathered: full parameters, of blocks and outside of them.
        gradients: shards, and full gradients that are not yet reduced.
        optimizer: masters and moments, and what a step of Muon holds.
        activations: inputs of blocks, tensors saved by autograd, logits.
        usable: memory of the device.
        host: pinned host memory of a node.
        host_usable: host memory of the node.
        pool_peak: peak of the buffers lent by the runtime's BufferPool.
        wire: this rank's share of the memory that the ranks of a host map together, and receive buffers of reductions.
        copies: of gradients, and of another rank's shards, optimizer state and gradients unless it shares memory.
        disk: buffers through which blocks on drives pass.
        kernels: code and buffers of products in 16 bits, which libraries for processors make for each shape and keep.
    """

    weights: float
    gathered: float
    gradients: float
    optimizer: float
    activations: float
    usable: float
    host: float
    host_usable: float
    pool_peak: float
    wire: float = 0.0
    copies: float = 0.0
    disk: float = 0.0
    kernels: float = 0.0

    @property
    def total(self) -> float:
        return self.tensors + self.wire + self.disk + self.scratch

    @property
    def tensors(self) -> float:
        return self.weights + self.gathered + self.gradients + self.optimizer + self.activations + self.copies

    @property
    def scratch(self) -> float:
        """Memory of kernels and allocators beside tensors, as measured by ``bmtrain bench plan --memory``."""
        return _SCRATCH_SHARE * self.tensors + min(_KEPT_SHARE * self.tensors, _KEPT_BYTES) + self.kernels

    @property
    def fits(self) -> bool:
        return self.total <= self.usable and self.host <= self.host_usable


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one optimizer step: in total, and the busy time of each resource.

    Args:
        step: from batch to batch.
        compute: the device computes forwards and backwards.
        wire: links and network carry bytes.
        exposed_wire: the device waits for them.
        optimizer: the update on the device, Muon's products included.
        pcie: gradients to the host and parameters back; waits for these where blocks are on the host.
        host: the update on the host.
        idle: a pipeline stage waits for the others.
        disk: drives read and write.
        exposed_disk: everything else waits for them.
    """

    step: float
    compute: float
    wire: float
    exposed_wire: float
    optimizer: float
    pcie: float
    host: float
    idle: float
    disk: float = 0.0
    exposed_disk: float = 0.0

    @property
    def bottleneck(self) -> str:
        """The resource that limits the step: a faster one would shorten it most."""
        parts = self._exclusive()
        return max(parts, key=lambda name: parts[name])

    @property
    def bottleneck_seconds(self) -> float:
        """Seconds of a step that the bottleneck takes."""
        return max(self._exclusive().values())

    def _exclusive(self) -> dict[str, float]:
        """Exclusive seconds of each resource."""
        return {
            "compute": self.compute,
            "wire": self.exposed_wire,
            "device memory (optimizer)": self.optimizer,
            "PCIe": self.pcie,
            "host memory": self.host,
            "pipeline": self.idle,
            "drives": self.exposed_disk,
        }
