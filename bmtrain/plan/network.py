"""Time of a collective alone, and bandwidth sharing of collectives that run together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .machine import Machine
from .model import FlatBuffer
from .policy import TrainingPolicy

__all__ = ["LEAST_SHARED", "NUM_COMMON", "NUM_OWN", "NUM_OWN_RECOMPUTING", "Network", "Transfer", "Wire"]

#: Bytes from which the ranks of a host use a block's buffers in place (csrc/shard/buffer_spec.cpp).
LEAST_SHARED = 1 << 20
#: Buffers of a size for gathered parameters, and for each rank's gradients, also where forwards run again in backward.
NUM_COMMON, NUM_OWN, NUM_OWN_RECOMPUTING = 2, 2, 1
#: Messages of one rank to different peers that travel together.
_MESSAGES_IN_FLIGHT = 8


@dataclass(frozen=True)
class Network:
    """The ranks that share a buffer, and the links between them.

    In a ring every byte enters each node once. Sent directly, as the runtime's gradient slices are, a byte enters a
    node once for each of the node's ranks that needs it: nothing is summed in between, so ``devices_per_node`` times
    as much passes the network cards. Between the ranks of one node there is no difference.

    Args:
        machine: the machine of the ranks.
        size: number of ranks; they fill nodes.
        stride: ranks of a node that belong to other groups of this kind (tensor-parallel neighbours, stages).
    """

    machine: Machine
    size: int
    stride: int = 1

    @property
    def ranks_per_node(self) -> int:
        """Members of the group in one node."""
        return max(1, min(self.size, self.machine.devices_per_node // self.stride))

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.ranks_per_node)

    def seconds(self, partition_bytes: float, *, ring: bool) -> float:
        """Seconds of an all-gather or reduce-scatter of ``size`` partitions.

        Args:
            partition_bytes: bytes that one rank contributes or receives.
            ring: around a ring, or directly from rank to rank.
        """
        if self.size == 1:
            return 0.0
        machine, here = self.machine, self.ranks_per_node
        seconds = (self.size - 1) * partition_bytes / machine.link_bandwidth
        # All groups of this kind use the node's network cards at the same time.
        groups = max(1, min(self.stride, machine.devices_per_node))
        if self.num_nodes > 1:
            entering = (self.size - 1 if ring else here * (self.size - here)) * partition_bytes * groups
            seconds = max(seconds, entering / machine.network_bandwidth)
        far = self.num_nodes if ring else (self.size - here) / _MESSAGES_IN_FLIGHT
        near = self.size - self.num_nodes if ring else (here - 1) / _MESSAGES_IN_FLIGHT
        return (
            seconds
            + (far * machine.network_latency if self.num_nodes > 1 else 0)
            + (near * machine.link_latency)
        )

    def seconds_by_hosts(self, partition_bytes: float) -> float:
        """A reduce-scatter of ``size`` partitions in two steps: over the ranks of each node, then over the nodes."""
        machine, here, nodes = self.machine, self.ranks_per_node, self.num_nodes
        groups = max(1, min(self.stride, machine.devices_per_node))
        sent = (nodes - 1) * partition_bytes
        between = max(sent / machine.link_bandwidth, here * sent * groups / machine.network_bandwidth)
        latency = (nodes - 1) / _MESSAGES_IN_FLIGHT * machine.network_latency
        return self.part(here).seconds(nodes * partition_bytes, ring=False) + between + latency

    def shares(self, nbytes: float) -> bool:
        """Whether the ranks use a buffer of ``nbytes`` in place, in memory that they all map."""
        return self.machine.shares_memory and 1 < self.size == self.ranks_per_node and nbytes >= LEAST_SHARED

    def gather_in_place_seconds(self, partition_bytes: float) -> float:
        """Seconds in which each rank copies its partition once, for all."""
        return 2 * partition_bytes / self.machine.memory_bandwidth + self.machine.link_latency

    def reduce_in_place_seconds(self, partition_bytes: float) -> float:
        """Seconds in which each rank reads its partition of all buffers and writes the sum."""
        moved = (self.size + 1) * partition_bytes
        return moved / self.machine.memory_bandwidth + self.machine.link_latency

    def all_reduce_seconds(self, nbytes: float, *, ring: bool = True) -> float:
        """Seconds of a sum of tensors of ``nbytes``: slices are reduced, then gathered."""
        return 2 * self.seconds(nbytes / self.size, ring=ring)

    def part(self, num_sharing: int) -> Network:
        """A part of consecutive ranks that share a block."""
        return replace(self, size=num_sharing)

    def of(self, buffer: FlatBuffer, policy: TrainingPolicy) -> Network:
        """The ranks that hold a buffer together: of experts, the other ones of all expert-parallel groups."""
        if not buffer.is_of_experts:
            return self
        return replace(self, size=self.size * policy.tp_size // policy.ep_size, stride=policy.ep_size)

    def of_all_stages(self, policy: TrainingPolicy) -> Network:
        """The ranks that share parameters outside blocks: of these of all stages."""
        return replace(self, size=self.size * policy.pipe_size)

    def sharing(self, buffer: FlatBuffer, policy: TrainingPolicy) -> Network:
        """The ranks, of these, that share a block's buffer."""
        own = self.of(buffer, policy)
        return own.part(policy.block_policy().num_sharing(own.size))

    def replicas(self, num_sharing: int) -> Network:
        """The ranks that hold the same shard if ``num_sharing`` ranks share a block."""
        return replace(self, size=self.size // num_sharing, stride=self.stride * num_sharing)


@dataclass
class Transfer:
    """One collective in flight.

    Args:
        name: its purpose.
        remaining: seconds of communication that it still needs.
        begin: when it was started.
        end: when it was over; None before.
        after: what must be over before it.
    """

    name: str
    remaining: float
    begin: float
    end: float | None = None
    after: Transfer | None = None

    @property
    def may_run(self) -> bool:
        return self.after is None or self.after.end is not None


#: Copies from the host to a device and back: directions of a bus of its own.
BUS = ("to the device", "to the host")


class Wire:
    """Collectives on a virtual clock: in order on each communicator, at equal shares between communicators, and copies
    in order on each direction of the bus."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy = 0.0
        self._queues: dict[str, list[Transfer]] = {}

    def start(self, communicator: str, name: str, seconds: float, after: Transfer | None = None) -> Transfer:
        """Posts a collective, or a copy, that would take ``seconds`` alone, ``after`` another one."""
        transfer = Transfer(name, seconds, self.now, after=after)
        self._queues.setdefault(communicator, []).append(transfer)
        return transfer

    def advance(self, seconds: float) -> None:
        """Advances the clock by ``seconds``."""
        self._run_until(self.now + seconds, None)

    def wait(self, transfer: Transfer) -> float:
        """Advances the clock to the end of ``transfer``; returns the seconds waited."""
        before = self.now
        if transfer.end is None:
            self._run_until(float("inf"), transfer)
        return self.now - before

    def drain(self) -> float:
        """Waits for everything in flight; returns the seconds waited."""
        return sum(self.wait(queue[-1]) for queue in list(self._queues.values()) if queue)

    def _run_until(self, until: float, awaited: Transfer | None) -> None:
        while self.now < until and (awaited is None or awaited.end is None):
            heads = {name: queue[0] for name, queue in self._queues.items() if queue and queue[0].may_run}
            if not heads:
                self.now = until
                return
            sharing = len(heads.keys() - BUS)
            shares = {name: 1 if name in BUS else sharing for name in heads}
            step = min(min(heads[name].remaining * shares[name] for name in heads), until - self.now)
            self.now += step
            self.busy += step if sharing else 0.0
            for name, head in heads.items():
                head.remaining -= step / shares[name]
                # A remainder of rounding counts as complete.
                if head.remaining <= 1e-12 * max(1.0, self.now):
                    self._queues[name].pop(0).end = self.now
