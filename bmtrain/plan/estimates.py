"""Predicted memory and time of a step, by purpose, and the plan that has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import DoesNotFitError
from .disk import DiskEstimate
from .machine import Machine
from .model import ModelDescription
from .policy import TrainingPolicy
from .simulation import StepResult

__all__ = ["MemoryEstimate", "Plan", "TimeEstimate"]

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
        """Bytes of a device at the peak."""
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
        """Whether the device and the host have room for it."""
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


@dataclass(frozen=True)
class Plan:
    """Predicted memory, time and traffic of a run.

    Args:
        model: the model to train.
        machine: the machine.
        policy: the training policy.
        memory: on one device.
        time: of one step.
        traffic: operation -> (messages, bytes sent) of one rank and step, as `Communicator.traffic` counts; and copies
            of blocks on the host, ``"to the device"`` and ``"to the host"``.
        result: the simulated forward and backward.
        disk: of one rank.
    """

    model: ModelDescription
    machine: Machine
    policy: TrainingPolicy
    memory: MemoryEstimate
    time: TimeEstimate
    traffic: dict[str, tuple[int, int]]
    result: StepResult
    disk: DiskEstimate

    @property
    def written_per_day(self) -> float:
        """Bytes that the drives of a node take in a day of training."""
        return self.disk.written * self.machine.devices_per_node * 86_400 / self.time.step

    @property
    def fits(self) -> bool:
        """Whether device and host have the memory; drives are not compared."""
        return self.memory.fits

    def require_fit(self, world_size: int) -> None:
        """Refuses a run that would end out of memory.

        Args:
            world_size: ranks of the run.

        Raises:
            ValueError: the plan is for another number of ranks.
            DoesNotFitError: it needs more memory than the machine has.
        """
        if world_size != self.machine.num_devices:
            raise ValueError(
                f"plan: made for {self.machine.num_devices} devices, but there are {world_size} ranks"
            )
        memory = self.memory
        for what, needed, usable in (
            ("a device", memory.total, memory.usable),
            ("a node's host memory", memory.host, memory.host_usable),
        ):
            if needed > usable:
                raise DoesNotFitError(
                    f"plan: {self.model.name} needs {needed / 2**30:.1f} GiB of {what}, which has "
                    f"{usable / 2**30:.1f} GiB; bmtrain.plan.remedies(plan) tells what would make it fit"
                )

    @property
    def samples_per_step(self) -> int:
        """Samples of all ranks: ``micro_batch`` for each group that shares samples."""
        groups = self.machine.num_devices // (self.policy.tp_size * self.policy.sp_size)
        return self.policy.micro_batch * self.policy.accumulate * groups

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks."""
        return self.samples_per_step / self.time.step

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks."""
        return self.samples_per_second * self.model.seq_len

    @property
    def flops_per_device(self) -> float:
        """Useful operations per second and device: three forwards a sample, recomputation not counted."""
        return 3 * self.model.flops * self.samples_per_second / self.machine.num_devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: useful operations over the peak (Chowdhery et al., PaLM, 2022, appendix B)."""
        return self.flops_per_device / self.machine.flops

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": {"name": self.model.name, "parameters": self.model.num_parameters},
            "machine": asdict(self.machine),
            "policy": self.policy.as_dict(),
            "fits": self.fits,
            "bottleneck": self.time.bottleneck,
            "memory": {**asdict(self.memory), "scratch": self.memory.scratch, "total": self.memory.total},
            "seconds": asdict(self.time),
            "traffic": {name: list(counts) for name, counts in self.traffic.items()},
            "disk": {**asdict(self.disk), "written_per_day": self.written_per_day},
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_device": self.flops_per_device / 1e12,
            "mfu": self.mfu,
        }
