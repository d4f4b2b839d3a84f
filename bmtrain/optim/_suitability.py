"""Whether an optimizer suits distributed parameters, and whether its user has thought of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import _context
from .._deprecate import warn_once
from ..global_var import rank, world_size
from ..parameter import DistributedParameter
from ._grad_stats import parameters_of

__all__ = ["refuse_whole_tensor_optimizer", "warn_of_likely_mistakes", "warn_of_unsent_gradients"]

#: What optimizers are called that use norms or factors of whole tensors, for which shards are no substitute.
_WHOLE_TENSOR_KINDS = ("adafactor", "lamb", "larc", "lars", "muon", "shampoo")


def refuse_whole_tensor_optimizer(optimizer: Any) -> None:
    """Raises ValueError for one that computes over whole tensors, if it has distributed parameters."""
    name = type(optimizer).__name__
    if not any(kind in name.lower() for kind in _WHOLE_TENSOR_KINDS):
        return
    if any(isinstance(p, DistributedParameter) for p in parameters_of(optimizer.param_groups)):
        raise ValueError(
            f"optimizer: {name} computes over whole tensors and would see this rank's shards, flat; use "
            "bmtrain.optim.AdamOptimizer, or an optimizer that works element by element"
        )


def warn_of_likely_mistakes(optimizer: Any) -> None:
    """Says on rank 0, once, that parameters are plain, or that a group is empty as if chosen by dimensions."""
    if rank() != 0:
        return
    trained = [p for p in parameters_of(optimizer.param_groups) if p.requires_grad]
    num_plain = sum(not isinstance(p, DistributedParameter) for p in trained)
    if num_plain and world_size() > 1:
        warn_once(
            "OptimManager.plain_parameters",
            f"{type(optimizer).__name__}: {num_plain} of its {len(trained)} parameters are plain ones, whose gradients "
            f"are not summed over the ranks: each of the {world_size()} ranks trains a copy of its own. "
            "BMTrainModelWrapper(model), before the optimizer is made, makes them distributed",
            stacklevel=3,
            category=UserWarning,
        )
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if empty and num_plain < len(trained):
        warn_once(
            "OptimManager.empty_group",
            f"{type(optimizer).__name__}: parameter group {empty[0]} is empty. If the groups were told apart by "
            "p.dim(): a distributed parameter is flat, whatever its shape; choose by name, or by "
            "len(p._original_shape)",
            stacklevel=3,
            category=UserWarning,
        )


def warn_of_unsent_gradients(param_groups: Iterable[Any]) -> None:
    """Says on rank 0, once, that a step does not see gradients which were left on each rank."""
    current = _context.current()
    if current is None or rank() != 0:
        return
    if current.engine.accumulation.has_unsent_of(parameters_of(param_groups)):
        warn_once(
            "OptimManager.unsent_gradients",
            "OptimManager.step: gradients of backwards in no_sync() were not sent, and this step goes without them: "
            "make the last backward before a step outside of no_sync(), or drop them by zero_grad()",
            stacklevel=3,
            category=UserWarning,
        )
