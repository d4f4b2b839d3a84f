"""Optimizer updates inside backward.

[Note: Stepping in backward]
When the gradients of a block have reached its shards, and nothing else in this backward can change them, its update can
start: the gradients are still in the cache, and offloaded updates overlap with the rest of backward. Gradients could be
changed by another call of the block with a pending backward, by a graph that leads to a parameter itself (a
regulariser, a read outside the block), and by the user's hooks. In these cases, and for optimizers of other libraries,
the block is left to `step()`. Each rank decides by itself: no message and no bit depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .._C import lead_graphs_to
from .._engine.block_state import BlockState
from .._engine.engine import current_engine
from ..global_var import config, context


def refuse_early_steps(with_loss_scale: bool) -> None:
    """Raises ValueError where something needs all gradients before the first update."""
    if with_loss_scale:
        raise ValueError(
            "step_in_backward: expected no loss scale, whose overflow must be known before the first update; train in "
            "bfloat16 or float32, or leave one of them out"
        )
    if config.get("pipe_enabled", False):
        raise ValueError("step_in_backward: expected no pipeline, whose stages send their gradients at once")


class EarlySteps:
    """Starts updates of blocks inside one backward for each step."""

    def __init__(self) -> None:
        #: Blocks whose update began in backward, since the last step.
        self.num_blocks = 0
        self._is_spent = False
        #: Optimizer and group, by id of a parameter.
        self._owners: dict[int, tuple[Any, dict[str, Any]]] = {}

    @contextmanager
    def allowed(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Context manager for the last backward before a step.

        Raises:
            RuntimeError: it is not the first backward since the last step.
        """
        if self._is_spent:
            raise RuntimeError(
                "OptimManager.backward: with step_in_backward=True the first backward after a step updates parameters; "
                "call step() before the next one, or accumulate gradients by OptimManager(accumulate=...)"
            )
        engine = current_engine(context("OptimManager.backward"))
        for optimizer in optimizers:
            engine.replaced.look(optimizer)
        self._is_spent = True
        self.num_blocks = 0
        self._owners = {
            id(p): (optimizer, group)
            for optimizer in optimizers
            if getattr(optimizer, "_may_step_early", False)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        engine.gradients.listeners.add(self)
        try:
            with engine.tier.updates_inside() if engine.tier is not None else nullcontext():
                yield
        finally:
            engine.gradients.listeners.discard(self)
            self._owners = {}

    def finish(self) -> None:
        """Ends the step."""
        self._is_spent = False

    def reduced(self, runtime: BlockState) -> None:
        """The gradients of a block have reached its shards."""
        parameters: list[Any] = [p for group in runtime.buffers for p in group.parameters if p.requires_grad]
        if runtime.open_calls or any(p._accumulated_hooks for p in parameters):
            return
        if lead_graphs_to(parameters):
            return
        shares: dict[Any, dict[int, tuple[dict[str, Any], list[Any]]]] = {}
        for p in parameters:
            owner = self._owners.get(id(p))
            if owner is not None:
                optimizer, group = owner
                shares.setdefault(optimizer, {}).setdefault(id(group), (group, []))[1].append(p)
        for optimizer, groups in shares.items():
            optimizer.step_early(list(groups.values()))
        self.num_blocks += bool(shares)
