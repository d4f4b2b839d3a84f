"""Full parameters of a Block outside its forward."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ._engine.schedule import Phase

if TYPE_CHECKING:
    from .block_layer import Block

__all__ = ["ZeroContext"]


class ZeroContext:
    """Inside this context the parameters of a Block are full tensors, to be read. Collective to enter.

    Gradients are off inside. What is written to a parameter there is lost: it is the gathered copy;
    ``load_state_dict`` changes values.

    Args:
        block: a :class:`bmtrain.Block`. Contexts of one Block do not nest.

    Raises:
        RuntimeError: if the Block runs or is in such a context already.

    Example:
        >>> block = bmtrain.Block(bmtrain.nn.Linear(2, 3))
        >>> with ZeroContext(block):
        ...     print(block.weight.shape)
        torch.Size([3, 2])
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Block:
        runtime = self.block._runtime
        if runtime.is_bound:
            raise RuntimeError(
                f"the parameters of {self.block._label} are full already: contexts do not nest"
            )
        try:
            runtime.open(Phase.EVALUATE)
        except BaseException:
            runtime.abandon()
            raise
        self._no_grad.__enter__()
        return self.block

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._no_grad.__exit__(kind, error, traceback)
        self.block._runtime.close(keep=False)
