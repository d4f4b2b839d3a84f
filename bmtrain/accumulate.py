"""Gradient accumulation without communication."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ._engine.engine import current_engine
from .global_var import context

__all__ = ["no_sync"]


def no_sync() -> AbstractContextManager[None]:
    """Context manager in which backwards accumulate gradients on each rank and send nothing.

    The first backward after it sends the sums; until then ``.grad`` does not have them. Each rank holds full gradients
    meanwhile, in the parameters' dtype, or the ``reduce_dtype`` of a block's policy. All ranks must do so. Blocks
    with ``keep_gradients=False`` in their policy send as usual; blocks with ``keep_gathered=True`` are gathered once
    for all these backwards.

    ``zero_grad()`` of optimizers, modules and :class:`OptimManager <bmtrain.optim.OptimManager>` drops the unsent
    gradients of their parameters, and ``p.grad = None`` drops one, on all ranks alike; between the backwards of an
    ``OptimManager(accumulate=)`` they drop none. A parameter that is frozen afterwards still receives its unsent
    gradients.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`, or in a loop over virtual shards.

    Example:
        >>> block = bmtrain.Block(bmtrain.nn.Linear(2, 1, bias=False))
        >>> with bmtrain.no_sync():
        ...     block(torch.ones(1, 2)).sum().backward()
        >>> block(torch.ones(1, 2)).sum().backward()
        >>> next(block.parameters()).grad.tolist()  # of both
        [2.0, 2.0]
    """
    engine = current_engine(context())
    if engine.virtual.is_open:
        raise RuntimeError("no_sync: virtual shards are summed one by one; leave it out of a loop over them")
    return engine.gradients.no_sync()
