"""The policy of Blocks that are built without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..global_var import context
from .engine import current_engine
from .policy import BlockPolicy


@contextmanager
def default_policy(policy: BlockPolicy) -> Iterator[None]:
    """Context manager that sets the policy of Blocks built in it; their own arguments take precedence.

    Args:
        policy: for Blocks built without ``policy``, ``zero_level`` and ``use_checkpoint``.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`.
        TypeError: ``policy`` is not a :class:`BlockPolicy`.

    Example:
        >>> with bmtrain.default_policy(bmtrain.BlockPolicy(level=2)):
        ...     model = bmtrain.BMTrainModelWrapper(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    """
    if not isinstance(policy, BlockPolicy):
        raise TypeError(f"policy: expected a BlockPolicy, got {policy!r:.80} ({type(policy).__name__})")
    engine = current_engine(context())
    before, engine.default_policy = engine.default_policy, policy
    try:
        yield
    finally:
        engine.default_policy = before
