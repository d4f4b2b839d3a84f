"""A call of a pipeline of stages: all micro-batches forward, later all backward.

[Note: A pipeline call is an island]
Like a block call, a pipeline call is one node of the outer graph. Forward collects the batches of a pipe group, cuts
them into micro-batches and passes these from stage to stage; each stage records a graph of its own for each micro-batch
(its blocks keep only their inputs). Backward passes gradients the other way. A stage's blocks are gathered once for all
micro-batches, and their gradients are reduced once. All receives are posted before the first micro-batch is computed,
and sends are waited for after the last: while one is computed, its neighbours are under way (see [Note: Channels of a
pipeline]).

In a loop over virtual shards each micro-batch is the shard of one rank, and its gradients are reduced after its
backward: leaves of the tree in the order of the shards, as ranks of one stage have adjacent ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from .._C import Work
from .._ranks.agree import largest
from .._shards.stage import (
    channel,
    collect_batches,
    hand_out_batches,
    receive_header,
    send_header,
    share_shape,
)
from ..global_var import context
from .engine import current_engine
from .held import hold, let_go
from .pipe_arguments import PipeArguments, on_rows
from .pipe_numbers import Numbers
from .pipe_pass import wait_for_stage
from .pipe_recording import StageRecordings
from .run_state import active_recorder

if TYPE_CHECKING:
    from .._ranks.context import Group


class PipelineCall:
    """One forward of this rank's stage, with the state that its backward needs.

    Args:
        blocks: the layers of this stage, in order.
        layer_counts: number of layers of every stage.
        pipe: the group with one rank of each stage.
        num_micros: number of micro-batches that the collected batch is split into.
        returns_states: whether the inputs of all layers are results as well.
    """

    def __init__(
        self,
        blocks: Sequence[Any],
        layer_counts: Sequence[int],
        pipe: Group,
        num_micros: int,
        returns_states: bool,
    ) -> None:
        self.blocks = blocks
        self.layer_counts = layer_counts
        self.pipe = pipe
        self.num_micros = num_micros
        self.returns_states = returns_states
        self.is_first = pipe.rank == 0
        self.is_last = pipe.rank == pipe.size - 1
        # Per micro-batch: each layer's input, then the stage's output.
        self.states: list[list[torch.Tensor]] = []
        self.is_spent = False
        self._engine = current_engine(context())
        recorder = active_recorder.get()
        self.recordings = None if recorder is None else StageRecordings(pipe, recorder)

    # ---- forward

    def forward(self, hidden: torch.Tensor, arguments: PipeArguments) -> tuple[torch.Tensor, ...]:
        """Runs all micro-batches; returns this rank's batch of the output (and of the layers' inputs)."""
        self.hidden_shape, self.hidden_dtype, self.device = hidden.shape, hidden.dtype, hidden.device
        self._arguments = arguments
        for block in self.blocks:
            hold(self._engine, block._runtime)
        try:
            numbers = Numbers(self.pipe, hidden.device)
            with numbers.of_pass():
                self._run_micros(hidden, arguments, numbers)
        finally:
            if not torch.is_grad_enabled():
                self._release_blocks()
        results = [self._own_part(self._merged(-1) if self.is_last else None, self.pipe.size - 1)]
        if self.returns_states:
            results.append(self._layer_inputs())
        if self.recordings is not None:
            results += self.recordings.hand_out(self._own_part)
        self._results_like = [torch.empty_like(result, device="meta") for result in results]
        return tuple(results)

    def _run_micros(self, hidden: torch.Tensor, arguments: PipeArguments, numbers: Numbers) -> None:
        pipe, sending = self.pipe, []
        whole = collect_batches(pipe, hidden, target=0)
        if whole is not None:
            incoming = _Incoming(list(whole.chunk(self.num_micros)), [])
        else:
            incoming = _Incoming.posted(pipe, pipe.rank - 1, self.num_micros, self.device, numbers)
        for index in range(self.num_micros):
            x = incoming.take(index).detach().requires_grad_(torch.is_grad_enabled())
            rows = on_rows(self._engine, index * len(x), len(x))
            with self._recording_micro(), rows, numbers.of_micro(index):
                states = self._run_stage(x, *arguments.of_micro(index))
            self.states.append(states)
            if not self.is_last:
                out = states[-1].detach().contiguous()
                if index == 0:
                    send_header(pipe, out, pipe.rank + 1)
                for tensor in (out, *numbers.to_send(index)):
                    work = channel(pipe, pipe.rank).send(tensor, pipe.rank + 1, "pipe.forward")
                    sending.append((work, tensor))
        for work, _ in sending:
            wait_for_stage(work)

    @contextmanager
    def _recording_micro(self) -> Iterator[None]:
        if self.recordings is None:
            yield
            return
        self.recordings.begin_micro()
        token = active_recorder.set(self.recordings)
        try:
            yield
        finally:
            active_recorder.reset(token)

    def _run_stage(self, x: torch.Tensor, args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        states = [x]
        for block in self.blocks:
            result = block(states[-1], *args, **kwargs)
            states.append(result[0] if isinstance(result, tuple) else result)
        return states

    def _merged(self, index: int) -> torch.Tensor:
        """Concatenates one state of this stage over all micro-batches."""
        return torch.cat([states[index].detach() for states in self.states])

    def _own_part(self, whole: torch.Tensor | None, source: int) -> torch.Tensor:
        shape, dtype = share_shape(self.pipe, whole, source, self.device)
        own = torch.Size([shape[0] // self.pipe.size, *shape[1:]])
        return hand_out_batches(self.pipe, whole, source, own, dtype, self.device)

    def _layer_inputs(self) -> torch.Tensor:
        """Returns this rank's batch of the inputs of all layers: ``(num_layers, batch, ...)``."""
        return torch.stack(
            [
                self._own_part(self._merged(layer) if stage == self.pipe.rank else None, stage)
                for stage, count in enumerate(self.layer_counts)
                for layer in range(count)
            ]
        )

    # ---- backward

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Runs all micro-batches backward, on the stages that a gradient reaches.

        Args:
            gradients: gradients of the results, in their order; None where this rank's loss does not depend on one.

        Returns:
            The gradient of this rank's batch of inputs.
        """
        if self.is_spent:
            raise RuntimeError(
                "trying to backward through the pipeline a second time; specify retain_graph=True in the first "
                "backward()"
            )
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        pipe = self.pipe
        grad_out, *others = self._wanted_anywhere(gradients)
        # Messages between two ranks arrive in the order of their receives: receives of micro-batches are posted last.
        whole = None if grad_out is None else collect_batches(pipe, grad_out, target=pipe.size - 1)
        # The last stage that receives a gradient from outside.
        reached = -1 if grad_out is None else pipe.size - 1
        state_grads: list[tuple[torch.Tensor, ...]] = []
        if self.returns_states and others[0] is not None:
            state_grads, reached = self._collect_state_gradients(others[0]), pipe.size - 1
        if self.recordings is not None:
            reached = max(reached, self.recordings.take_gradients(others[self.num_results - 1 :]))
        if pipe.rank <= reached:
            self._backward_micros(self._incoming_gradients(whole, reached), state_grads, keep_graph)
        whole = torch.cat([_gradient_of(states[0]) for states in self.states]) if self.is_first else None
        if self.recordings is not None:
            self.recordings.hand_over_gradients(self._own_part)
        for states in self.states:
            states[0].grad = None
        if not keep_graph:
            self.is_spent = True
            self.states, self.recordings = [], None
            self._release_blocks()
        return hand_out_batches(pipe, whole, 0, self.hidden_shape, self.hidden_dtype, self.device)

    def _wanted_anywhere(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """``gradients``, with zeros where only other ranks of the pipe group have a gradient. Collective for several
        gradients."""
        if len(gradients) == 1:  # or this backward would not run
            return [gradients[0] if gradients[0] is not None else self._zeros_like_result(0)]
        seen = largest([gradient is not None for gradient in gradients], "pipe.backward", self.pipe.comm)
        return [
            self._zeros_like_result(index) if gradient is None and is_wanted else gradient
            for index, (gradient, is_wanted) in enumerate(zip(gradients, seen, strict=True))
        ]

    def _zeros_like_result(self, index: int) -> torch.Tensor:
        return torch.zeros_like(self._results_like[index], device=self.device)

    def _backward_micros(
        self, incoming: _Incoming | None, state_grads: Sequence[Sequence[torch.Tensor]], keep_graph: bool
    ) -> None:
        """This stage's share of a backward."""
        sending, comm = [], channel(self.pipe, self.pipe.rank)
        virtual = self._engine.virtual
        for block in self.blocks:
            block._runtime.defers = not virtual.is_open
        for index, states in enumerate(self.states):
            roots = states[: len(state_grads)]
            root_grads = [grad[index] for grad in state_grads]
            if incoming is not None:
                roots.append(states[-1])
                root_grads.append(incoming.take(index))
            if self.recordings is not None:
                recorded, recorded_grads = self.recordings.roots(index)
                roots += recorded
                root_grads += recorded_grads
            rows = on_rows(self._engine, index * len(states[0]), len(states[0]))
            further, further_grads = self._arguments.roots(index)
            roots += further
            root_grads += further_grads
            with rows, virtual.of_micro(self._engine.gradients, index):
                torch.autograd.backward(roots, root_grads, retain_graph=keep_graph)
            sums = self._arguments.to_send(index)
            for out in () if self.is_first else (_gradient_of(states[0]), *sums):
                sending.append((comm.send(out, self.pipe.rank - 1, "pipe.backward"), out))
        for work, _ in sending:
            wait_for_stage(work)
        for block in reversed(self.blocks):
            self._engine.gradients.send_deferred(block._runtime)

    def _incoming_gradients(self, whole: torch.Tensor | None, reached: int) -> _Incoming | None:
        """Returns the gradients of this stage's output: from outside, from the next stage, or none."""
        if whole is not None:
            return _Incoming(list(whole.chunk(self.num_micros)), [])
        if self.pipe.rank >= reached:
            return None
        tensors = [result.new_empty(result.shape) for *_, result in self.states]
        comm, peer = channel(self.pipe, self.pipe.rank + 1), self.pipe.rank + 1
        works = [
            [comm.recv(part, peer, "pipe.backward") for part in (tensor, *self._arguments.to_receive(index))]
            for index, tensor in enumerate(tensors)
        ]
        return _Incoming(tensors, works)

    def _collect_state_gradients(self, grad_states: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Returns, by layer of this stage and micro-batch, the gradients of layers' inputs as results of the call."""
        own = []
        number = 0
        for stage, count in enumerate(self.layer_counts):
            for _ in range(count):
                whole = collect_batches(self.pipe, grad_states[number], target=stage)
                number += 1
                if whole is not None:
                    own.append(whole.chunk(self.num_micros))
        return own

    @property
    def num_results(self) -> int:
        """Number of results for the caller; recorded tensors follow them."""
        return 2 if self.returns_states else 1

    def give_out(self, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Delivers the recorded tensors to the recorder; returns the caller's results."""
        if self.recordings is not None:
            self.recordings.deliver(results[self.num_results :], self._engine)
        return results[: self.num_results]

    def _release_blocks(self) -> None:
        for block in self.blocks:
            let_go(self._engine, block._runtime)


class _Incoming:
    """Tensors being received by this stage, one for each micro-batch."""

    def __init__(self, tensors: list[torch.Tensor], works: list[list[Work]]) -> None:
        self._tensors = tensors
        self._works = works

    @classmethod
    def posted(cls, pipe: Group, peer: int, count: int, device: torch.device, numbers: Numbers) -> _Incoming:
        shape, dtype = receive_header(pipe, peer, device)
        tensors = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
        comm = channel(pipe, peer)
        works = [
            [comm.recv(part, peer, "pipe.forward") for part in (tensor, *numbers.to_receive(index))]
            for index, tensor in enumerate(tensors)
        ]
        return cls(tensors, works)

    def take(self, index: int) -> torch.Tensor:
        for work in self._works[index] if self._works else ():
            wait_for_stage(work)
        return self._tensors[index]


class _Pipeline(torch.autograd.Function):
    """Autograd node of a pipeline call in the outer graph."""

    @staticmethod
    def forward(
        ctx: Any, call: PipelineCall, arguments: PipeArguments, hidden: torch.Tensor, *trained: Any
    ) -> Any:
        ctx.call, ctx.arguments = call, arguments
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            results = call.forward(hidden, arguments)
        if call.recordings is not None:
            recorded = zip(results[call.num_results :], call.recordings.specs, strict=True)
            ctx.mark_non_differentiable(*(result for result, spec in recorded if not spec.requires_grad))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        grad_hidden = ctx.call.backward(gradients)
        return None, None, grad_hidden, *(argument.gradient() for _, argument in ctx.arguments.trained)


def run_pipeline(
    call: PipelineCall, hidden: torch.Tensor, arguments: PipeArguments
) -> tuple[torch.Tensor, ...]:
    """Runs ``call``, as one node of the caller's graph if gradients are enabled."""
    if not torch.is_grad_enabled():
        return call.give_out(call.forward(hidden, arguments))
    if not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()  # parameters may be trained: backward must reach the node
    results: tuple[torch.Tensor, ...] = _Pipeline.apply(
        call, arguments, hidden, *(source for source, _ in arguments.trained)
    )
    return call.give_out(results)


def _gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
