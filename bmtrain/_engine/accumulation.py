"""Gradients of several backwards added up before they are sent.

[Note: The accumulation window]
Inside ``no_sync()`` a backward leaves gradients whole and unsent: those of a block in its flat buffer, those of a
parameter outside blocks here. The first backward outside sends them together with its own; what it has no gradients for
itself goes when it ends. The window is open from the first backward inside to the end of that one. In it parameters do
not change, so that a block with ``keep_gathered`` need not be gathered twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..parameter import DistributedParameter
    from .runtime import BlockRuntime

__all__ = ["Accumulation"]


class Accumulation:
    """What has not been sent yet.

    Attributes:
        round: counts backwards that sent gradients; parameters are expected to change between two of them.
    """

    def __init__(self) -> None:
        self.round = 0
        self._depth = 0
        self._blocks: dict[int, BlockRuntime] = {}  # by number: with gradients that have not been sent
        self._gathered: dict[int, BlockRuntime] = {}  # that stay gathered in this window
        # By the identity of the parameter.
        self._outside: dict[int, tuple[DistributedParameter, torch.Tensor]] = {}

    @property
    def is_on(self) -> bool:
        """Whether a backward now leaves its gradients unsent."""
        return self._depth > 0

    @property
    def is_open(self) -> bool:
        """Whether parameters are not to change now, see [Note: The accumulation window]."""
        return bool(self._depth or self._blocks or self._outside)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def add_block(self, runtime: BlockRuntime) -> None:
        """Takes note of a block whose gradients wait."""
        self._blocks[runtime.number] = runtime

    def block_is_sent(self, runtime: BlockRuntime) -> None:
        """They wait no more."""
        self._blocks.pop(runtime.number, None)

    def stays_gathered(self, runtime: BlockRuntime) -> None:
        """Takes note of a block to release when the window closes."""
        self._gathered[runtime.number] = runtime

    def add_outside(self, param: DistributedParameter, gradient: torch.Tensor) -> None:
        """Keeps the full gradient of a parameter outside blocks, on top of what there is."""
        known = self._outside.get(id(param))
        # Not in place: autograd may use the tensor that it gave, and so may the user's hooks.
        self._outside[id(param)] = param, gradient if known is None else known[1] + gradient

    def keeps_outside(self, param: DistributedParameter) -> bool:
        """Whether gradients of a parameter outside blocks wait here."""
        return id(param) in self._outside

    def has_unsent_of(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether gradients of any of these wait to be sent."""
        if not self._blocks and not self._outside:
            return False
        waiting = set(self._outside)
        for runtime in self._blocks.values():
            waiting.update(id(param) for group in runtime.groups for param in group.parameters)
        return any(id(param) in waiting for param in params)

    def with_unsent(self, param: DistributedParameter, gradient: torch.Tensor) -> torch.Tensor:
        """``gradient`` and what waited for it."""
        known = self._outside.pop(id(param), None)
        return gradient if known is None else known[1] + gradient

    def close(self) -> None:
        """At the end of a backward that sends: sends what it did not come to, and releases what was kept. Collective.

        Reductions are begun here, and completed by the caller.
        """
        self.round += 1
        for number in sorted(self._blocks):
            if not self._blocks[number].defers:  # else a pipeline is in the middle of it
                self._blocks[number].reduce_deferred()
        outside, self._outside = self._outside, {}
        with torch.no_grad():
            for param, gradient in outside.values():
                reduced = param._spec.reduce_scatter(gradient.reshape(-1))
                param.grad = reduced if param.grad is None else param.grad + reduced
                param._run_accumulated_hooks()
        gathered, self._gathered = self._gathered, {}
        for runtime in gathered.values():
            runtime.drop_gathered()

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        """Drops what waits for ``params``: their gradients are zeroed. Those of others wait on."""
        if not self._blocks and not self._outside:
            return
        dropped = set(map(id, params))
        self._outside = {key: value for key, value in self._outside.items() if key not in dropped}
        self._blocks = {n: runtime for n, runtime in self._blocks.items() if runtime.drop_unsent(dropped)}
