"""A training step on a virtual clock, run by the runtime's own schedule.

[Note: What is simulated]
Order of gathers, what is gathered ahead, what stays for the backward, when a reduction is waited for, which buffers
exist at once: none of this is written down here. `BlockRuntime`, `Engine` and `Schedule` of ``bmtrain/_engine`` decide
it, as they do in a run; they are given `SimulatedShards` in place of the core's `ShardGroup`, which move a virtual
clock and count bytes where the core moves bytes. What is added is the order inside one block call (`_forward` and
`_backward`, after ``_engine/island.py``) and what happens outside blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import _C
from .._engine.runtime import BlockRuntime, Engine
from .._engine.schedule import Phase
from .model import BlockDescription, FlatBuffer, ModelDescription, OutsideParameter, OutsideReads
from .network import NUM_COMMON, Network, Transfer, Wire
from .policy import TrainingPolicy

__all__ = ["MemoryMeter", "Rates", "SimulatedEvent", "SimulatedStep", "StepResult"]

_State = _C.ShardGroup.State


class SimulatedEvent(NamedTuple):
    """What took time: ``gather``, ``compute``, ``reduce`` or ``wait``, for which block, from when to when (seconds)."""

    kind: str
    block: str
    begin: float
    end: float


class MemoryMeter:
    """Bytes by what they are for, and how they were divided when there were most."""

    def __init__(self, fixed: dict[str, float]) -> None:
        self.now = dict(fixed)
        self.at_peak = dict(fixed)
        self.peak = sum(fixed.values())
        #: Largest sum of what the runtime's BufferPool lends.
        self.pool_peak = 0.0

    def add(self, purpose: str, nbytes: float) -> None:
        """Takes ``nbytes``, or gives them back if negative."""
        self.now[purpose] = self.now.get(purpose, 0.0) + nbytes
        total = sum(self.now.values())
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.now)
        pool = self.now.get("gathered", 0.0) + self.now.get("gradients in flight", 0.0)
        self.pool_peak = max(self.pool_peak, pool)


class CommonBuffers:
    """Buffers for gathered parameters that the ranks of a host write together (csrc/comm/shm_heap.cpp).

    Attributes:
        made: how many there are, by a rank's part of each in bytes. They stay.
    """

    def __init__(self) -> None:
        self.made: dict[int, int] = {}
        self._lent: dict[int, int] = {}

    def borrow(self, partition_bytes: int) -> None:
        """One for a gather: there are two, and as many as are in use at one time."""
        lent = self._lent[partition_bytes] = self._lent.get(partition_bytes, 0) + 1
        made = self.made.get(partition_bytes, 0)
        self.made[partition_bytes] = max(made, lent, min(made + 1, NUM_COMMON))

    def give_back(self, partition_bytes: int) -> None:
        """After its release."""
        self._lent[partition_bytes] -= 1


@dataclass
class Simulation:
    """What all parts of a simulated step share."""

    wire: Wire
    network: Network
    memory: MemoryMeter
    ring_gather: bool
    ring_reduce: bool
    common: CommonBuffers = field(default_factory=CommonBuffers)
    events: list[SimulatedEvent] = field(default_factory=list)
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    computing: float = 0.0
    waiting: float = 0.0

    def count(self, operation: str, partition_bytes: int) -> None:
        """One message, as `Communicator.traffic` counts it."""
        messages, nbytes = self.traffic.get(operation, (0, 0))
        self.traffic[operation] = (messages + 1, nbytes + (self.network.size - 1) * partition_bytes)

    def compute(self, block: str, seconds: float) -> None:
        """The device computes."""
        begin = self.wire.now
        self.wire.advance(seconds)
        self.computing += seconds
        self.events.append(SimulatedEvent("compute", block, begin, self.wire.now))

    def wait(self, kind: str, transfer: Transfer) -> None:
        """The device waits for a collective."""
        begin = self.wire.now
        waited = self.wire.wait(transfer)
        assert transfer.end is not None
        self.waiting += waited
        self.events.append(SimulatedEvent(kind, transfer.name, transfer.begin, transfer.end))
        if waited:
            self.events.append(SimulatedEvent("wait", transfer.name, begin, self.wire.now))


class SimulatedShards:
    """Stands for a `ShardGroup`: the same states and the same buffers, without the bytes."""

    def __init__(self, simulation: Simulation, label: str, buffer: FlatBuffer) -> None:
        self._simulation = simulation
        self._label = label
        self._ranks = simulation.network.size
        self._partition = buffer.partition(self._ranks) * buffer.element_size
        self._is_shared = simulation.network.shares(self._ranks * self._partition)
        self._is_in_place = False
        self._gather: Transfer | None = None
        self._reduction: Transfer | None = None
        self._has_gradient = self._has_received = False
        self.trains = buffer.trains
        self.state = _State.SHARDED

    def version(self) -> int:
        """Nothing is written to while a step runs."""
        return 0

    def adopt_data(self) -> bool:
        """Nobody puts tensors in place of the shards."""
        return False

    def start_gather(self, in_place: bool = False) -> None:
        if self.state != _State.SHARDED:
            return
        if self._ranks > 1:
            simulation, network = self._simulation, self._simulation.network
            self._is_in_place = in_place and self._is_shared
            simulation.count("all_gather", self._partition)
            if self._is_in_place:
                simulation.common.borrow(self._partition)
                seconds = network.gather_in_place_seconds(self._partition)
            else:
                simulation.memory.add("gathered", self._ranks * self._partition)
                seconds = network.seconds(self._partition, ring=simulation.ring_gather)
            self._gather = simulation.wire.start("gather", self._label, seconds)
        self.state = _State.GATHERING

    def finish_gather(self) -> None:
        self.start_gather()
        if self._gather is not None:
            self._simulation.wait("gather", self._gather)
            self._gather = None
        self.state = _State.GATHERED

    def release(self) -> None:
        self.finish_gather()
        if self._is_in_place:
            self._simulation.common.give_back(self._partition)
            self._is_in_place = False
        elif self._ranks > 1:
            self._simulation.memory.add("gathered", -self._ranks * self._partition)
        self.state = _State.SHARDED

    def bind(self) -> None:
        """Parameters are views; that costs nothing."""

    def unbind(self) -> None:
        """Parameters are views; that costs nothing."""

    def begin_backward(self, trains: list[bool]) -> None:
        del trains
        if not self._is_shared:
            self._has_gradient = True
            self._simulation.memory.add("gradients in flight", self._ranks * self._partition)

    def cancel_backward(self) -> None:
        """No simulated backward fails."""

    def start_reduce(self) -> None:
        if self._ranks == 1:
            return
        simulation, network = self._simulation, self._simulation.network
        simulation.count("all_to_all", self._partition)
        if self._is_shared:
            seconds = network.reduce_in_place_seconds(self._partition)
        else:
            self._has_received = True
            simulation.memory.add("gradients in flight", self._ranks * self._partition)
            seconds = network.seconds(self._partition, ring=simulation.ring_reduce)
        self._reduction = simulation.wire.start("reduce", self._label, seconds)

    def continue_reduce(self) -> bool:
        """Whether a sum over replicas follows: none is simulated."""
        return False

    def finish_reduce(self) -> None:
        if self._reduction is not None:
            self._simulation.wait("reduce", self._reduction)
            self._reduction = None
        buffers = int(self._has_gradient) + int(self._has_received)
        self._has_gradient = self._has_received = False
        self._simulation.memory.add("gradients in flight", -buffers * self._ranks * self._partition)


class _SimulatedEngine(Engine):
    """The engine of a process in which no autograd runs: the end of a backward is told."""

    def call_at_end_of_backward(self) -> None:
        """`SimulatedStep` finishes the reductions."""


class Rates(NamedTuple):
    """How fast one device works: floating-point operations and bytes of its memory, per second."""

    flops: float
    bytes: float


class StepResult(NamedTuple):
    """One simulated forward and backward, after the order of blocks has been learnt.

    Times are in seconds; ``traffic`` is what `Communicator.traffic` counts.
    """

    seconds: float
    computing: float
    waiting: float
    wire_busy: float
    traffic: dict[str, tuple[int, int]]
    events: list[SimulatedEvent]
    memory: MemoryMeter
    common: CommonBuffers


class SimulatedStep:
    """A model's forward and backward on one rank.

    Args:
        model: what this rank holds and does for one sample.
        policy: how it is trained.
        samples: of this rank in one pass.
        network: the ranks that share the parameters.
        rates: how fast the device is.
        tp: the tensor-parallel ranks, if there are any.
        fixed: bytes that are there all the time, by purpose.
        ring_gather: gathers go around a ring.
        ring_reduce: reductions do.
        overlaps: False makes every collective wait for its end (for peers that do not overlap).
        early_stop: second forwards stop at the last saved tensor.
    """

    def __init__(
        self,
        model: ModelDescription,
        policy: TrainingPolicy,
        samples: float,
        network: Network,
        rates: Rates,
        *,
        tp: Network | None = None,
        fixed: dict[str, float] | None = None,
        ring_gather: bool = True,
        ring_reduce: bool = False,
        overlaps: bool = True,
        early_stop: bool = True,
    ) -> None:
        self.model, self.policy, self.samples = model, policy, samples
        self.rates, self.tp, self.overlaps, self.early_stop = rates, tp, overlaps, early_stop
        self.simulation = Simulation(Wire(), network, MemoryMeter(fixed or {}), ring_gather, ring_reduce)
        self.engine = _SimulatedEngine(torch.device("cpu"))
        self.runtimes: list[BlockRuntime] = []
        for number, block in enumerate(model.blocks):
            shards: Any = [SimulatedShards(self.simulation, f"block {number}", b) for b in block.buffers]
            self.runtimes.append(BlockRuntime(self.engine, f"block {number}", shards, policy.block_policy()))

    def run(self) -> StepResult:
        """Three passes, of which the last one counts: the first two teach the schedule."""
        simulation = self.simulation
        for _ in range(3):
            begin, busy = simulation.wire.now, simulation.wire.busy
            simulation.computing = simulation.waiting = 0.0
            simulation.events.clear()
            simulation.traffic.clear()
            self._pass()
        return StepResult(
            simulation.wire.now - begin,
            simulation.computing,
            simulation.waiting,
            simulation.wire.busy - busy,
            dict(simulation.traffic),
            list(simulation.events),
            simulation.memory,
            simulation.common,
        )

    def _pass(self) -> None:
        model, memory = self.model, self.simulation.memory
        outside = OutsideReads(model.outside)
        self._gather_outside(outside.before_blocks)
        for runtime, block in zip(self.runtimes, model.blocks, strict=True):
            self._forward(runtime, block)
        self._gather_outside(outside.after_blocks)
        memory.add("activations", model.head_bytes * self.samples)
        self._compute("head", 3 * model.head_flops, 2 * model.head_bytes)
        memory.add("activations", -model.head_bytes * self.samples)
        self._reduce_outside(outside.after_blocks)
        for runtime, block in zip(reversed(self.runtimes), reversed(model.blocks), strict=True):
            self._backward(runtime, block)
        self._reduce_outside(outside.before_blocks)
        self.engine.finish_reductions()
        memory.add("outside blocks", -memory.now.get("outside blocks", 0.0))  # autograd lets go of the last

    def _forward(self, runtime: BlockRuntime, block: BlockDescription) -> None:
        memory = self.simulation.memory
        runtime.open(Phase.FORWARD)
        self._wait_for_all()
        # While the block runs everything that it saves is there only if it is kept.
        memory.add("activations", self._kept(block) * self.samples)
        self._compute(runtime.label, block.flops, 2 * block.activation_bytes)
        self._exchange(block, 1)
        runtime.close(keep=runtime.keeps_for_backward())

    def _backward(self, runtime: BlockRuntime, block: BlockDescription) -> None:
        memory = self.simulation.memory
        runtime.open(Phase.BACKWARD)
        self._wait_for_all()
        again = max(block.activation_bytes - self._kept(block), 0.0) * self.samples
        memory.add("activations", again)
        if self.policy.recompute:
            skipped = block.last_matmul_flops if self.early_stop else 0.0
            self._compute(runtime.label, block.flops - skipped, 2 * block.activation_bytes)
            self._exchange(block, 1)
        training: Any = [group for group in runtime.groups if group.trains]  # type: ignore[attr-defined]
        runtime.begin_backward({group: [True] for group in training})
        # The hidden state has a gradient on its way around the layer and one through it.
        passing = (
            block.gradient_bytes + 2 * block.input_bytes
        ) * self.samples + block.largest_parameter_gradient
        memory.add("activations", passing)
        self._compute(runtime.label, 2 * block.flops, 3 * block.activation_bytes)
        memory.add("activations", -passing)
        self._exchange(block, 1)
        memory.add("activations", -again - self._kept(block) * self.samples)
        runtime.close(keep=self.engine.schedule.expects_backward_of(runtime))
        runtime.start_reduce(training)
        self._wait_for_all()

    def _kept(self, block: BlockDescription) -> float:
        return block.input_bytes if self.policy.recompute else block.activation_bytes

    def _wait_for_all(self) -> None:
        if not self.overlaps:
            self.simulation.waiting += self.simulation.wire.drain()

    def _compute(self, label: str, flops: float, moved_bytes: float) -> None:
        seconds = self.samples * (flops / self.rates.flops + moved_bytes / self.rates.bytes)
        self.simulation.compute(label, seconds)

    def _exchange(self, block: BlockDescription, times: int) -> None:
        """Tensor-parallel ranks add up what each has computed; nothing else can go on."""
        if self.tp is not None and block.tp_exchange_bytes:
            # Two sums in a pass, after the attention and after the feed-forward layer.
            half = block.tp_exchange_bytes / 2 * self.samples
            self.simulation.waiting += times * 2 * self.tp.all_reduce_seconds(half)
            self.simulation.wire.advance(times * 2 * self.tp.all_reduce_seconds(half))

    def _gather_outside(self, messages: Sequence[Sequence[OutsideParameter]]) -> None:
        self._outside("gather", "all_gather", messages, self.simulation.ring_gather)

    def _reduce_outside(self, messages: Sequence[Sequence[OutsideParameter]]) -> None:
        trained = [[param for param in together if param.trains] for together in messages]
        self._outside("reduce", "reduce_scatter", [together for together in trained if together], ring=True)

    def _outside(
        self, kind: str, operation: str, messages: Sequence[Sequence[OutsideParameter]], ring: bool
    ) -> None:
        """Each message is waited for; autograd holds what was gathered (no time is lost with one)."""
        simulation = self.simulation
        sign = 1 if kind == "gather" else -1
        for together in messages:
            nbytes = sum(p.partition(simulation.network.size) * p.element_size for p in together)
            simulation.memory.add("outside blocks", sign * simulation.network.size * nbytes)
            if simulation.network.size > 1:
                simulation.count(operation, nbytes)
                seconds = simulation.network.seconds(nbytes, ring=ring)
                simulation.wait(kind, simulation.wire.start(kind, "outside", seconds))
