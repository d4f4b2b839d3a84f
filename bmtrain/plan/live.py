"""Memory of gradients in a backward without arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["gradient_peak"]


class _Live(TorchDispatchMode):
    """Counts the bytes of results of operators that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[Any, int]] = {}
        self.peak: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in map(Tensor.untyped_storage, _tensors(result)):
            self._storages[storage._cdata] = (
                torch.multiprocessing.reductions.StorageWeakRef(storage),
                storage.nbytes(),
            )
        self.peak = max(self.peak, self.count())
        return result

    def count(self) -> int:
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def gradient_peak(block: torch.nn.Module, args: Any, kwargs: Any) -> int:
    """Returns by how many bytes a backward rises at most above what it begins with: gradients of activations, less the
    saved tensors that are freed until then. Without the gradients of results and of parameters.

    Args:
        block: with parameters of a `FakeTensorMode`, which is on.
        args, kwargs: of its forward.
    """
    with torch.enable_grad(), _Live() as live:
        leaves = tree_map(_leaf, (args, kwargs))
        args, kwargs = tree_map(_given, leaves)
        results = [tensor for tensor in _tensors(block(*args, **kwargs)) if tensor.requires_grad]
        inputs = [tensor for tensor in _tensors(leaves) if tensor.requires_grad]
        inputs = inputs or [param for param in block.parameters() if param.requires_grad]
        gradients = list(map(torch.empty_like, results))
        begin = live.peak = live.count()
        if results and inputs:
            torch.autograd.grad(results, inputs, gradients, allow_unused=True)
        rise: int = live.peak - begin
        return rise


def _leaf(value: Any) -> Any:
    """A tensor of the same sizes that a backward reaches."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, requires_grad=value.is_floating_point())


def _given(value: Any) -> Any:
    """Returns a tensor that a block may change in place, which it may not do to a leaf."""
    return value.clone() if isinstance(value, Tensor) else value
