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
mixed with gradients that may never be sent; and in a loop over virtual shards, whose sums take none back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._base.generators import kept_generators, packed_generators, unpack_generators
from .._base.tensors import TORCH_GRAD, gradient_of
from .._ranks.agree import largest
from .._ranks.context import Group
from .._shards.gather import note_unused
from .._shards.stage import hand_out, hand_out_batches, share_shape
from ..global_var import context, num_losses
from ..parameter import DistributedParameter
from .engine import current_engine
from .held import all_or_none, drop_gradients
from .pipe_arguments import PipeArguments
from .pipe_pass import Pass, Plan, run_as_node
from .reads import Reads, Scope
from .run_state import ModeSnapshot, active_recorder


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
            remedy = (
                "call the list, and compute the loss from its result, on all ranks"
                if param._in_block
                else "register the module that holds it in the head"
            )
            raise RuntimeError(
                f"the head of a pipeline read a parameter of shape {tuple(param.full_shape)} that is not below it, "
                f"and that its stage cannot gather alone; {remedy}"
            )
        return self._given[id(param)]


class Head:
    """The module that computes the loss, on the last stage, with parameters that all ranks have gathered.

    Args:
        module: gives the loss of a micro-batch from the last layer's output and the labels.
        params: the distributed parameters below it.
        fulls: their full tensors.
        labels: further arguments of the module.
        num_parts: number of micro-batches whose gradients are kept apart; 1: all are summed.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        params: Sequence[DistributedParameter],
        fulls: Sequence[torch.Tensor],
        labels: PipeArguments,
        num_parts: int,
    ) -> None:
        self._module = module
        self._reads = [(param, full.grad_fn) for param, full in zip(params, fulls, strict=True)]
        self.labels = labels
        self._parts = [
            {
                id(param): full.detach().requires_grad_(full.requires_grad)
                for param, full in zip(params, fulls, strict=True)
            }
            for _ in range(num_parts)
        ]

    def loss(self, out: torch.Tensor, micro: int) -> torch.Tensor:
        """Returns the loss of a micro-batch."""
        args, _ = self.labels.of_micro(micro)
        given = self._parts[micro % len(self._parts)]
        with _GivenReads(current_engine(context()).reads, given):
            loss = self._module(out, *args)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"head: expected a module that returns the mean loss, one number, got {what}")
        return loss

    def take_gradients(self, num_stages: int, is_used: Sequence[float]) -> list[torch.Tensor | None]:
        """Returns the gradients of the parameters on this rank; zeros on the other stages, which have none."""
        gradients = []
        for (param, read), (leaf, gradient), used in zip(self._reads, self._take(0), is_used, strict=True):
            is_apart = param._spec.group.size == num_stages  # else another pipeline may use it
            if is_apart and not used:
                note_unused(read)
            elif gradient is None and leaf.requires_grad:
                gradient = torch.zeros_like(leaf)
            gradients.append(gradient)
        return gradients

    def uses(self) -> list[bool]:
        """Whether each parameter has a gradient on this rank."""
        return [gradient_of(leaf) is not None for leaf in self._parts[0].values()]

    def _take(self, part: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        # A read has made the leaf a copy, whose `grad` would be the parameter's.
        found = [(leaf, gradient_of(leaf)) for leaf in self._parts[part].values()]
        for leaf, _ in found:
            TORCH_GRAD.__set__(leaf, None)
        return found

    def hand_out_gradients(self, pipe: Group) -> list[torch.Tensor | None]:
        """Returns the gradients of the parameters by this rank's micro-batch. Collective over the pipe group."""
        last, found = pipe.size - 1, list(zip(*map(self._take, range(pipe.size)), strict=True))
        # Parameters that the head does not use get none, as in one process.
        used = torch.tensor([of_param[0][1] is not None for of_param in found], device=context().device)
        flags = used.to(torch.uint8)
        pipe.comm.broadcast(flags, last, "pipe.loss").wait()
        gradients: list[torch.Tensor | None] = []
        for is_used, of_param in zip(flags.tolist(), found, strict=True):
            leaf = of_param[0][0]
            parts = [leaf if own is None else own for _, own in of_param]  # elsewhere: not sent
            gradients.append(hand_out(pipe, parts, last, leaf.new_empty(leaf.shape)) if is_used else None)
        return gradients


class _LossPass(Pass):
    """A pass whose results are losses.

    Args:
        plan: of the pipeline list.
        hidden: this rank's batch.
        arguments: further arguments of all layers.
        head: computes the loss of a micro-batch.
        seeds: the gradients of the micro-batches' losses; None for a pass without backward.
    """

    def __init__(
        self,
        plan: Plan,
        hidden: torch.Tensor,
        arguments: PipeArguments,
        head: Head,
        seeds: Sequence[float] | None,
    ) -> None:
        super().__init__(plan, hidden, arguments)
        self._head = head
        self._seeds = seeds

    def result_of(self, out: torch.Tensor, micro: int) -> torch.Tensor:
        return self._head.loss(out, micro)

    def result_gradient(self, out: torch.Tensor, micro: int) -> torch.Tensor:
        assert self._seeds is not None
        return torch.full_like(out, self._seeds[micro])


