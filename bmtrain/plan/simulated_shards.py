"""Substitutes for the core's buffers in a simulated step: a clock, and counts of moved bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .._C import ShardedBuffer
from .._engine.engine import SLOTS_PER_CLASS
from .._engine.policy import BlockPolicy
from .model import FlatBuffer
from .network import BUS, NUM_COMMON, Network, Transfer, Wire

__all__ = ["CommonBuffers", "MemoryMeter", "SimulatedEvent", "SimulatedShards", "Simulation", "Widths"]

#: Up to this many bytes an all-reduce is one step (csrc/comm/exchange_communicator.cpp).
SMALL_ALL_REDUCE = 64 * 1024
#: Of parameters, by the size of an element.
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

_State = ShardedBuffer.State


class SimulatedEvent(NamedTuple):
    """A span of ``gather``, ``compute``, ``reduce`` or ``wait``: its block, begin and end (seconds)."""

    kind: str
    block: str
    begin: float
    end: float


class MemoryMeter:
    """Bytes by purpose, and their division at the peak."""

    def __init__(self, fixed: dict[str, float]) -> None:
        self.now = dict(fixed)
        self.at_peak = dict(fixed)
        self.peak = sum(fixed.values())
        #: Largest sum of what the runtime's BufferPool lends, and the largest part of it.
        self.pool_peak = self.largest_lent = 0.0

    def add(self, purpose: str, nbytes: float) -> None:
        """Adds ``nbytes``; negative values free them."""
        self.now[purpose] = self.now.get(purpose, 0.0) + nbytes
        total = sum(self.now.values())
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.now)
        pool = self.now.get("gathered", 0.0) + self.now.get("gradients in flight", 0.0)
        self.pool_peak = max(self.pool_peak, pool)
        if purpose in ("gathered", "gradients in flight"):
            self.largest_lent = max(self.largest_lent, nbytes)

    @property
    def idle(self) -> float:
        """Bytes that the pool keeps between the passes."""
        return min(self.pool_peak, SLOTS_PER_CLASS * self.largest_lent)


class CommonBuffers:
    """Buffers for gathered parameters that the ranks of a host write together (csrc/comm/shm/shm_heap.cpp).

    Attributes:
        made: the number of buffers by a rank's part of each in bytes. They are never freed.
    """

    def __init__(self) -> None:
        self.made: dict[int, int] = {}
        self._lent: dict[int, int] = {}

    def borrow(self, partition_bytes: int) -> None:
        """Takes one for a gather: there are two, or as many as are in use at one time."""
        lent = self._lent[partition_bytes] = self._lent.get(partition_bytes, 0) + 1
        made = self.made.get(partition_bytes, 0)
        self.made[partition_bytes] = max(made, lent, min(made + 1, NUM_COMMON))

    def give_back(self, partition_bytes: int) -> None:
        """Returns one after its release."""
        self._lent[partition_bytes] -= 1


@dataclass
class Simulation:
    """State that all parts of a simulated step share."""

    wire: Wire
    network: Network
    memory: MemoryMeter
    ring_gather: bool
    common: CommonBuffers = field(default_factory=CommonBuffers)
    events: list[SimulatedEvent] = field(default_factory=list)
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    computing: float = 0.0
    waiting: float = 0.0
    waiting_for_bus: float = 0.0

    def count(self, operation: str, wire_bytes: int) -> None:
        """Counts one message, as `Communicator.traffic` does."""
        messages, nbytes = self.traffic.get(operation, (0, 0))
        self.traffic[operation] = (messages + 1, nbytes + wire_bytes)

    def compute(self, block: str, seconds: float) -> None:
        """Advances the clock by computation of the device."""
        begin = self.wire.now
        self.wire.advance(seconds)
        self.computing += seconds
        self.events.append(SimulatedEvent("compute", block, begin, self.wire.now))

    def copy(self, way: str, name: str, nbytes: float, after: Transfer | None = None) -> Transfer:
        """Starts a copy between device and host, ``way`` of ``BUS``."""
        self.count(way, round(nbytes))
        return self.wire.start(way, name, nbytes / self.network.machine.pcie_bandwidth, after)

    def wait(self, kind: str, transfer: Transfer) -> None:
        """Advances the clock while the device waits for a collective or a copy."""
        begin = self.wire.now
        waited = self.wire.wait(transfer)
        assert transfer.end is not None
        if kind in BUS:
            self.waiting_for_bus += waited
        else:
            self.waiting += waited
        self.events.append(SimulatedEvent(kind, transfer.name, transfer.begin, transfer.end))
        if waited:
            self.events.append(SimulatedEvent("wait", transfer.name, begin, self.wire.now))


class Widths(NamedTuple):
    """Bytes of an element: of parameters, in their gather, once gathered, and in the reduction of gradients."""

    stored: int
    gather: int
    compute: int
    reduce: int

    @classmethod
    def of(cls, buffer: FlatBuffer, policy: BlockPolicy) -> Widths:
        """The widths of a block's buffer."""
        dtypes = policy.dtypes_of(_DTYPES[buffer.element_size])
        return cls(buffer.element_size, *(dtype.itemsize for dtype in dtypes))


