"""Micro-batches that pass a block one after the other, before the next block runs.

[Note: Vertical order]
Where each micro-batch of a step has a forward and a backward of its own, a block is gathered (and read from its drive)
twice for each of them. Here all of them pass a block while it stays gathered, so that it is gathered twice a step, and
its gradients are added up and sent once. For the backward a node behind each block has the hidden states of all
micro-batches as its results: autograd runs it when all of their gradients are there, so when the blocks above have run
all of their backwards and before the block itself begins. Among the calls that are ready, autograd takes the latest
first; so the forwards run from the last micro-batch to the first, and gradients are added in the order in which
backwards of the micro-batches, one after the other, would add them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from .._base.layers import LayerSequence, run_layers
from .._base.opaque import opaque
from .._C import attach_island
from ..global_var import context
from .block_state import BlockState
from .engine import Engine, current_engine
from .held import drop_gradients, hold, let_go
from .phase import Phase

_Hidden = tuple[Any, ...]


class VerticalLayers(LayerSequence):
    """Blocks that micro-batches can pass together."""

    num_hidden: int

    @opaque
    def vertical(self, micro_batches: Sequence[Any], **kwargs: Any) -> list[Any]:
        """Runs all Blocks on several micro-batches, all of these through a Block before the next Block.

        Parameters are gathered, or read from a drive, twice for all of them together, and gradients are sent once, with
        the bits of a backward for each inside `no_sync()`. Call `backward()` once, on the sum of their losses. Memory
        holds the activations of all micro-batches. (Dropout draws in another order than in one call for each.)

        Args:
            micro_batches: for each its hidden state, or a tuple of the positional arguments of :meth:`forward`.
            kwargs: passed to every Block for every micro-batch.

        Returns:
            For each micro-batch what :meth:`forward` returns.

        Raises:
            ValueError: there is no micro-batch, or one has fewer than ``num_hidden`` arguments.

        Example:
            >>> layers = bmtrain.TransformerBlockList([bmtrain.Block(bmtrain.nn.Linear(4, 4)) for _ in range(3)])
            >>> [out.shape for out in layers.vertical([torch.ones(2, 4), torch.ones(1, 4)])]
            [torch.Size([2, 4]), torch.Size([1, 4])]
        """
        count = self.num_hidden
        batches = [batch if isinstance(batch, tuple) else (batch,) for batch in micro_batches]
        lengths = list(map(len, batches))
        if min(lengths, default=0) < count:
            expected = f"expected at least one, each with {count} or more arguments"
            raise ValueError(f"micro_batches: {expected}, got numbers of arguments {lengths}")
        results = _run(current_engine(context()), self._modules, batches, kwargs, count)
        return [hidden[0] if count == 1 else hidden for hidden in results]


def _run(
    engine: Engine, layers: Mapping[str, Any], batches: Sequence[_Hidden], kwargs: dict[str, Any], count: int
) -> list[_Hidden]:
    trains = torch.is_grad_enabled()
    hidden = [batch[:count] for batch in batches]
    if trains:
        hidden = _joined(engine, None, hidden)
    for name, layer in layers.items():
        block: BlockState = layer._runtime
        hold(engine, block, Phase.FORWARD if trains else Phase.EVALUATE)
        try:
            for index in reversed(range(len(batches))):
                rest = batches[index][count:]
                hidden[index] = run_layers({name: layer}, hidden[index], rest, kwargs, count)
        finally:
            let_go(engine, block, keep=trains and engine.keeps_for_backward(block))
        if trains:
            hidden = _joined(engine, block, hidden)
    return hidden


def _joined(engine: Engine, block: BlockState | None, hidden: list[_Hidden]) -> list[_Hidden]:
    """Puts one node behind all hidden states, the results of ``block``; None: the inputs of the first block."""

    def backward(gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if not Variable._execution_engine.is_checkpoint_valid():  # grad(), backward(inputs=): nothing is sent
            return gradients
        turn = engine.gradients.turn
        if turn is not None:
            turn.end()
        if block is not None:
            _Turn(engine, block)
        return gradients

    tensors = {id(t): t for states in hidden for t in states if getattr(t, "requires_grad", False)}
    if not tensors:
        return hidden
    joined = {key: tensor.detach() for key, tensor in tensors.items()}
    attach_island(list(joined.values()), list(tensors.values()), backward)
    return [tuple(joined.get(id(t), t) for t in states) for states in hidden]


class _Turn:
    """The backwards of a block for all micro-batches, whose gradients are sent together."""

    def __init__(self, engine: Engine, block: BlockState) -> None:
        gradients = engine.gradients
        if gradients.turn is not None:
            gradients.turn.drop()  # of a backward that failed
        hold(engine, block, Phase.BACKWARD)
        block.defers = True
        self._engine = engine
        self._block = block
        self._task = torch._C._current_graph_task_id()
        gradients.turn = self
        gradients.call_at_end_of_backward()

    def end(self) -> None:
        """Sends the gradients, if the running backward has begun the turn."""
        gradients = self._engine.gradients
        if self._task == torch._C._current_graph_task_id():
            gradients.turn = None
            let_go(self._engine, self._block)
            gradients.send_deferred(self._block)

    def drop(self) -> None:
        """Drops the gradients."""
        block, self._engine.gradients.turn = self._block, None
        block.is_held = False
        block.drop_gathered()
        drop_gradients(block)
