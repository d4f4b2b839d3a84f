"""One pass of a pipeline: the actions of a schedule, run on this rank's stage.

[Note: Messages of a pass]
The messages to a stage, and the order in which they are sent, follow from the schedule alone. Receives are posted in
this order, the next action's before the present one runs, so that a message travels while its receiver computes. A
message is preceded by a header with its shape where that cannot be known: the first of each number of rows in each
chunk. Its communicator is described in [Note: Channels of a pipeline].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

from .._C import DeferredProducts, Work
from .._ranks.context import Group
from .._ranks.messages import header_of
from .._shards.stage import channel, collect_batches, hand_out_batches, receive_header, share_shape
from ..global_var import context
from .engine import current_engine
from .held import hold, let_go
from .pipe_arguments import PipeArguments, on_rows
from .pipe_numbers import Numbers
from .pipe_schedule import Action, Actions, Kind, Message, message_of, messages_to, only


class Plan(NamedTuple):
    """The parts of a pipeline list that are the same in all passes.

    Attributes:
        pipe: the group with one rank of each stage.
        chunks: this stage's layers, by chunk.
        actions: of each stage.
        num_micros: number of micro-batches.
    """

    pipe: Group
    chunks: Sequence[Sequence[Any]]
    actions: Actions
    num_micros: int

    @property
    def blocks(self) -> list[Any]:
        """This stage's layers, in order."""
        return [block for blocks in self.chunks for block in blocks]


class Alive(NamedTuple):
    """A micro-batch between its forward and its backward in one chunk.

    Attributes:
        x: the chunk's input.
        inputs: of the chunk's layers, if the pass keeps them.
        out: the chunk's output, or what :meth:`Pass.result_of` made of it.
    """

    x: torch.Tensor
    inputs: list[torch.Tensor]
    out: torch.Tensor


