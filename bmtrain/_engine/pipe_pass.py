"""One pass of a pipeline: the actions of a schedule, run on this rank's stage.

[Note: Messages of a pass]
The messages to a stage, and the order in which they are sent, follow from the schedule alone. Receives are posted in
this order, the next action's before the present one runs, so that a message travels while its receiver computes. A
message is preceded by a header with its shape where that cannot be known: the first of each number of rows in each
chunk. Its communicator is described in [Note: Channels of a pipeline].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._C import DeferredProducts, Work
from .._ranks.messages import header_of
from .._shards.stage import channel, receive_header
from ..global_var import context
from .engine import current_engine
from .pipe_arguments import PipeArguments, on_rows
from .pipe_numbers import Numbers
from .pipe_schedule import Action, Actions, Kind, Message, message_of, messages_to, without_backward

if TYPE_CHECKING:
    from .._ranks.context import Group


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


#: Computes the loss of a micro-batch from the last layer's output, on the last stage.
LossOf = Callable[[torch.Tensor, int], torch.Tensor]


class Pass:
    """One pass.

    Args:
        plan: of the pipeline list.
        pieces: the micro-batches of the first layer's input; elsewhere than on the first stage, of their sizes.
        arguments: further arguments of all layers.
        loss_of: gives the loss of a micro-batch; None: the outputs are the results.
        seeds: the gradients of the micro-batches' losses; None for a pass without backward.
    """

    def __init__(
        self,
        plan: Plan,
        pieces: Sequence[torch.Tensor],
        arguments: PipeArguments,
        loss_of: LossOf | None,
        seeds: Sequence[float] | None,
    ) -> None:
        self._plan = plan
        self._pieces = pieces
        self._arguments = arguments
        self._loss_of = loss_of
        self._seeds = seeds
        self._numbers = Numbers(plan.pipe, pieces[0].device)
        self._stage, self._num_stages = plan.pipe.rank, plan.pipe.size
        actions = plan.actions if seeds is not None else without_backward(plan.actions)
        self._actions = actions[self._stage]
        self._inbox = _Inbox(plan, actions, [len(piece) for piece in pieces], pieces[0].device, self._places)
        self._sending: list[tuple[Work, torch.Tensor]] = []
        self._has_shape: set[tuple[int, int, int]] = set()  # headers sent
        # Of the micro-batches under way: the input and the output (or loss) of a chunk.
        self._alive: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._later: dict[tuple[int, int], DeferredProducts] = {}
        #: On the last stage: losses, or outputs, of the micro-batches.
        self.results: list[torch.Tensor] = []
        #: On the first stage: gradients of the micro-batches of the first layer's input.
        self.gradients: list[torch.Tensor] = []

    def run(self) -> None:
        """Runs this stage's actions. Collective over the pipe group."""
        do = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }
        engine, rows = current_engine(context()), [len(piece) for piece in self._pieces]
        with torch.set_grad_enabled(self._seeds is not None), self._numbers.of_pass():
            for action, following in zip(self._actions, [*self._actions[1:], None], strict=True):
                self._inbox.post(action, following)
                with on_rows(engine, sum(rows[: action.micro]), rows[action.micro]):
                    do[action.kind](action)
                while self._sending and self._sending[0][0].is_completed():
                    self._sending.pop(0)[0].wait()
            for work, _ in self._sending:
                wait_for_stage(work)

    def _forward(self, action: Action) -> None:
        _, micro, chunk = action
        is_first, is_last = self._ends(chunk)
        x = self._pieces[micro] if is_first else self._inbox.take(action)
        x = x.detach().requires_grad_(torch.is_grad_enabled())
        args, kwargs = self._arguments.of_micro(micro)
        out = x
        with self._numbers.of_micro(micro):
            for block in self._plan.chunks[chunk]:
                result = block(out, *args, **kwargs)
                out = result[0] if isinstance(result, tuple) else result
            if is_last and self._loss_of is not None:
                out = self._loss_of(out, micro)
        if is_last:
            self.results.append(out.detach())
        else:
            self._send(action, out.detach().contiguous(), self._numbers.to_send(micro))
        if self._seeds is not None:
            self._alive[chunk, micro] = x, out
            if not is_last:
                self._inbox.expect_gradient(action, out)

    def _backward(self, action: Action) -> None:
        _, micro, chunk = action
        is_first, is_last = self._ends(chunk)
        x, out = self._alive.pop((chunk, micro))
        if is_last:
            gradient = torch.full_like(out, 0 if self._seeds is None else self._seeds[micro])
        else:
            gradient = self._inbox.take(action)
        engine = current_engine(context())
        with engine.virtual.of_micro(engine.gradients, micro):
            roots, sums = self._arguments.roots(micro)
            torch.autograd.backward([out, *roots], [gradient, *sums])
        sums = self._arguments.to_send(micro)
        own = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()
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
        source = self._numbers if action.kind is Kind.FORWARD else self._arguments
        return source.to_receive(action.micro)

    def _send(self, action: Action, tensor: torch.Tensor, further: list[torch.Tensor]) -> None:
        message = message_of(action, self._stage, self._num_stages, len(self._plan.chunks))
        assert message is not None
        comm = channel(self._plan.pipe, self._stage)
        if action.kind is Kind.FORWARD:
            shape = message.receiver, message.action.chunk, len(self._pieces[action.micro])
            if shape not in self._has_shape:
                self._has_shape.add(shape)
                header = header_of(tensor, tensor.device)
                self._sending.append((comm.send(header, message.receiver, "pipe.shape"), header))
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
        further: Callable[[Action], list[torch.Tensor]],
    ) -> None:
        self._pipe = plan.pipe
        self._further = further
        self._rows = rows
        self._device = device
        self._coming = deque(messages_to(plan.pipe.rank, actions, len(plan.chunks)))
        self._awaited = {message.action for message in self._coming}
        self._posted: dict[Action, tuple[list[Work], torch.Tensor]] = {}
        self._shapes: dict[tuple[int, int], tuple[torch.Size, torch.dtype]] = {}  # by chunk and rows
        # By chunk and micro-batch: tensors with the shapes of gradients to come.
        self._gradients: dict[tuple[int, int], torch.Tensor] = {}

    def expect_gradient(self, forward: Action, out: torch.Tensor) -> None:
        """Records the shape of the gradient of a forward's result."""
        self._gradients[forward.chunk, forward.micro] = torch.empty_like(out, device="meta")

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
            like = self._gradients.pop((chunk, micro), None)
            return None if like is None else (like.shape, like.dtype)
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
