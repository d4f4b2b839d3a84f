"""Estimates of memory, time and bottleneck from a model, a machine and a policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .._base.arguments import require_integer, require_kind
from .._engine.pipe_schedule import idle_share
from .._engine.policy import Recompute
from .disk import on_disk, pinned_bytes
from .estimates import MemoryEstimate, Plan, TimeEstimate
from .machine import Machine
from .model import MOMENT_BYTES, FlatBuffer, ModelDescription, adam_bytes
from .network import NUM_OWN, NUM_OWN_RECOMPUTING, Network
from .policy import DISK, OPTIMIZERS, TrainingPolicy
from .simulated_shards import Widths
from .simulation import Rates, SimulatedStep, StepResult

__all__ = ["estimate", "model_state_bytes"]

#: The ranges of Adam's state start apart from each other (bmtrain/optim/_arrays.py).
_STATE_SKEW_BYTES = 3 * 16 * 1024
#: Of products in 16 bits on a processor that has instructions for them: of forward and backward, and of Muon alone.
_KERNEL_BYTES, _MUON_KERNEL_BYTES = 9.0 * 2**20, 6.0 * 2**20


def model_state_bytes(
    model: ModelDescription,
    num_ranks: int,
    num_sharing: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    optimizer: str = "adam",
    disk: Callable[[int], Sequence[str]] = lambda _: (),
    num_sharing_experts: int | None = None,
) -> dict[str, int]:
    """State of a model that one rank keeps between steps: ``weights``, ``gradients`` and ``optimizer``, in bytes.

    Args:
        num_ranks: that share parameters outside blocks.
        num_sharing: that share a block; default: as many. 1 is level 0.
        state_dtype: of the moments.
        optimizer: ``"adam"``, or ``"muon"``, which keeps one moment less in blocks. (Their vectors count as matrices.)
        disk: gives what the block of a number keeps on drives, which does not count.
        num_sharing_experts: that share its experts; default: as many as share other parameters.
    """
    require_kind("model", model, ModelDescription)
    require_integer("num_ranks", num_ranks, 1)
    if state_dtype not in MOMENT_BYTES:
        raise ValueError(f"state_dtype: expected float32, bfloat16 or int8, got {state_dtype}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: expected 'adam' or 'muon', got {optimizer!r}")
    sizes = {"weights": 0, "gradients": 0, "optimizer": 0}
    for number, block in enumerate(model.blocks):
        of_block, kept = dict.fromkeys(sizes, 0), disk(number)
        for buffer in block.buffers:
            own = num_sharing_experts if buffer.is_of_experts else None
            numel = buffer.partition(own or num_sharing or num_ranks)
            num_moments = 1 if optimizer == "muon" else 2
            state = adam_bytes(buffer.element_size, state_dtype, in_block=True, num_moments=num_moments)
            _add(of_block, numel, buffer.element_size, state, buffer.trains)
        for name, choice in zip(sizes, DISK, strict=True):
            sizes[name] += of_block[name] * (choice not in kept)
    for param in model.outside:
        state = adam_bytes(param.element_size, state_dtype, in_block=False)
        _add(sizes, param.partition(num_ranks), param.element_size, state, param.trains)
    if sizes["optimizer"]:
        sizes["optimizer"] += _STATE_SKEW_BYTES
    return sizes


def _add(sizes: dict[str, int], numel: int, element_size: int, state: float, trains: bool) -> None:
    sizes["weights"] += numel * element_size
    if trains:
        sizes["gradients"] += numel * element_size
        sizes["optimizer"] += math.ceil(numel * state)


def estimate(
    model: ModelDescription,
    machine: Machine,
    policy: TrainingPolicy | None = None,
    *,
    ring_gather: bool = True,
) -> Plan:
    """Predicts memory, time and traffic of training.

    Args:
        model: by :func:`gpt2`, :func:`describe_module` or :func:`describe_config`.
        machine: one of `MACHINES`, or your own.
        policy: the training policy; default: level 3, recomputation, one sample.
        ring_gather: gathers go around a ring (NCCL); False: from rank to rank (Gloo).

    Raises:
        ValueError: the devices do not divide into pipelines of tensor-parallel groups, or of these into parts of
            ``zero_size``; or a run on such devices would refuse the policy.

    Example:
        >>> from bmtrain.plan import MACHINES, TrainingPolicy, estimate, gpt2
        >>> plan = estimate(gpt2(24, 2048, 16), MACHINES["a100-80gb"], TrainingPolicy(micro_batch=8))
        >>> plan.fits, plan.time.bottleneck
        (True, 'compute')
    """
    policy = TrainingPolicy() if policy is None else policy
    require_kind("model", model, ModelDescription)
    require_kind("machine", machine, Machine)
    require_kind("policy", policy, TrainingPolicy)
    _check_places(machine, policy)
    run = _Run(model, machine, policy)
    result = run.simulated(ring_gather)
    return Plan(
        model=model,
        machine=machine,
        policy=policy,
        memory=run.memory(result),
        time=run.time(result),
        traffic={
            name: (messages * policy.passes, nbytes * policy.passes)
            for name, (messages, nbytes) in result.traffic.items()
        },
        result=result,
        disk=run.disk,
    )


def _check_places(machine: Machine, policy: TrainingPolicy) -> None:
    """Refuses places of blocks that devices with memory of their own do not have."""
    if machine.shares_memory:
        return
    if policy.disk and policy.parameters == "device" and "parameters" not in policy.disk:
        raise ValueError(
            "disk: expected parameters='host', or 'parameters' on drives as well, for devices with memory of their own "
            f"(GPUs), got {policy.disk}: gradients, and state on a drive, are with their parameters"
        )
    if policy.survive and policy.parameters == "host":
        raise ValueError("survive: expected CPU ranks, got devices with parameters='host'")


def _stage_of(machine: Machine, policy: TrainingPolicy) -> int:
    """Returns the number of devices of a stage, if the machine can be divided by the policy."""
    if machine.num_devices % (policy.tp_size * policy.pipe_size * policy.sp_size):
        raise ValueError(
            f"devices: expected a multiple of tp_size * pipe_size * sp_size = {policy.tp_size} * {policy.pipe_size} * "
            f"{policy.sp_size}, got {machine.num_devices}"
        )
    stage = machine.num_devices // policy.pipe_size
    if stage % policy.ep_size:
        raise ValueError(f"ep_size: expected a divisor of {stage} devices of a stage, got {policy.ep_size}")
    return stage


class _Run:
    """One rank of a run: the ranks and the parts of the model that it deals with, and the sizes of its state.

    Attributes:
        model: this rank's part of it.
        network: the ranks that share parameters.
        apart: for each block, whether a device has its parameters only while they are in use.
        states: bytes on the device between steps, by purpose.
        moved: likewise on the host, of blocks that are apart.
        disk: bytes on drives.
    """

    def __init__(self, model: ModelDescription, machine: Machine, policy: TrainingPolicy) -> None:
        stage = _stage_of(machine, policy)
        self.machine, self.policy = machine, policy
        self.model = model.sliced(policy.tp_size, policy.pipe_size, policy.sp_size, policy.ep_size)
        if policy.compute_dtype is not None:
            self.model = self.model.computed_in(policy.compute_dtype.itemsize)
        self.network = Network(machine, stage // policy.tp_size, stride=policy.tp_size)
        numbers = range(len(self.model.blocks))
        self.apart = [not machine.shares_memory and policy.is_apart(number) for number in numbers]
        self.disk = on_disk(self.model, policy, self.network)
        self.moved = self._state_bytes(
            replace(self.model, outside=()),
            lambda number: policy.on_disk(number) if self.apart[number] else DISK,
        )
        all_states = self._state_bytes(self.model, policy.on_disk)
        self.states = {name: nbytes - self.moved[name] for name, nbytes in all_states.items()}

    def _state_bytes(self, model: ModelDescription, disk: Callable[[int], Sequence[str]]) -> dict[str, int]:
        policy, num_sharing = self.policy, self.policy.block_policy().num_sharing
        return model_state_bytes(
            model,
            self.network.of_all_stages(policy).size,
            num_sharing(self.network.size),
            policy.state_dtype,
            optimizer=policy.optimizer,
            disk=disk,
            num_sharing_experts=num_sharing(self.network.size * policy.tp_size // policy.ep_size),
        )

    @property
    def offloaded(self) -> float:
        """Bytes of the optimizer that are offloaded."""
        return self.policy.offload * self.states["optimizer"]

    def simulated(self, ring_gather: bool) -> StepResult:
        """Returns the simulated forward and backward; its memory includes a step of Muon."""
        policy, machine = self.policy, self.machine
        step = SimulatedStep(
            self.model,
            policy,
            # A pipeline runs the batches of all of its ranks.
            policy.micro_batch * policy.pipe_size * policy.accumulate // policy.passes,
            self.network,
            Rates(machine.flops * machine.efficiency, machine.memory_bandwidth),
            tp=Network(machine, policy.tp_size) if policy.tp_size > 1 else None,
            sp=Network(machine, policy.sp_size, stride=policy.tp_size) if policy.sp_size > 1 else None,
            ep=Network(machine, policy.ep_size) if policy.ep_size > 1 else None,
            fixed={**self.states, "optimizer": self.states["optimizer"] - self.offloaded},
            ring_gather=ring_gather,
            overlaps=not machine.shares_memory,
        )
        result = step.run()
        if policy.optimizer == "muon":  # its step holds more than a backward where activations are few
            result.memory.add("gathered", result.memory.idle)
            result.memory.add("matrices", self.matrix_bytes())
        return result

    # ---- memory

    def memory(self, result: StepResult) -> MemoryEstimate:
        """Returns the memory at its peak."""
        at_peak, machine = result.memory.at_peak, self.machine
        through_host = 0 if machine.shares_memory else self.disk.buffers
        on_host = self.offloaded + self._pinned_bytes() + self.moved["optimizer"] + through_host
        return MemoryEstimate(
            weights=at_peak["weights"],
            gathered=at_peak.get("gathered", 0.0) + at_peak.get("outside blocks", 0.0),
            gradients=at_peak["gradients"]
            + at_peak.get("gradients in flight", 0.0)
            + at_peak.get("sums ahead", 0.0),
            optimizer=at_peak["optimizer"] + at_peak.get("matrices", 0.0),
            activations=at_peak.get("activations", 0.0),
            usable=machine.usable_memory,
            host=on_host * machine.devices_per_node,
            host_usable=machine.host_memory,
            pool_peak=result.memory.pool_peak,
            wire=self._wire_bytes(result) if machine.shares_memory else 0,
            copies=self._copy_bytes() if self.policy.survive else 0,
            disk=self.disk.buffers - through_host,
            kernels=self._kernel_bytes() if machine.shares_memory else 0.0,
        )

    def _copy_bytes(self) -> int:
        """Returns what continues without another rank: gradients, and where ranks do not share memory, its state."""
        copied, gradients, policy, size = (
            self.states,
            self.states["gradients"],
            self.policy,
            self.network.size,
        )
        if self.machine.num_nodes == 1 and not policy.offload:
            return gradients
        if policy.block_policy().num_sharing(size) < size:  # others hold the shards of all Blocks too
            copied = model_state_bytes(self.model, size, state_dtype=policy.state_dtype, disk=lambda _: DISK)
        return sum(copied.values()) + gradients

    def _kernel_bytes(self) -> float:
        """Returns the memory of products in 16 bits."""
        sizes = {buffer.element_size for block in self.model.blocks for buffer in block.buffers}
        is_narrow = self.policy.compute_dtype is not None or 2 in sizes
        return max(_KERNEL_BYTES * is_narrow, _MUON_KERNEL_BYTES * (self.policy.optimizer == "muon"))

    def _pinned_bytes(self) -> int:
        """Returns the page-locked memory of blocks on the host."""
        total = 0
        for number, block in enumerate(self.model.blocks):
            kept = self.policy.on_disk(number)
            for buffer in block.buffers if self.apart[number] else ():
                partition = buffer.partition(self.network.sharing(buffer, self.policy).size)
                copies = ("parameters" not in kept) + ("gradients" not in kept and buffer.trains)
                total += copies * pinned_bytes(partition * buffer.element_size)
        return total

    def _wire_bytes(self, result: StepResult) -> float:
        """Returns communication buffers of ranks that share memory, beside the buffers of their blocks."""
        to_replicas = max(
            sum(self._replica_bytes(buffer) for buffer in block.buffers if buffer.trains)
            for block in self.model.blocks
        )
        return self._shared_bytes(result) + to_replicas

    def _replica_bytes(self, buffer: FlatBuffer) -> float:
        """Returns the bytes of a sum over replicas: all slices in the rings, one for each peer and the sum of this
        rank's, and this rank's slice as received from each peer."""
        num_sharing = self.network.sharing(buffer, self.policy).size
        replicas = self.network.of(buffer, self.policy).size // num_sharing
        return (2 - 1 / replicas) * buffer.partition(num_sharing) * buffer.element_size if replicas > 1 else 0

    def _shared_bytes(self, result: StepResult) -> float:
        """Returns this rank's share of the memory that the ranks of a host map together.

        Buffers that are used in place: gathered parameters once for all ranks, full gradients of each rank. And rings,
        which hold all parts of the largest gather, and the slices that the largest reduction sends to and receives from
        peers, of a block or of a parameter outside of blocks.
        """
        own: set[tuple[int, int]] = set()
        model, network, policy = self.model, self.network, self.policy
        ranks = network.of_all_stages(policy).size
        outside = max((param.partition(ranks) * param.element_size for param in model.outside), default=0)
        through_rings = (3 * ranks - 2) * outside if ranks > 1 else 0
        for block in model.blocks:
            of_block = 0
            for buffer in block.buffers:
                sharing = network.sharing(buffer, policy)
                ranks, widths = sharing.size, Widths.of(buffer, policy.block_policy())
                gathered, reduced = (
                    buffer.partition(ranks) * width for width in (widths.gather, widths.reduce)
                )
                if ranks > 1 and not sharing.shares(ranks * gathered):
                    of_block += ranks * gathered
                if sharing.shares(ranks * reduced):
                    own.add((reduced, ranks))
                else:
                    of_block += 2 * (ranks - 1) * reduced
            through_rings = max(through_rings, of_block)
        common = sum(part * made for part, made in result.common.made.items())
        num_own = NUM_OWN if policy.recompute is Recompute.OFF else NUM_OWN_RECOMPUTING
        if policy.pipe_size > 1:  # a stage adds up the gradients of all of its blocks
            num_own = len(model.blocks)
        return through_rings + num_own * sum(part * ranks for part, ranks in own) + common

    def matrix_bytes(self) -> float:
        """Returns what a rank holds in a step of Muon, in bf16: the matrices that it owns and its elements of the
        others (of one buffer at a time with drives), and of the largest matrix a copy, its new values and two products.
        """
        in_memory, on_disk, largest = 0.0, 0.0, 0
        for number, block in enumerate(self.model.blocks):
            is_on_disk = "optimizer" in self.policy.on_disk(number)
            for buffer in [buffer for buffer in block.buffers if buffer.trains]:
                numel, largest = sum(buffer.numels), max(largest, *buffer.numels)
                owned = numel / self.network.of(buffer, self.policy).size
                held = owned + (numel - owned) / self.network.sharing(buffer, self.policy).size
                in_memory, on_disk = in_memory + held * (not is_on_disk), max(on_disk, held * is_on_disk)
        return 2 * (max(in_memory, on_disk) + 3 * largest)

    # ---- time

    def _muon_seconds(self) -> tuple[float, float]:
        """Returns the time of the products, which all ranks divide, or of the messages meanwhile if these take longer:
        each element travels to the owner of its matrix and back, in bf16. And the time one way between the device and
        the host, of the elements whose momentum is there."""
        if self.policy.optimizer != "muon":
            return 0.0, 0.0
        machine, blocks, size = self.machine, self.model.blocks, self.network.size
        flops = sum(block.muon_flops for block in blocks)
        numels = [sum(sum(buffer.numels) for buffer in b.buffers if buffer.trains) for b in blocks]
        pairs = zip(numels, self.apart, strict=True)
        on_host = sum(numel for numel, is_apart in pairs if is_apart or self.policy.offload)
        messages = 2 * self.network.seconds(2 * sum(numels) / size / size, ring=False) if size > 1 else 0.0
        products = flops / size / (machine.flops * machine.efficiency)
        return max(products, messages), 2 * on_host / size / machine.pcie_bandwidth

    def time(self, result: StepResult) -> TimeEstimate:
        """Returns the time of a step."""
        machine, policy, moved, disk = self.machine, self.policy, self.moved, self.disk
        gradients = self.states["gradients"]
        # One pass over gradient, parameter, master and moments reads and writes all but the gradient.
        touched = 2 * (self.states["optimizer"] + gradients) + gradients
        touched_by_host = (
            policy.offload * touched + 2 * (moved["optimizer"] + moved["gradients"]) + moved["gradients"]
        )
        # The update of what passes reads and writes all of it in memory too.
        passing = disk.read_in_update + disk.written_in_update
        products, matrices = self._muon_seconds()
        optimizer = (1 - policy.offload) * touched / machine.memory_bandwidth + products
        if machine.shares_memory:
            optimizer += passing / machine.memory_bandwidth
        else:
            touched_by_host += passing
        pcie = policy.offload * gradients / machine.pcie_bandwidth + matrices
        host = touched_by_host * machine.devices_per_node / machine.host_bandwidth
        passes = policy.passes
        share = idle_share(policy.pipe_size, policy.micros, policy.schedule, policy.chunks)
        idle = result.seconds * passes * share / (1 - share)
        with_drives, exposed = self._drive_seconds(result, optimizer + host)
        return TimeEstimate(
            # The update on the host follows the backward: nothing of it overlaps. Gradients go down and parameters come
            # back over PCIe.
            step=result.seconds * passes + idle + optimizer + 2 * pcie + host + exposed,
            compute=result.computing * passes,
            wire=result.wire_busy * passes,
            exposed_wire=result.waiting * passes,
            optimizer=optimizer,
            pcie=2 * pcie + result.waiting_for_bus * passes,
            host=host,
            idle=idle,
            disk=with_drives,
            exposed_disk=exposed,
        )

    def _drive_seconds(self, result: StepResult, update: float) -> tuple[float, float]:
        """Returns the time of drives, and the part of it that everything else waits for; ``update``: of the update.

        Drives work while the passes compute, and in the update, which continues in the first forward (except for
        matrices, which the ranks transform together). A phase takes as long as the slower of both.
        """
        disk, rate = self.disk, self.machine.disk_bandwidth / self.machine.devices_per_node
        with_passes = (disk.read_in_passes + disk.written_in_passes) / rate
        with_update = (disk.read_in_update + disk.written_in_update) / rate
        shared = 0.0 if self.policy.optimizer == "muon" else 1.0
        forward, reads = shared * result.forward, shared * disk.read_in_forward / rate
        exposed = max(with_update + reads - update - forward, 0.0)
        exposed += max(with_passes - reads - (result.seconds * self.policy.passes - forward), 0.0)
        return with_passes + with_update, exposed