class Pass:
    """The micro-batches of all stages' ranks on this rank's stage, moved by the actions of one :meth:`run` or several.

    A subclass gives the results of the last layer's outputs, and gradients from elsewhere than the next stage.
    Collective over the pipe group.

    Args:
        plan: of the pipeline list.
        hidden: this rank's batch.
        arguments: further arguments of all layers.
        keeps_inputs: whether to keep the inputs of all layers.
    """

    def __init__(
        self, plan: Plan, hidden: torch.Tensor, arguments: PipeArguments, *, keeps_inputs: bool = False
    ) -> None:
        whole = collect_batches(plan.pipe, hidden, target=0)
        if whole is None:
            whole = hidden.new_empty((len(hidden) * plan.pipe.size, 0))
        self._plan = plan
        self._arguments = arguments
        self._keeps_inputs = keeps_inputs
        self._pieces = dict(enumerate(whole.tensor_split(plan.num_micros)))
        self._rows = [len(piece) for piece in self._pieces.values()]
        self._device = hidden.device
        self._stage = plan.pipe.rank
        self._later: dict[tuple[int, int], DeferredProducts] = {}
        self.numbers = Numbers(plan.pipe, hidden.device)
        #: By chunk and micro-batch.
        self.alive: dict[tuple[int, int], Alive] = {}
        #: On the last stage: results of the micro-batches.
        self.results: list[torch.Tensor] = []
        #: On the first stage: gradients of the micro-batches of the first layer's input.
        self.gradients: list[torch.Tensor] = []

    def result_of(self, out: torch.Tensor, micro: int) -> torch.Tensor:
        """Returns the result of a micro-batch, on the last stage: the last layer's output."""
        return out

    def result_gradient(self, out: torch.Tensor, micro: int) -> torch.Tensor | None:
        """Returns the gradient of a result, or None: on the last stage that runs a backward."""
        raise NotImplementedError

    def further_roots(self, alive: Alive, micro: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns further roots of the backward of a micro-batch on any stage, and their gradients."""
        return [], []

    def run(self, actions: Actions, *, keep_graph: bool = False) -> None:
        """Runs this stage's actions; forwards are for a backward if gradients are enabled. Collective.

        Args:
            actions: of the stages: all of them, or for backwards alone the first ones.
            keep_graph: whether backwards can be run again.
        """
        do = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }
        self._num_stages, self._keep_graph = len(actions), keep_graph
        self._inbox = _Inbox(self._plan, actions, self._rows, self._device, self.alive, self._places)
        self._sending: list[tuple[Work, torch.Tensor]] = []
        self._headers: dict[tuple[int, int, int], tuple[Work, torch.Tensor]] = {}
        engine, own = current_engine(context()), actions[self._stage]
        for action, following in zip(own, [*own[1:], None], strict=True):
            self._inbox.post(action, following)
            with on_rows(engine, sum(self._rows[: action.micro]), self._rows[action.micro]):
                do[action.kind](action)
            while self._sending and self._sending[0][0].is_completed():
                wait_for_stage(self._sending.pop(0)[0])
        for work, _ in self._sending:
            wait_for_stage(work)
        for work, _ in self._headers.values():
            work.wait()
        del self._sending, self._headers, self._inbox  # the latter refers to this pass

    def own_part(self, whole: torch.Tensor | None, source: int) -> torch.Tensor:
        """Returns this rank's batch of a tensor that stage ``source`` has of all batches. Collective."""
        pipe, device = self._plan.pipe, self._device
        shape, dtype = share_shape(pipe, whole, source, device)
        own = torch.empty(shape[0] // pipe.size, *shape[1:], dtype=dtype, device=device)
        return hand_out_batches(pipe, whole, source, own)

    def own_result(self) -> torch.Tensor:
        """Returns this rank's batch of the results, and drops all results. Collective."""
        whole = torch.cat(self.results) if self.results else None
        self.results = []
        return self.own_part(whole, self._plan.pipe.size - 1)

    def run_plan(self, *, trains: bool) -> None:
        """Runs all actions of the plan, or the forwards alone. Collective."""
        engine, states = current_engine(context()), [block._runtime for block in self._plan.blocks]
        for state in states:
            hold(engine, state)
            if trains:  # else as an earlier loss has left it
                state.defers = not engine.virtual.is_open
        try:
            with torch.set_grad_enabled(trains), self.numbers.of_pass():
                self.run(self._plan.actions if trains else only(Kind.FORWARD, self._plan.actions))
        finally:
            for state in states:
                let_go(engine, state)

    def _forward(self, action: Action) -> None:
        _, micro, chunk = action
        is_first, is_last = self._ends(chunk)
        x = self._pieces.pop(micro) if is_first else self._inbox.take(action)
        x = x.detach().requires_grad_(torch.is_grad_enabled())
        args, kwargs = self._arguments.of_micro(micro)
        out, inputs = x, []
        with self.numbers.of_micro(micro):
            for block in self._plan.chunks[chunk]:
                if self._keeps_inputs:
                    inputs.append(out)
                out = _hidden_state(block(out, *args, **kwargs), block._label)
            if is_last:
                out = self.result_of(out, micro)
        if is_last:
            self.results.append(out.detach())
        else:
            self._send(action, out.detach().contiguous(), self.numbers.to_send(micro))
        if torch.is_grad_enabled() or self._keeps_inputs:
            self.alive[chunk, micro] = Alive(x, inputs, out)

    def _backward(self, action: Action) -> None:
        _, micro, chunk = action
        is_first, is_last = self._ends(chunk)
        alive = self.alive[chunk, micro]
        if not self._keep_graph:
            del self.alive[chunk, micro]
        gradient = self.result_gradient(alive.out, micro) if is_last else self._inbox.take(action)
        roots, gradients = ([], []) if gradient is None else ([alive.out], [gradient])
        engine = current_engine(context())
        with engine.virtual.of_micro(engine.gradients, micro):
            for more, of_more in (self.further_roots(alive, micro), self._arguments.roots(micro)):
                roots += more
                gradients += of_more
            torch.autograd.backward(roots, gradients, retain_graph=self._keep_graph)
        sums = self._arguments.to_send(micro)
        own = torch.zeros_like(alive.x) if alive.x.grad is None else alive.x.grad.contiguous()
        if is_first:
            self.gradients.append(own)
        else:
            self._send(action, own, sums)

    def _backward_input(self, action: Action) -> None:
        engine = current_engine(context())
        if engine.virtual.is_open:  # its gradients are sent before those of the next micro-batch are made
            self._backward(action)
            return
        engine.later = self._later[action.chunk, action.micro] = DeferredProducts()
        try:
            self._backward(action)
        finally:
            engine.later = None

    def _backward_weight(self, action: Action) -> None:
        later = self._later.pop((action.chunk, action.micro), None)
        if later is not None:
            later.run()

    def _ends(self, chunk: int) -> tuple[bool, bool]:
        """Whether a chunk of this stage is the first of all, and the last."""
        place = chunk * self._num_stages + self._stage
        return place == 0, place == self._num_stages * len(self._plan.chunks) - 1

    def _places(self, action: Action) -> list[torch.Tensor]:
        """Returns memory for what comes behind the message to an action."""
        source = self.numbers if action.kind is Kind.FORWARD else self._arguments
        return source.to_receive(action.micro)

    def _send(self, action: Action, tensor: torch.Tensor, further: list[torch.Tensor]) -> None:
        message = message_of(action, self._stage, self._num_stages, len(self._plan.chunks))
        assert message is not None
        comm = channel(self._plan.pipe, self._stage)
        if action.kind is Kind.FORWARD:
            shape = message.receiver, message.action.chunk, self._rows[action.micro]
            if shape not in self._headers:
                header = header_of(tensor, tensor.device)
                self._headers[shape] = comm.send(header, message.receiver, "pipe.shape"), header
        label = "pipe.forward" if action.kind is Kind.FORWARD else "pipe.backward"
        for part in (tensor, *further):
            self._sending.append((comm.send(part, message.receiver, label), part))


class _Inbox:
    """Messages to this stage. See [Note: Messages of a pass]."""

    def __init__(
        self,
        plan: Plan,
        actions: Actions,
        rows: Sequence[int],
        device: torch.device,
        alive: Mapping[tuple[int, int], Alive],
        further: Callable[[Action], list[torch.Tensor]],
    ) -> None:
        self._pipe = plan.pipe
        self._alive = alive
        self._further = further
        self._rows = rows
        self._device = device
        self._coming = deque(messages_to(plan.pipe.rank, actions, len(plan.chunks)))
        self._awaited = {message.action for message in self._coming}
        self._posted: dict[Action, tuple[list[Work], torch.Tensor]] = {}
        self._shapes: dict[tuple[int, int], tuple[torch.Size, torch.dtype]] = {}  # by chunk and rows

    def post(self, action: Action, following: Action | None) -> None:
        """Posts the receives of an action and, as far as their shapes are known, of the one after it."""
        while action in self._awaited:
            self._post_first(waits=True)
        while following in self._awaited and self._post_first(waits=False):
            pass

    def _post_first(self, *, waits: bool) -> bool:
        message = self._coming[0]
        like = self._like(message, waits)
        if like is None:
            return False
        self._coming.popleft()
        self._awaited.remove(message.action)
        tensor = torch.empty(like[0], dtype=like[1], device=self._device)
        label = "pipe.forward" if message.action.kind is Kind.FORWARD else "pipe.backward"
        comm = channel(self._pipe, message.sender)
        parts = [tensor, *self._further(message.action)]
        works = [comm.recv(part, message.sender, label) for part in parts]
        self._posted[message.action] = works, tensor
        return True

    def _like(self, message: Message, waits: bool) -> tuple[torch.Size, torch.dtype] | None:
        """Returns the shape and dtype of a message; None if they are not known and ``waits`` is False."""
        kind, micro, chunk = message.action
        if kind is not Kind.FORWARD:
            alive = self._alive.get((chunk, micro))
            return None if alive is None else (alive.out.shape, alive.out.dtype)
        known = self._shapes.get((chunk, self._rows[micro]))
        if known is None and waits:
            known = receive_header(self._pipe, message.sender, self._device)
            self._shapes[chunk, self._rows[micro]] = known
        return known

    def take(self, action: Action) -> torch.Tensor:
        """Waits for the message to an action."""
        works, tensor = self._posted.pop(action)
        for work in works:
            wait_for_stage(work)
        return tensor


def wait_for_stage(work: Work) -> None:
    """Waits for another stage, as seen by the timeline."""
    with current_engine(context()).waiting("pipeline", "stage"):
        work.wait()


class _Pipeline(torch.autograd.Function):
    """Autograd node of a call in the outer graph."""

    @staticmethod
    def forward(ctx: Any, call: Any, *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            results = call.forward()
        ctx.mark_non_differentiable(*call.untrained)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if not Variable._execution_engine.is_checkpoint_valid():
            raise RuntimeError(
                "torch.autograd.grad() and backward(inputs=...) cannot be used through a pipeline, which reduces the "
                "gradients of its parameters on the way; use backward(), which leaves an input's gradient in .grad"
            )
        return None, *ctx.call.backward(*gradients)


def run_as_node(call: Any, hidden: torch.Tensor, *further: torch.Tensor) -> Any:
    """Returns ``call.forward()``, as results of one node of the caller's graph if gradients are enabled.

    Args:
        call: its ``backward`` returns the gradients of ``hidden`` and ``further``; results in ``untrained`` have none.
        hidden: this rank's batch.
        further: other inputs that require grad.
    """
    if not torch.is_grad_enabled():
        return call.forward()
    if not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()  # parameters may be trained: backward must reach the node
    return _Pipeline.apply(call, hidden, *further)


def _hidden_state(result: Any, name: str) -> torch.Tensor:
    """Returns the hidden state in the result of layer ``name``, which a pipeline passes on."""
    found = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"{name}: expected its forward to return the hidden state, or a tuple that begins with it, as a pipeline "
            f"passes one tensor on, got {'a tuple of ' if found is not result else ''}{type(found).__name__}"
        )
    return found
