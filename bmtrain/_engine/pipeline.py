"""A call of a pipeline of stages: all micro-batches forward, later all backward.

[Note: A pipeline call is an island]
Like a block call, a pipeline call is one node of the outer graph. Its forward runs the forwards of a pass: the batches
of a pipe group, cut into micro-batches, of each of which a stage records a graph of its own (its blocks keep only their
inputs). Its backward runs the backwards. A stage's blocks are gathered once for all micro-batches, and their gradients
are reduced once.

In a loop over virtual shards each micro-batch is the shard of one rank, and its gradients are reduced after its
backward: leaves of the tree in the order of the shards, as ranks of one stage have adjacent ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._ranks.agree import largest
from .._shards.stage import collect_batches, hand_out_batches
from ..global_var import context
from .engine import current_engine
from .held import all_or_none, hold, let_go
from .pipe_arguments import PipeArguments
from .pipe_pass import Alive, Pass, Plan, run_as_node
from .pipe_recording import StageRecordings
from .pipe_schedule import Action, Kind, actions_of, only
from .run_state import active_recorder


class PipelineCall(Pass):
    """One forward of this rank's stage, with the state that its backward needs.

    Args:
        plan: of the pipeline list, of one chunk on each stage.
        layer_counts: number of layers of every stage.
        hidden: this rank's batch.
        arguments: further arguments of all layers.
        returns_states: whether the inputs of all layers are results as well.
    """

    def __init__(
        self,
        plan: Plan,
        layer_counts: Sequence[int],
        hidden: torch.Tensor,
        arguments: PipeArguments,
        returns_states: bool,
    ) -> None:
        super().__init__(plan, hidden, arguments, keeps_inputs=returns_states)
        self.layer_counts = layer_counts
        self.returns_states = returns_states
        self.pipe = pipe = plan.pipe
        self.is_spent = False
        self.untrained: list[torch.Tensor] = []
        self._like = hidden.new_empty(hidden.shape, device="meta")
        self._actions = actions_of("gpipe", pipe.size, plan.num_micros)
        self._engine = current_engine(context())
        recorder = active_recorder.get()
        self.recordings = None if recorder is None else StageRecordings(pipe, recorder)

    # ---- forward

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Runs all micro-batches; returns this rank's batch of the output (and of the layers' inputs)."""
        for block in self._plan.blocks:
            hold(self._engine, block._runtime)
        try:
            with self.numbers.of_pass():
                self.run(only(Kind.FORWARD, self._actions))
        finally:
            if not torch.is_grad_enabled():
                self._release_blocks()
        results = [self.own_result()]
        if self.returns_states:
            results.append(self._layer_inputs())
        if self.recordings is not None:
            recorded = self.recordings.hand_out(self.own_part)
            specs = zip(recorded, self.recordings.specs, strict=True)
            self.untrained = [result for result, spec in specs if not spec.requires_grad]
            results += recorded
        self._results_like = [torch.empty_like(result, device="meta") for result in results]
        return tuple(results)

    def _forward(self, action: Action) -> None:
        if self.recordings is None:
            super()._forward(action)
            return
        self.recordings.begin_micro()
        token = active_recorder.set(self.recordings)
        try:
            super()._forward(action)
        finally:
            active_recorder.reset(token)

    def _layer_inputs(self) -> torch.Tensor:
        """Returns this rank's batch of the inputs of all layers: ``(num_layers, batch, ...)``."""
        return torch.stack(
            [
                self.own_part(self._whole_input(layer) if stage == self.pipe.rank else None, stage)
                for stage, count in enumerate(self.layer_counts)
                for layer in range(count)
            ]
        )

    def _whole_input(self, layer: int) -> torch.Tensor:
        """Concatenates the input of a layer of this stage over all micro-batches."""
        return torch.cat([alive.inputs[layer].detach() for alive in self.alive.values()])

    # ---- backward

    def backward(self, *gradients: torch.Tensor | None) -> list[torch.Tensor]:
        """Runs all micro-batches backward, on the stages that a gradient reaches.

        Args:
            gradients: gradients of the results, in their order; None where this rank's loss does not depend on one.

        Returns:
            The gradients of this rank's batch of inputs, and of the arguments that require grad.
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
        self._result_gradients = None if whole is None else whole.chunk(self._plan.num_micros)
        # The last stage that receives a gradient from outside.
        reached = -1 if grad_out is None else pipe.size - 1
        self._input_gradients: list[tuple[torch.Tensor, ...]] = []
        if self.returns_states and others[0] is not None:
            self._input_gradients, reached = self._collect_input_gradients(others[0]), pipe.size - 1
        if self.recordings is not None:
            reached = max(reached, self.recordings.take_gradients(others[self.num_results - 1 :]))
        if pipe.rank <= reached:
            self._run_backward(reached, keep_graph)
        whole = None
        if pipe.rank == 0:
            whole = torch.cat(self.gradients or [torch.zeros_like(alive.x) for alive in self.alive.values()])
            self.gradients = []
        if self.recordings is not None:
            self.recordings.hand_over_gradients(self.own_part)
        for alive in self.alive.values():
            alive.x.grad = None
        if not keep_graph:
            self.is_spent = True
            self.alive.clear()
            self.recordings = None
            self._release_blocks()
        own = hand_out_batches(pipe, whole, 0, torch.empty_like(self._like, device=self._device))
        return [own, *(argument.gradient() for _, argument in self._arguments.trained)]

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
        return torch.zeros_like(self._results_like[index], device=self._device)

    def _run_backward(self, reached: int, keep_graph: bool) -> None:
        """This stage's share of a backward."""
        states = [block._runtime for block in self._plan.blocks]
        with all_or_none(states):
            for state in states:
                state.defers = not self._engine.virtual.is_open
            self.run(only(Kind.BACKWARD, self._actions)[: reached + 1], keep_graph=keep_graph)
            for state in reversed(states):
                self._engine.gradients.send_deferred(state)
        self._result_gradients, self._input_gradients = None, []

    def result_gradient(self, out: torch.Tensor, micro: int) -> torch.Tensor | None:
        return None if self._result_gradients is None else self._result_gradients[micro]

    def further_roots(self, alive: Alive, micro: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        roots = alive.inputs if self._input_gradients else []
        gradients = [of_layer[micro] for of_layer in self._input_gradients]
        if self.recordings is None:
            return roots, gradients
        recorded, of_recorded = self.recordings.roots(micro)
        return roots + recorded, gradients + of_recorded

    def _collect_input_gradients(self, grad_inputs: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Returns, by layer of this stage and micro-batch, the gradients of layers' inputs as results of the call."""
        own = []
        number = 0
        for stage, count in enumerate(self.layer_counts):
            for _ in range(count):
                whole = collect_batches(self.pipe, grad_inputs[number], target=stage)
                number += 1
                if whole is not None:
                    own.append(whole.chunk(self._plan.num_micros))
        return own

    @property
    def num_results(self) -> int:
        """Number of results for the caller; recorded tensors follow them."""
        return 2 if self.returns_states else 1

    def give_out(self, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Delivers the recorded tensors to the recorder; returns the caller's results."""
        if self.recordings is not None:
            self.recordings.deliver(results[self.num_results :], self._engine)
            self.untrained = []
        return results[: self.num_results]

    def _release_blocks(self) -> None:
        for block in self._plan.blocks:
            let_go(self._engine, block._runtime)


def run_pipeline(
    call: PipelineCall, hidden: torch.Tensor, arguments: PipeArguments
) -> tuple[torch.Tensor, ...]:
    """Runs ``call``, as one node of the caller's graph if gradients are enabled."""
    return call.give_out(run_as_node(call, hidden, *(source for source, _ in arguments.trained)))