class _Gathers:
    """The gathered buffer of a `ShardedBuffer`: its lifetime, and the cost of the gather."""

    def __init__(
        self,
        simulation: Simulation,
        label: str,
        partition: int,
        network: Network,
        widths: Widths,
        on_host: bool,
    ) -> None:
        self._simulation, self._label, self._network = simulation, label, network
        self._part = partition * widths.gather
        self._is_shared = network.shares(network.size * self._part)
        # Common buffers are counted elsewhere.
        self._has_buffer = network.size > 1 or widths.gather != widths.stored or on_host
        self._on_host = on_host
        self._copy: Transfer | None = None
        #: Bytes of the gathered parameters where they are a copy of the received data.
        self._widened = network.size * partition * widths.compute * (widths.gather != widths.compute)
        self._is_in_place = False
        self._holds_wire = False
        self._transfer: Transfer | None = None

    def start(self, in_place: bool) -> None:
        if not self._has_buffer:
            return
        simulation, network = self._simulation, self._network
        self._is_in_place = in_place and self._is_shared
        self._holds_wire = True
        if self._is_in_place:
            simulation.common.borrow(self._part)
            seconds = network.gather_in_place_seconds(self._part)
        else:
            simulation.memory.add("gathered", network.size * self._part)
            seconds = network.seconds(self._part, ring=simulation.ring_gather)
        if self._on_host:
            self._copy = simulation.copy(BUS[0], self._label, self._part)
        if network.size > 1:
            simulation.count("all_gather", (network.size - 1) * self._part)
            self._transfer = simulation.wire.start("gather", self._label, seconds, self._copy)

    def await_arrival(self) -> None:
        if self._copy is not None:
            self._simulation.wait(BUS[0], self._copy)
            self._copy = None
        if self._transfer is not None:
            self._simulation.wait("gather", self._transfer)
            self._transfer = None

    def finish(self) -> None:
        self.await_arrival()
        if self._widened:
            self._simulation.memory.add("gathered", self._widened)
            self._give_back_wire()

    def _give_back_wire(self) -> None:
        if self._is_in_place:
            self._simulation.common.give_back(self._part)
        elif self._holds_wire:
            self._simulation.memory.add("gathered", -self._network.size * self._part)
        self._is_in_place = self._holds_wire = False

    def release(self, *, is_finished: bool) -> None:
        self.await_arrival()
        self._give_back_wire()
        if is_finished:
            self._simulation.memory.add("gathered", -self._widened)


class _Reduction:
    """The reduction of a `ShardedBuffer`'s gradients: over the ranks that share it, then over its replicas."""

    def __init__(
        self,
        simulation: Simulation,
        label: str,
        partition: int,
        network: Network,
        replicas: Network,
        widths: Widths,
        way: str,
        on_host: bool,
    ) -> None:
        self._simulation, self._label, self._network, self._replicas = simulation, label, network, replicas
        self._reduction_path = way
        self._part = partition * widths.reduce
        self._is_shared = way == "direct" and network.shares(network.size * self._part)
        # Where nothing is shared out the gradients themselves are summed, else the shards.
        self._summed = partition, widths.stored if network.size > 1 else widths.reduce
        self._buffers = 0
        self._sum_ahead = 0.0
        self._transfer: Transfer | None = None
        self._sums_replicas = False
        self._host_bytes = partition * widths.stored if on_host else 0
        self._copy: Transfer | None = None

    def begin(self) -> None:
        if not self._is_shared:
            self._take_buffer()

    def _take_buffer(self) -> None:
        self._buffers += 1
        self._simulation.memory.add("gradients in flight", self._network.size * self._part)

    def _drop_buffers(self) -> None:
        self._simulation.memory.add("gradients in flight", -self._buffers * self._network.size * self._part)
        self._buffers = 0

    def start(self) -> None:
        simulation, network = self._simulation, self._network
        if network.size == 1:
            self._start_sum_over_replicas()
            self._start_copy()
            return
        if self._reduction_path == "hosts":
            seconds = self._sum_by_hosts()
        elif self._reduction_path == "ring":
            simulation.count("reduce_scatter", (network.size - 1) * self._part)
            seconds = network.seconds(self._part, ring=True)
        else:
            simulation.count("all_to_all", (network.size - 1) * self._part)
            if self._is_shared:
                seconds = network.reduce_in_place_seconds(self._part)
            else:
                self._take_buffer()
                seconds = network.seconds(self._part, ring=False)
        self._transfer = simulation.wire.start("reduce", self._label, seconds)
        if self._replicas.size == 1:
            self._start_copy()

    def _start_copy(self) -> None:
        """Copies the sums to the host, if they live there."""
        if self._host_bytes:
            self._copy = self._simulation.copy(BUS[1], self._label, self._host_bytes, self._transfer)

    def _sum_by_hosts(self) -> float:
        """Seconds of two exchanges, one after the other."""
        network, simulation = self._network, self._simulation
        self._take_buffer()
        here, nodes = network.ranks_per_node, network.num_nodes
        simulation.count("all_to_all", (here - 1) * nodes * self._part)
        simulation.count("all_to_all", (nodes - 1) * self._part)
        return network.seconds_by_hosts(self._part)

    def _start_sum_over_replicas(self) -> None:
        if self._replicas.size > 1:
            simulation, (numel, width) = self._simulation, self._summed
            simulation.count("all_reduce", _all_reduce_bytes(numel, width, self._replicas.size))
            seconds = self._replicas.all_reduce_seconds(numel * width, ring=simulation.ring_gather)
            self._transfer = simulation.wire.start("reduce", self._label, seconds)
            self._sums_replicas = True

    def sum_ahead(self) -> None:
        """Sums what peers let this rank read in place, beside gradients that are there (not set to None)."""
        if (
            self._is_shared
            and self._transfer is not None
            and self._replicas.size == 1
            and not self._sum_ahead
        ):
            self._sum_ahead = max(4.0, self._summed[1]) * self._summed[0]
            self._simulation.memory.add("sums ahead", self._sum_ahead)

    def continue_sum(self) -> bool:
        """Starts the sum over replicas after the first reduction; returns whether there is one."""
        if self._transfer is None or self._replicas.size == 1 or self._network.size == 1:
            return False
        if not self._sums_replicas:
            self._simulation.wait("reduce", self._transfer)
            self._drop_buffers()
            self._start_sum_over_replicas()
            self._start_copy()
        return True

    def finish(self) -> None:
        self.continue_sum()
        if self._transfer is not None:
            self._simulation.wait("reduce", self._transfer)
        if self._copy is not None:
            self._simulation.wait(BUS[1], self._copy)
        self._transfer, self._copy, self._sums_replicas = None, None, False
        self._simulation.memory.add("sums ahead", -self._sum_ahead)
        self._sum_ahead = 0.0
        self._drop_buffers()


