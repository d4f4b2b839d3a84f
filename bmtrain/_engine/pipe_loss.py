"""The loss of a batch that a pipeline computes with its last stage, and its gradients.

[Note: A loss in the pipeline]
Where the loss is computed outside, backward can start only after the last forward. With the loss inside, one call runs
a schedule's forwards and backwards, and keeps the gradients, of parameters unsent in the flat buffers of their blocks.
The outer backward sends them.

The inner backwards need the gradient of the loss before the outer backward brings it: the seed. Multiplying gradients
by a factor afterwards would round them once more, or lose small ones in fp16. So the seed is taken from the last
backward, at first from an unscaled :class:`bmtrain.optim.OptimManager`; and if another one is brought, the pass runs
again with it: once for each new loss scale. All gradients have the bits of the true seed. The pass runs in backward
alone, after a forward for the value of the loss, where a block has unsent gradients of ``no_sync()``, which must not be
mixed with gradients that may never be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from .._base.generators import own_numbers
from .._base.unseen import TORCH_GRAD, gradient_of
from .._C import ReduceOp
from .._shards.stage import collect_batches, hand_out_batches, share_shape
from ..global_var import context, num_losses
from .engine import current_engine
from .held import drop_gradients, hold, let_go
from .pipe_arguments import PipeArguments
from .pipe_pass import LossOf, Pass, Plan
from .reads import Reads, Scope
from .recording import active_recorder
from .run_state import ModeSnapshot

if TYPE_CHECKING:
    from ..parameter import DistributedParameter


@dataclass
class Memory:
    """Memory of a pipeline list between its calls.

    Attributes:
        seed: sum over the stages' ranks of the gradients that the last backward brought.
        number: of the latest call with gradients.
    """

    seed: float | None = None
    number: int = 0

    def begin_call(self, plan: Plan) -> int:
        """Drops gradients of an earlier loss whose backward has not run, and returns the number of the new call."""
        self.number += 1
        for block in plan.blocks:
            drop_gradients(block._runtime)
        return self.number


class _GivenReads(Scope):
    """Scope in which parameters have been gathered before: others cannot be, where not all ranks run the scope."""

    __slots__ = ("_given",)

    def __init__(self, reads: Reads, given: Mapping[int, torch.Tensor]) -> None:
        super().__init__(torch.nn.Module(), reads)
        self._given = given

    def read(self, param: DistributedParameter) -> torch.Tensor:
        if id(param) not in self._given:
            raise RuntimeError(
                f"the head of a pipeline read a parameter of shape {tuple(param.full_shape)} that is not below it, "
                "and that its stage cannot gather alone; register the module that holds it in the head"
            )
        return self._given[id(param)]


class Head:
    """The module that computes the loss, on the last stage, with parameters that all ranks have gathered.

    Args:
        module: gives the loss of a micro-batch from the last layer's output and the labels.
        params: the distributed parameters below it.
        fulls: their full tensors.
        labels: further arguments of the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        params: Sequence[DistributedParameter],
        fulls: Sequence[torch.Tensor],
        labels: PipeArguments,
    ) -> None:
        self._module = module
        self.labels = labels
        self._leaves = [full.detach().requires_grad_(full.requires_grad) for full in fulls]
        self._given = {id(param): leaf for param, leaf in zip(params, self._leaves, strict=True)}

    def loss(self, out: torch.Tensor, micro: int) -> torch.Tensor:
        """Returns the loss of a micro-batch."""
        args, _ = self.labels.of_micro(micro)
        with _GivenReads(current_engine(context()).reads, self._given):
            loss = self._module(out, *args)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"head: expected a module that returns the mean loss, one number, got {what}")
        return loss

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Returns the gradients of the parameters on this rank; zeros on the other stages, which have none."""
        gradients = []
        for leaf in self._leaves:
            gradient = gradient_of(leaf)  # a read has made it a copy, whose `grad` would be the parameter's
            gradients.append(torch.zeros_like(leaf) if gradient is None and leaf.requires_grad else gradient)
            TORCH_GRAD.__set__(leaf, None)
        return gradients


class LossCall:
    """One loss of a pipeline, with the state that its backward needs.

    Args:
        plan: of the pipeline list.
        memory: of the pipeline list.
        hidden: this rank's batch.
        arguments: further arguments of all layers.
        head: computes the loss of a micro-batch.
    """

    def __init__(
        self, plan: Plan, memory: Memory, hidden: torch.Tensor, arguments: PipeArguments, head: Head
    ) -> None:
        if active_recorder.get() is not None:
            raise RuntimeError(
                "loss: tensors inside a pipeline cannot be recorded here (inspect_tensor); record them in a call of "
                "the list, which returns the outputs"
            )
        self._plan = plan
        self._memory = memory
        self._hidden = hidden.detach()
        self._arguments = arguments
        self._head = head
        self._engine = current_engine(context())
        self._seed: float | None = None  # of the gradients that were computed
        self._is_spent = False

    @property
    def trained(self) -> list[Any]:
        """The arguments that require grad, with their :class:`PipeArgument`."""
        return [*self._arguments.trained, *self._head.labels.trained]

    def forward(self) -> torch.Tensor:
        """Returns the mean loss of the batches of all stages' ranks. Collective over the pipe group."""
        if not torch.is_grad_enabled():
            return self._run(None)
        states = [block._runtime for block in self._plan.blocks]
        self._number = self._memory.begin_call(self._plan)
        self._modes = ModeSnapshot(self._hidden.device)
        self._versions = [state.version() for state in states]
        if self._any(any(state.unsent for state in states)):
            with torch.no_grad():
                return self._run(None)
        if self._memory.seed is None:
            self._memory.seed = self._plan.pipe.size * torch.tensor(1 / num_losses()).item()
        return self._run(self._memory.seed)

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Sends the parameters' gradients; returns the inputs' gradients. Collective over the pipe group."""
        states = [block._runtime for block in self._plan.blocks]
        if self._is_spent:
            raise RuntimeError(
                "trying to backward through the loss of a pipeline a second time: its gradients have been sent; call "
                "loss() again"
            )
        if self._number != self._memory.number:
            raise RuntimeError(
                "the loss of a pipeline came to backward after a later call of the same list, which has dropped its "
                "gradients; run backward of each loss before the next call"
            )
        if self._versions != [state.version() for state in states]:
            raise RuntimeError(
                "a parameter of the pipeline was modified in place between loss() and backward (by an optimizer "
                "step, a load?)"
            )
        seed = self._total(gradient)
        if seed != self._seed:
            for state in states:
                drop_gradients(state)
            with self._modes.restored(), torch.enable_grad():
                self._run(seed)
        self._memory.seed = seed
        self._is_spent = True
        for state in reversed(states):
            self._engine.gradients.send_deferred(state)
        return self._gradients

    def _any(self, flag: bool) -> bool:
        seen = torch.tensor([flag], dtype=torch.uint8, device=self._hidden.device)
        self._plan.pipe.comm.all_reduce(seen, ReduceOp.MAX, "pipe.loss").wait()
        return bool(seen.item())

    def _total(self, gradient: torch.Tensor) -> float:
        """Returns the sum of the gradients that the ranks' backwards bring: all have the same loss."""
        pipe = self._plan.pipe
        own = gradient.detach().double().reshape(1)
        by_rank = own.new_empty(pipe.size)
        pipe.comm.all_gather(by_rank, own, "pipe.loss").wait()
        return float(sum(by_rank.tolist()))

    def _run(self, seed: float | None) -> torch.Tensor:
        """Runs a pass and returns the loss; ``seed``: of a pass with backward."""
        pipe, hidden = self._plan.pipe, self._hidden
        run = _pass(self._plan, hidden, self._arguments, self._head.loss, seed)
        if seed is not None:
            self._seed = seed
            whole = torch.cat(run.gradients) if pipe.rank == 0 else None
            self._gradients = [
                hand_out_batches(pipe, whole, 0, hidden.shape, hidden.dtype, hidden.device),
                *(argument.gradient() for _, argument in self.trained),
                *self._head.take_gradients(),
            ]
        loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
        for result, share in zip(
            run.results, run.shares, strict=False
        ):  # elsewhere than on the last stage: none
            loss += result.reshape(()).float() * share
        pipe.comm.broadcast(loss, pipe.size - 1, "pipe.loss").wait()
        return loss


