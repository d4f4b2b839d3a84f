"""Barrier and the reductions that training scripts use for logging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._base.arguments import require_tensor
from ._base.deprecate import warn_once
from ._ranks.collectives import all_gather, all_reduce
from .global_var import context

if TYPE_CHECKING:
    from ._C import Communicator

__all__ = ["gather_result", "sum_loss", "synchronize", "wait_loader"]


def synchronize() -> None:
    """Waits until every rank has called it and the work queued on this rank's device has completed. Collective.

    Raises:
        RuntimeError: before `init_distributed`.
        CommunicationError: a rank does not come within the time-out, or has failed.

    Example:
        >>> bmtrain.synchronize()  # before a clock is read, say
    """
    current = context("synchronize()")
    if current.device.type == "cuda":
        torch.cuda.synchronize(current.device)
    current.world.comm.barrier("synchronize")
    for (
        comm
    ) in current.communicators():  # so that no event is queried while, e.g., the program captures a graph
        comm.forget_completed()


def wait_loader() -> None:
    """Waits until parameters being loaded are usable; nothing is ever pending, kept for old scripts.

    Raises:
        RuntimeError: before `init_distributed`.
    """
    context("wait_loader()")


def sum_loss(loss: torch.Tensor, comm: Communicator | None = None) -> torch.Tensor:
    """Returns the mean of ``loss`` over the ranks: despite the name not a sum. Collective.

    Args:
        loss: floating-point tensor of the same shape on every rank.
        comm: communicator; default all ranks.

    Raises:
        RuntimeError: before `init_distributed`.

    Example:
        >>> bmtrain.sum_loss(torch.tensor(2.0))
        tensor(2.)
    """
    require_tensor("loss", loss)
    warn_once("sum_loss", "sum_loss() is deprecated: write distributed.all_reduce(loss, 'avg')")
    return all_reduce(loss, "avg", comm)


def gather_result(x: torch.Tensor) -> torch.Tensor:
    """Concatenates the ranks' tensors along dim 0, in rank order. Collective.

    Args:
        x: tensor of the same shape and dtype on every rank, on any device; 0-d counts as one element.

    Returns:
        tensor of shape ``(world_size * x.shape[0], ...)`` on the device of ``x``.

    Raises:
        RuntimeError: before `init_distributed`.

    Example:
        >>> bmtrain.gather_result(torch.ones(3)).shape  # (3 * world_size,)
        torch.Size([3])
    """
    current = context("gather_result()")
    require_tensor("x", x)
    warn_once("gather_result", "gather_result() is deprecated: write distributed.all_gather(x).flatten(0, 1)")
    rows = x.unsqueeze(0) if x.dim() == 0 else x
    return all_gather(rows.to(current.device)).flatten(0, 1).to(x.device)


# `bmtrain.synchronize` is this function, which hides the module of the same name from `import
# bmtrain.synchronize as s` (but not from `from bmtrain.synchronize import ...`): it carries the others along.
for _function in (gather_result, sum_loss, synchronize, wait_loader):
    setattr(synchronize, _function.__name__, _function)
del _function
