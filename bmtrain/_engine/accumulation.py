"""Accumulation of gradients over several backwards before they are reduced.

[Note: The accumulation window]
Inside ``no_sync()`` a backward leaves full gradients unsent: gradients of a block in its flat buffer, gradients of
parameters outside blocks here. The first backward outside sends them together with its own; gradients that this
backward does not reach are sent when it ends. The window is open from the first backward inside to the end of that one.
In it parameters do not change, so that a block with ``keep_gathered`` is gathered once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..parameter import DistributedParameter
    from .running import RunningBlock

__all__ = ["Accumulation"]


class Accumulation:
    """Gradients that have not been sent.

    Attributes:
        round: counts backwards that sent gradients; parameters are expected to change between two of them.
    """

    def __init__(self) -> None:
        self.round = 0
        self._depth = 0
        self._blocks: dict[int, RunningBlock] = {}  # blocks with unsent gradients, by number
        self._gathered: dict[int, RunningBlock] = {}  # blocks that stay gathered in this window
        # Gradients outside blocks, by the identity of the parameter.
        self._outside: dict[int, tuple[DistributedParameter, torch.Tensor]] = {}

    @property
    def is_on(self) -> bool:
        """Whether backward currently leaves its gradients unsent."""
        return self._depth > 0

    @property
    def is_open(self) -> bool:
        """Whether parameters must not change, see [Note: The accumulation window]."""
        return bool(self._depth or self._blocks or self._outside)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def add_block(self, runtime: RunningBlock) -> None:
        """Records a block with unsent gradients."""
        self._blocks[runtime.number] = runtime

    def block_is_sent(self, runtime: RunningBlock) -> None:
        """The gradients of this block have been sent."""
        self._blocks.pop(runtime.number, None)

    def stays_gathered(self, runtime: RunningBlock) -> None:
        """Records a block to release when the window closes."""
        self._gathered[runtime.number] = runtime

    def add_outside(self, param: DistributedParameter, gradient: torch.Tensor) -> None:
        """Adds the full gradient of a parameter outside blocks to its unsent gradient."""
        known = self._outside.get(id(param))
        # Not in place: autograd and the user's hooks may still use the tensor.
        self._outside[id(param)] = param, gradient if known is None else known[1] + gradient

    def keeps_outside(self, param: DistributedParameter) -> bool:
        """Whether a parameter outside blocks has unsent gradients."""
        return id(param) in self._outside

    def has_unsent_of(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether any of ``params`` has unsent gradients."""
        if not self._blocks and not self._outside:
            return False
        waiting = set(self._outside)
        for runtime in self._blocks.values():
            waiting.update(id(param) for group in runtime.groups for param in group.parameters)
        return any(id(param) in waiting for param in params)

    def with_unsent(self, param: DistributedParameter, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient`` plus the unsent gradient of ``param``, which is removed from here."""
        known = self._outside.pop(id(param), None)
        return gradient if known is None else known[1] + gradient

    def close(self) -> None:
        """Closes the window at the end of a backward that sends. Collective.

        Reductions of the remaining gradients are started here, and completed by the caller. Blocks are released.
        """
        self.round += 1
        for number in sorted(self._blocks):
            if not self._blocks[number].defers:  # else a pipeline accumulates more
                self._blocks[number].reduce_deferred()
        outside, self._outside = self._outside, {}
        with torch.no_grad():
            for param, gradient in outside.values():
                reduced = param._spec.reduce_scatter(gradient.reshape(-1), param._label)
                param.grad = reduced if param.grad is None else param.grad + reduced
                param._run_accumulated_hooks()
        gathered, self._gathered = self._gathered, {}
        for runtime in gathered.values():
            runtime.drop_gathered()

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        """Drops the unsent gradients of ``params``, which are being zeroed; others stay."""
        if not self._blocks and not self._outside:
            return
        dropped = set(map(id, params))
        self._outside = {key: value for key, value in self._outside.items() if key not in dropped}
        self._blocks = {n: runtime for n, runtime in self._blocks.items() if runtime.drop_unsent(dropped)}