class LossCall:
    """One loss of a pipeline, with the state that its backward needs.

    Args:
        plan: of the pipeline list.
        memory: of the pipeline list.
        hidden: this rank's batch.
        arguments: further arguments of all layers.
        head: computes the loss of a micro-batch.
    """

    untrained = ()

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
        self._begin()
        if any(largest([any(state.unsent for state in self._states)], "pipe.loss", self._plan.pipe.comm)):
            with torch.no_grad():
                return self._run(None)
        if self._memory.seed is None:
            self._memory.seed = self._plan.pipe.size * torch.tensor(1 / num_losses()).item()
        return self._run(self._memory.seed)

    def backward(self, gradient: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Sends the parameters' gradients; returns the inputs' gradients. Collective over the pipe group."""
        self._begin_backward()
        seed = float(sum(self._of_ranks(gradient)))  # all have the same loss
        if seed != self._seed:
            for state in self._states:
                drop_gradients(state)
            with self._modes.restored(), torch.enable_grad():
                self._modes.context().run(self._run, seed)
        self._memory.seed = seed
        with all_or_none(self._states):
            for state in reversed(self._states):
                self._engine.gradients.send_deferred(state)
        return self._gradients

    def _begin(self) -> None:
        """Begins a call with gradients."""
        self._states = [block._runtime for block in self._plan.blocks]
        self._number = self._memory.begin_call(self._plan)
        self._modes = ModeSnapshot(self._hidden.device)
        self._versions = [state.version() for state in self._states]

    def _begin_backward(self) -> None:
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
        if self._versions != [state.version() for state in self._states]:
            raise RuntimeError(
                "a parameter of the pipeline was modified in place between loss() and backward (by an optimizer "
                "step, a load?)"
            )
        self._is_spent = True

    def _of_ranks(self, gradient: torch.Tensor | None) -> list[float]:
        """Returns the gradients that the ranks' backwards bring."""
        pipe = self._plan.pipe
        own = torch.zeros(1, dtype=torch.float64, device=self._hidden.device)
        if gradient is not None:
            own += gradient.detach()
        by_rank = own.new_empty(pipe.size)
        pipe.comm.all_gather(by_rank, own, "pipe.loss").wait()
        gradients: list[float] = by_rank.tolist()
        return gradients

    def _pass(self, seeds: Sequence[float] | None) -> Pass:
        """Runs a pass; ``seeds``: gradients of the micro-batches' losses, for one with backward."""
        run = _LossPass(self._plan, self._hidden, self._arguments, self._head, seeds)
        run.run_plan(trains=seeds is not None)
        return run

    def _run(self, seed: float | None) -> torch.Tensor:
        """Runs a pass and returns the loss; ``seed``: of a pass with backward."""
        pipe, hidden = self._plan.pipe, self._hidden
        rows = len(hidden) * pipe.size
        shares = [len(piece) / rows for piece in torch.empty(rows, 0).tensor_split(self._plan.num_micros)]
        seeds = None if seed is None else [seed * share for share in shares]
        run = self._pass(seeds)
        # Behind the loss: which parameters the head has used. Others get no gradient, as in one process.
        uses = self._head.uses() if seed is not None else []
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        told = torch.tensor([0.0, *uses], dtype=dtype, device=hidden.device)
        for result, share in zip(run.results, shares, strict=False):  # only the last stage has results
            told[0] += result.reshape(()).to(dtype) * share
        pipe.comm.broadcast(told, pipe.size - 1, "pipe.loss").wait()
        if seed is not None:
            self._seed = seed
            whole = torch.cat(run.gradients) if pipe.rank == 0 else None
            self._gradients = [
                hand_out_batches(pipe, whole, 0, hidden.new_empty(hidden.shape)),
                *(argument.gradient() for _, argument in self.trained),
                *self._head.take_gradients(pipe.size, told[1:].tolist()),
            ]
        return told[0].clone()


class ShardLossCall(LossCall):
    """The loss of this rank's virtual shard, which is a micro-batch."""

    def forward(self) -> torch.Tensor:
        pipe, device = self._plan.pipe, self._hidden.device
        if torch.is_grad_enabled():
            self._begin()
            self._numbers = packed_generators(device)
        with torch.no_grad():
            losses = self._pass(None).results
        shape, dtype = share_shape(pipe, losses[0] if losses else None, pipe.size - 1, device)
        return hand_out(pipe, losses or None, pipe.size - 1, torch.empty(shape, dtype=dtype, device=device))

    def backward(self, gradient: torch.Tensor | None) -> list[torch.Tensor | None]:
        self._begin_backward()
        if not self._engine.virtual.is_open:
            raise RuntimeError(
                "the loss of a virtual shard came to backward after the loop over the shards; call backward in the loop"
            )
        pipe, hidden = self._plan.pipe, self._hidden
        seeds = self._of_ranks(gradient)
        with kept_generators(hidden.device), self._modes.restored(), torch.enable_grad():
            unpack_generators(self._numbers)
            run = self._pass(seeds)
        return [
            hand_out(pipe, run.gradients or None, 0, hidden.new_empty(hidden.shape)),
            *(argument.gradient() for _, argument in self._arguments.trained),
            *(argument.gradient(pipe.size - 1) for _, argument in self._head.labels.trained),
            *self._head.hand_out_gradients(pipe),
        ]


def run_forward(plan: Plan, hidden: torch.Tensor, arguments: PipeArguments) -> torch.Tensor:
    """Returns this rank's batch of the outputs, without gradients. Collective over the pipe group."""
    run = Pass(plan, hidden, arguments)
    run.run_plan(trains=False)
    return run.own_result()


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
    engine = current_engine(context())
    fulls = [engine.reads.read(param) for param in params]
    is_virtual = engine.virtual.is_open
    head = Head(module, params, fulls, labels, plan.num_micros if is_virtual else 1)
    call = (ShardLossCall if is_virtual else LossCall)(plan, memory, hidden, arguments, head)
    loss: torch.Tensor = run_as_node(call, hidden, *(source for source, _ in call.trained), *fulls)
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
