"""Full parameters outside of a forward, for reading and writing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from ._engine.whole import holding_whole
from ._shards.meta import make_shard
from .param_init import distinct_parameters

__all__ = ["ZeroContext", "whole"]

_Modules = TypeVar("_Modules", bound="torch.nn.Module | Iterable[torch.nn.Module]")


@contextmanager
def whole(module: _Modules, *, write: bool = False) -> Iterator[_Modules]:
    """Context manager in which the distributed parameters of ``module`` are full tensors. Collective.

    Each rank gets a copy of its own, in the parameters' dtype, which takes the memory of the full module: process a
    large model layer by layer. Gradients are off inside, and Blocks run without communication. A tensor-parallel
    parameter is the full slice of this rank.

    Args:
        module: a module, a Block, a list of either, or an iterable of modules.
        write: on leaving, keep the values written to the parameters; after an exception they are unchanged. Every rank
            writes the same values, of which it keeps its part. Parameters on the meta device get their shards, zeros.
            Without it, written values are dropped.

    Raises:
        RuntimeError: a Block of ``module`` runs or is in such a context already; or, without ``write``, a parameter is
            on the meta device.
        TypeError: ``module`` is something else.

    Example:
        >>> layer = bmtrain.nn.Linear(3, 2)
        >>> with bmtrain.whole(layer, write=True):
        ...     layer.weight.fill_(1.0)[0] = 5.0
        >>> layer.weight.tolist()
        [[5.0, 5.0, 5.0], [1.0, 1.0, 1.0]]
    """
    params = list(distinct_parameters(module))
    if write:
        for param in params:
            make_shard(param)
    with holding_whole(params, write=write):
        yield module


class ZeroContext:
    """Inside this context the parameters of a Block are full tensors, to be read and written. Collective.

    As :func:`bmtrain.whole` with ``write=True``, for one Block: gradients are off inside, and what all ranks write
    reaches the shards on leaving.

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

    def __init__(self, block: torch.nn.Module) -> None:
        self.block = block
        self._held = ExitStack()

    def __enter__(self) -> torch.nn.Module:
        self._held.enter_context(holding_whole(distinct_parameters(self.block), write=True))
        return self.block

    def __exit__(self, *error: Any) -> None:
        self._held.__exit__(*error)
