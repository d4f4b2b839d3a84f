"""Norms of whole tensors, for optimizers that need nothing else of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._C import ReduceOp
from .._ranks import context
from .._ranks.comm import wire_device
from ._grad_stats import counted_here, power_sums

__all__ = ["whole_norms"]

_NOTHING = torch.zeros((), dtype=torch.float64)


@torch.no_grad()
def whole_norms(params: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Returns the 2-norms of tensors that are divided over ranks as parameters are. Collective.

    One message of 8 bytes for each norm adds up the squares of all ranks, in fp64. So an optimizer that needs norms,
    as LAMB (You et al., "Large Batch Optimization for Deep Learning", 2020), works on shards: the rest of its step is
    computed element by element. `OptimManager` accepts it if its class has ``for_shards = True``.

    Args:
        params: parameters, alike on all ranks.
        tensors: for each parameter a tensor with the elements of this rank, as ``p`` itself or an update of it.

    Returns:
        The norms, of shape ``(len(params),)`` in fp32 on the run device, the same on all ranks.

    Raises:
        ValueError: a tensor has another number of elements than its parameter.

    Example:
        >>> p = bmtrain.nn.Linear(2, 2, bias=False).weight
        >>> bmtrain.optim.whole_norms([p], [torch.ones_like(p)])
        tensor([2.])
    """
    for p, tensor in zip(params, tensors, strict=True):
        if p.numel() != tensor.numel():
            raise ValueError(
                f"tensors: expected the elements of this rank's part, {p.numel()}, got {tensor.numel()}"
            )
    current = context.current()
    counted = {id(p) for p in (params if current is None else counted_here(params))}
    parts = [
        power_sums([tensor.detach().contiguous()], 2)[0] if id(p) in counted and tensor.numel() else _NOTHING
        for p, tensor in zip(params, tensors, strict=True)
    ]
    if current is None or not parts:
        return _joined(parts, "cpu").sqrt_().float()
    comm = current.world.comm
    squares = _joined(parts, wire_device(comm))
    comm.all_reduce(squares, ReduceOp.SUM, "norms of parameters").wait()
    return squares.sqrt_().float().to(current.device)


def _joined(parts: list[Tensor], device: torch.device | str) -> Tensor:
    return torch.stack([part.reshape(()).to(device, torch.float64) for part in [*parts, _NOTHING]])[:-1]