def run_forward(plan: Plan, hidden: torch.Tensor, arguments: PipeArguments) -> torch.Tensor:
    """Returns this rank's batch of the outputs, without gradients. Collective over the pipe group."""
    pipe = plan.pipe
    run = _pass(plan, hidden, arguments, None, None)
    whole = torch.cat(run.results) if pipe.rank == pipe.size - 1 else None
    shape, dtype = share_shape(pipe, whole, pipe.size - 1, hidden.device)
    own = torch.Size([len(hidden), *shape[1:]])
    return hand_out_batches(pipe, whole, pipe.size - 1, own, dtype, hidden.device)


def _pass(
    plan: Plan, hidden: torch.Tensor, arguments: PipeArguments, loss_of: LossOf | None, seed: float | None
) -> Pass:
    """Runs a pass over the batches of all stages' ranks; ``seed``: of one with backward."""
    whole = collect_batches(plan.pipe, hidden, target=0)
    if whole is None:
        whole = hidden.new_empty((len(hidden) * plan.pipe.size, 0))
    run = Pass(plan, whole.tensor_split(plan.num_micros), arguments, loss_of, seed)
    engine, states = current_engine(context()), [block._runtime for block in plan.blocks]
    for state in states:
        hold(engine, state)
        state.defers = seed is not None
    try:
        with own_numbers(plan.pipe.rank, hidden.device):
            run.run()
    finally:
        for state in states:
            let_go(engine, state)
    return run