def _all_reduce_bytes(numel: int, width: int, ranks: int) -> int:
    """Bytes sent: small tensors to all ranks, large ones slice by slice (csrc/comm/exchange_communicator.cpp)."""
    if numel * width <= SMALL_ALL_REDUCE:
        return (ranks - 1) * numel * width
    own = -(-numel // ranks)
    return (numel - own + own * (ranks - 1)) * width


def _reduction_path(network: Network, policy: BlockPolicy, num_sharing: int) -> str:
    """The reduction of gradients; see `BlockPolicy.reduce`."""
    if policy.reduce == "ring":
        return "ring"
    has_hosts = num_sharing == network.size and 1 < network.ranks_per_node < network.size
    return "hosts" if has_hosts and policy.reduce != "direct" else "direct"


class SimulatedShards:
    """A substitute for `ShardedBuffer`: the same states and buffers, without data."""

    def __init__(
        self,
        simulation: Simulation,
        label: str,
        buffer: FlatBuffer,
        policy: BlockPolicy,
        network: Network,
        on_host: bool,
    ) -> None:
        num_sharing = policy.num_sharing(network.size)
        sharing, replicas = network.part(num_sharing), network.replicas(num_sharing)
        widths = Widths.of(buffer, policy)
        partition = buffer.partition(num_sharing)
        self._gathers = _Gathers(simulation, label, partition, sharing, widths, on_host)
        way = _reduction_path(network, policy, num_sharing)
        self._reduction = _Reduction(simulation, label, partition, sharing, replicas, widths, way, on_host)
        self.trains = buffer.trains
        self.state = _State.SHARDED

    def version(self) -> int:
        """A constant: no shard is written while a step runs."""
        return 0

    def adopt_data(self) -> bool:
        """Returns False: no tensors replace the shards."""
        return False

    def start_gather(self, in_place: bool = False) -> None:
        if self.state == _State.SHARDED:
            self._gathers.start(in_place)
            self.state = _State.GATHERING

    def finish_gather(self) -> None:
        self.start_gather()
        if self.state == _State.GATHERING:
            self._gathers.finish()
            self.state = _State.GATHERED

    def release(self) -> None:
        self._gathers.release(is_finished=self.state == _State.GATHERED)
        self.state = _State.SHARDED

    def bind(self) -> None:
        """Parameters are views; that costs nothing."""

    def unbind(self) -> None:
        """Parameters are views; that costs nothing."""

    def begin_backward(self, trains: list[bool], under_way: Sequence[SimulatedShards], in_turn: bool) -> None:
        del trains, in_turn
        for other in under_way:
            other._reduction.sum_ahead()
        self._reduction.begin()

    def join_backward(self, trains: list[bool]) -> None:
        """Does nothing: gradients of several backwards share one buffer."""

    def cancel_backward(self) -> None:
        """Does nothing: no simulated backward fails."""

    def start_reduce(self) -> None:
        self._reduction.start()

    def continue_reduce(self) -> bool:
        return self._reduction.continue_sum()

    def await_reduce(self) -> None:
        """Does nothing: `finish_reduce` waits."""

    def finish_reduce(self, tree: None = None) -> None:
        self._reduction.finish()
