"""Gradients that wait for a later backward to send them.

[Note: The accumulation window]
Inside ``no_sync()`` a backward leaves full gradients unsent: gradients of a block in its flat buffer, gradients of
parameters outside blocks here. The first backward outside sends them together with its own; gradients that this
backward does not reach are sent when it ends. The window is open from the first backward inside to the end of that one.
In it parameters do not change, so that a block with ``keep_gathered`` is gathered once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..parameter import DistributedParameter
from .block_state import BlockState


class Unsent:
    """Gradients that have not been sent.

    Attributes:
        blocks: blocks with unsent gradients, by number.
        outside: unsent gradients of parameters outside blocks, by the identity of the parameter.
        gathered: blocks that stay gathered until the window closes, by number.
        is_kept: whether an ``OptimManager(accumulate=)`` waits for more, so that zero_grad() drops none.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, BlockState] = {}
        self.outside: dict[int, tuple[DistributedParameter, torch.Tensor]] = {}
        self.gathered: dict[int, BlockState] = {}
        self.is_kept = False

    def add(self, param: DistributedParameter, gradient: torch.Tensor) -> None:
        """Adds the full gradient of a parameter outside blocks to its unsent gradient."""
        known = self.outside.get(id(param))
        # Not in place: autograd and the user's hooks may still use the tensor.
        self.outside[id(param)] = param, gradient if known is None else known[1] + gradient

    def joined(self, param: DistributedParameter, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient`` plus the unsent gradient of ``param``, which is removed from here."""
        known = self.outside.pop(id(param), None)
        return gradient if known is None else known[1] + gradient

    def has_any_of(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether any of ``params`` has unsent gradients."""
        if not self.blocks and not self.outside:
            return False
        waiting = set(self.outside)
        for block in self.blocks.values():
            waiting.update(id(param) for buffer in block.buffers for param in buffer.parameters)
        return any(id(param) in waiting for param in params)

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        """Drops the unsent gradients of ``params``, which are being zeroed; others stay."""
        if self.is_kept or (not self.blocks and not self.outside):
            return
        dropped = set(map(id, params))
        self.outside = {key: value for key, value in self.outside.items() if key not in dropped}
        self.blocks = {number: block for number, block in self.blocks.items() if block.drop_unsent(dropped)}

    @torch.no_grad()
    def reduce_outside(self) -> None:
        """Sums the gradients of parameters outside blocks into their shards. Collective."""
        outside, self.outside = self.outside, {}
        for param, gradient in outside.values():
            reduced = param._spec.reduce_scatter(gradient.reshape(-1), param._label).to(param.device)
            param.grad = reduced if param.grad is None else param.grad + reduced
            param._run_accumulated_hooks()

    def release_gathered(self) -> None:
        """Releases the blocks that stayed gathered."""
        gathered, self.gathered = self.gathered, {}
        for block in gathered.values():
            block.drop_gathered()