class _Loss(torch.autograd.Function):
    """Autograd node of a pipeline's loss in the outer graph."""

    @staticmethod
    def forward(ctx: Any, call: LossCall, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        with torch.enable_grad():
            return call.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *ctx.call.backward(gradient)


def run_loss(
    plan: Plan,
    memory: Memory,
    hidden: torch.Tensor,
    arguments: PipeArguments,
    module: torch.nn.Module,
    labels: PipeArguments,
) -> torch.Tensor:
    """Returns the loss of a pipeline, as one node of the caller's graph if gradients are enabled. Collective."""
    params = head_parameters(module)
    reads = current_engine(context()).reads
    fulls = [reads.read(param) for param in params]
    call = LossCall(plan, memory, hidden, arguments, Head(module, params, fulls, labels))
    if not torch.is_grad_enabled():
        return call.forward()
    if not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()  # parameters may be trained: backward must reach the node
    loss: torch.Tensor = _Loss.apply(call, hidden, *(source for source, _ in call.trained), *fulls)
    return loss


def head_parameters(module: torch.nn.Module) -> list[DistributedParameter]:
    """Returns the parameters of a head.

    Raises:
        ValueError: one is in a Block, or is not distributed.
    """
    found = {id(param): (name, param) for name, param in module.named_parameters()}
    params: list[Any] = []
    name: str
    param: Any
    for name, param in found.values():
        if not hasattr(param, "_spec"):
            raise ValueError(
                f"head: expected distributed parameters, which all ranks share, got {name!r}, a "
                f"{type(param).__name__}"
            )
        if param._block is not None:
            raise ValueError(
                f"head: parameter {name!r} is in a Block, which runs on all ranks, but the last stage alone runs the "
                "head; use the module without the Block, whose parameters are gathered beforehand"
            )
        params.append(param)
    return params
