"""Full tensors of a model on rank 0, one after the other, for files that one rank writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._ranks.agree import failing_together
from .._ranks.context import require_intact
from ..global_var import context
from ..parameter import DistributedParameter, full_value, whole_shape

Table = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def first_names(entries: dict[str, Any]) -> dict[str, str]:
    """The first of the names under which each name's object is there."""
    first = {id(value): name for name, value in reversed(entries.items())}
    return {name: first[id(value)] for name, value in entries.items()}


def write_gathered(
    tensors: dict[str, torch.Tensor],
    operation: str,
    write: Callable[[Table, Callable[[str], torch.Tensor]], None],
) -> None:
    """Writes full tensors on rank 0, which holds one of them at a time. Collective.

    Args:
        tensors: by name, alike on all ranks.
        operation: the public name of the operation, for error messages.
        write: called on rank 0 with dtype and full shape of each tensor, and a function that gives one on the host;
            it must ask for them in the order of the table.
    """
    rest = list(reversed(tensors))

    def read(name: str) -> torch.Tensor:
        if rest.pop() != name:
            raise RuntimeError(f"{operation}: {name} is read out of order")
        try:
            full = full_value(tensors[name])
        except Exception:  # on all ranks: nothing is gathered after it
            rest.clear()
            raise
        value = full.cpu()
        require_intact(f"{operation}()")
        return value

    with failing_together(operation):
        for name, tensor in tensors.items():
            if isinstance(tensor, DistributedParameter):
                tensor.require_data(name)
        try:
            if context().topology.rank == 0:
                write({name: (t.dtype, tuple(whole_shape(t))) for name, t in tensors.items()}, read)
        finally:  # other ranks, and rank 0 after an error, take part in the gathers that are left
            while rest:
                read(rest[-1])
