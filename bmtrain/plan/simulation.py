"""A training step on a virtual clock, run by the runtime's own schedule.

[Note: Simulation by the runtime]
Order of gathers, prefetches, parameters that stay for the backward, waits for reductions, and buffers that exist at
once: none of this is modelled here. `Engine`, `Schedule` and `Gradients` of ``bmtrain/_engine`` decide it, as they do
in a run; they are given `SimulatedShards` in place of the core's `ShardedBuffer`, which advance a virtual clock and
count bytes where the core moves bytes. This file adds the order inside one block call (`_forward` and `_backward`,
after ``_engine/call.py``) and the work outside blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._engine.block_state import BlockState
from .._engine.engine import Engine
from .._engine.gradients import Gradients
from .._engine.held import hold, let_go
from .._engine.phase import Phase
from .._engine.policy import Recompute
from .._shards.sharding import slot_length
from .model import BlockDescription, ModelDescription, OutsideParameter, OutsideReads
from .network import Network, Wire
from .policy import TrainingPolicy
from .simulated_shards import CommonBuffers, MemoryMeter, SimulatedEvent, SimulatedShards, Simulation

__all__ = ["Rates", "SimulatedStep", "StepResult"]


class _SimulatedGradients(Gradients):
    """Gradients of a process without autograd: the end of a backward is reported by the simulation."""

    def call_at_end_of_backward(self) -> None:
        """Does nothing: `SimulatedStep` finishes the reductions."""


class Rates(NamedTuple):
    """Speed of one device: floating-point operations and bytes of its memory, per second."""

    flops: float
    bytes: float


class StepResult(NamedTuple):
    """One simulated forward and backward, after the order of blocks has been learnt.

    Times are in seconds, ``forward`` up to the backward of the head; ``traffic`` as `Communicator.traffic`.
    """

    seconds: float
    forward: float
    computing: float
    waiting: float
    wire_busy: float
    traffic: dict[str, tuple[int, int]]
    events: list[SimulatedEvent]
    waiting_for_bus: float
    memory: MemoryMeter
    common: CommonBuffers


class SimulatedStep:
    """A model's forward and backward on one rank.

    Args:
        model: this rank's part of the model, per sample.
        policy: the training policy.
        samples: of this rank in one pass.
        network: the ranks that share the parameters.
        rates: the speed of the device.
        tp: the tensor-parallel ranks, if there are any.
        sp: the ranks that divide a sequence, if there are any.
        ep: the ranks that hold experts together, if there are any.
        fixed: bytes that are allocated all the time, by purpose.
        ring_gather: gathers go around a ring.
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
        sp: Network | None = None,
        ep: Network | None = None,
        fixed: dict[str, float] | None = None,
        ring_gather: bool = True,
        overlaps: bool = True,
        early_stop: bool = True,
    ) -> None:
        self.model, self.policy, self.samples = model, policy, samples
        # In a pipeline, and in vertical order, the samples pass in micro-batches.
        self.kept_samples, self.samples_at_once = samples * policy.held_share, samples / policy.micros
        # In vertical order losses, and the gradients between two blocks, are there for all of them.
        self.joined_samples = samples if policy.vertical else self.samples_at_once
        self.rates, self.tp, self.sp, self.ep = rates, tp, sp, ep
        self.overlaps, self.early_stop = overlaps, early_stop
        # In another dtype they are computed beside it.
        self.writes_products_in_place = network.machine.shares_memory and policy.compute_dtype is None
        self.simulation = Simulation(Wire(), network, MemoryMeter(fixed or {}), ring_gather)
        self.outside = network.of_all_stages(policy)
        self.engine = Engine(torch.device("cpu"))
        self.engine.gradients = _SimulatedGradients(self.engine)
        self.blocks: list[BlockState] = []
        chosen = policy.block_policy()
        for number, block in enumerate(model.blocks):
            label, on_host = f"block {number}", policy.is_apart(number) and not network.machine.shares_memory
            shards: Any = [
                SimulatedShards(self.simulation, label, buffer, chosen, network.of(buffer, policy), on_host)
                for buffer in block.buffers
            ]
            self.blocks.append(BlockState(self.engine, label, shards, chosen))

    def run(self) -> StepResult:
        """Three passes, of which the last one counts: the first two teach the schedule."""
        simulation = self.simulation
        for _ in range(3):
            begin, busy = simulation.wire.now, simulation.wire.busy
            simulation.computing = simulation.waiting = simulation.waiting_for_bus = 0.0
            simulation.events.clear()
            simulation.traffic.clear()
            middle = self._pass()
        return StepResult(
            simulation.wire.now - begin,
            middle - begin,
            simulation.computing,
            simulation.waiting,
            simulation.wire.busy - busy,
            dict(simulation.traffic),
            list(simulation.events),
            simulation.waiting_for_bus,
            simulation.memory,
            simulation.common,
        )

    def _pass(self) -> float:
        """Returns the time of the middle, between the head's forward and backward."""
        model, memory = self.model, self.simulation.memory
        outside = OutsideReads(model.outside)
        self._gather_outside(outside.before_blocks)
        is_staged = self.policy.pipe_size > 1
        if is_staged:  # its blocks stay gathered for all micro-batches
            for state in self.blocks:
                hold(self.engine, state)
        for state, block in zip(self.blocks, model.blocks, strict=True):
            self._forward(state, block)
        if is_staged:  # from the second backward on full gradients of all blocks are there
            for state in self.blocks:
                state.defers = True
                self._begin_gradients(state)
        self._gather_outside(outside.after_blocks)
        memory.add("activations", model.head_bytes * self.joined_samples)
        self._compute("head", model.head_flops, model.head_bytes)
        middle = self.simulation.wire.now
        self._compute("head", 2 * model.head_flops, model.head_bytes)
        memory.add("activations", -model.head_bytes * self.joined_samples)
        self._reduce_outside(outside.after_blocks)
        for state, block in zip(reversed(self.blocks), reversed(model.blocks), strict=True):
            self._backward(state, block)
        if is_staged:
            self._end_stage()
        self._reduce_outside(outside.before_blocks)
        self.engine.gradients.close_round()
        self.engine.gradients.finish()
        memory.add("outside blocks", -memory.now.get("outside blocks", 0.0))  # autograd lets go of the last
        return middle

    def _end_stage(self) -> None:
        """Sends the gradients. Counts hidden states sent to the next stage, their gradients sent back, and the
        rank's own rows. Their time is part of the stages' waits."""
        for state in self.blocks:
            let_go(self.engine, state)
        for state in reversed(self.blocks):
            self.engine.gradients.send_deferred(state)
        policy, nbytes = self.policy, self.model.blocks[0].input_bytes
        for _ in range(policy.micros * (2 * policy.chunks - (policy.pipe_size == 2))):
            self.simulation.count("send of hidden states", round(nbytes * self.samples_at_once))
        self.simulation.count("send of hidden states", round(nbytes * self.samples / policy.pipe_size))

    def _forward(self, state: BlockState, block: BlockDescription) -> None:
        memory = self.simulation.memory
        self.engine.open(state, Phase.FORWARD)
        self._wait_for_all()
        # While the block runs, its saved tensors exist only if they are kept.
        memory.add("activations", self._kept(block) * self.kept_samples)
        self._compute(state.label, block.flops, 2 * block.activation_bytes)
        self._exchange(block)
        self.engine.close(state, keep=self.engine.keeps_for_backward(state))

    def _backward(self, state: BlockState, block: BlockDescription) -> None:
        memory = self.simulation.memory
        self.engine.open(state, Phase.BACKWARD)
        self._wait_for_all()
        again = max(block.activation_bytes - self._kept(block), 0.0) * self.samples_at_once
        memory.add("activations", again)
        if self.policy.recomputes:
            self._compute(state.label, self._flops_again(block), 2 * block.activation_bytes)
            self._exchange(block)
        if not state.defers:
            self._begin_gradients(state)
        passing = block.gradient_bytes * self.samples_at_once + block.input_bytes * self.joined_samples
        if not (self.writes_products_in_place and block.has_products_only):
            passing += block.largest_parameter_gradient
        memory.add("activations", passing)
        self._compute(state.label, 2 * block.flops, 3 * block.activation_bytes)
        memory.add("activations", -passing)
        self._exchange(block, is_forward=False)
        memory.add("activations", -again - self._kept(block) * self.kept_samples)
        self.engine.close(state, keep=self.engine.schedule.expects_backward_of(state))
        self.engine.gradients.send(state, _trained(state))
        self._wait_for_all()

    def _begin_gradients(self, state: BlockState) -> None:
        self.engine.gradients.begin(state, {buffer: [True] for buffer in _trained(state)})

    def _kept(self, block: BlockDescription) -> float:
        if self.policy.recompute is Recompute.SELECTIVE:
            return min(block.input_bytes + block.kept_bytes, block.activation_bytes)
        return block.input_bytes if self.policy.recomputes else block.activation_bytes

    def _flops_again(self, block: BlockDescription) -> float:
        if self.policy.recompute is Recompute.SELECTIVE:
            return block.flops_between_kept
        return block.flops - (block.last_matmul_flops if self.early_stop else 0.0)

    def _wait_for_all(self) -> None:
        if not self.overlaps:
            self.simulation.waiting += self.simulation.wire.drain()

    def _compute(self, label: str, flops: float, moved_bytes: float) -> None:
        seconds = self.samples * (flops / self.rates.flops + moved_bytes / self.rates.bytes)
        self.simulation.compute(label, seconds)

    def _exchange(self, block: BlockDescription, *, is_forward: bool = True) -> None:
        """Sums over the tensor-parallel ranks, attention of sequence ranks, and tokens of experts; nothing else can
        continue meanwhile."""
        if self.sp is not None:
            for nbytes in block.attention_bytes:
                part = nbytes * self.samples_at_once / self.sp.size
                self._exchange_parts(self.sp, "all_to_all of sequences", part)
        if self.ep is not None:
            for number, nbytes in block.mixtures:
                if is_forward:  # the number of tokens of each expert
                    self._exchange_parts(self.ep, "all_gather of experts", 8 * number)
                for _ in range(2):  # there and back
                    part = nbytes * self.samples_at_once / self.ep.size
                    self._exchange_parts(self.ep, "all_to_all of experts", part)
        if self.tp is not None and block.tp_exchange_bytes:
            # Two sums in a pass, after the attention and after the feed-forward layer; in forward in two messages each.
            self._wait(2 * self.tp.all_reduce_seconds(block.tp_exchange_bytes / 2 * self.samples))
            sent = 2 * (self.tp.size - 1) / self.tp.size * block.tp_exchange_bytes * self.samples
            messages = self.policy.micros * (4 if is_forward else 2)
            for _ in range(messages):
                self.simulation.count("all_reduce of layers", round(sent / messages))

    def _exchange_parts(self, network: Network, operation: str, nbytes: float) -> None:
        """Sends ``nbytes`` to each rank, for each micro-batch."""
        for _ in range(self.policy.micros):
            self.simulation.count(operation, round((network.size - 1) * nbytes))
            self._wait(network.seconds(nbytes, ring=False))

    def _wait(self, seconds: float) -> None:
        self.simulation.waiting += seconds
        self.simulation.wire.advance(seconds)

    def _gather_outside(self, messages: Sequence[Sequence[OutsideParameter]]) -> None:
        self._outside("gather", "all_gather", messages, self.simulation.ring_gather)

    def _reduce_outside(self, messages: Sequence[Sequence[OutsideParameter]]) -> None:
        trained = [[param for param in together if param.trains] for together in messages]
        self._outside("reduce", "reduce_scatter", [together for together in trained if together], ring=True)

    def _outside(
        self, kind: str, operation: str, messages: Sequence[Sequence[OutsideParameter]], ring: bool
    ) -> None:
        """Waits for each message; autograd holds the gathered parameters (no wait with one message)."""
        simulation, network = self.simulation, self.outside
        sign = 1 if kind == "gather" else -1
        for together in messages:
            width = together[0].element_size
            nbytes = width * slot_length(sum(p.partition(network.size) for p in together), width)
            simulation.memory.add("outside blocks", sign * network.size * nbytes)
            if network.size > 1:
                simulation.count(operation, (network.size - 1) * nbytes)
                seconds = network.seconds(nbytes, ring=ring)
                simulation.wait(kind, simulation.wire.start(kind, "outside", seconds))


def _trained(state: BlockState) -> list[Any]:
    return [buffer for buffer in state.buffers if buffer.trains]  # type: ignore[attr-defined]
