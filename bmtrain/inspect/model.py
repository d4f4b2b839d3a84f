"""Statistics of parameters and their gradients."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

import torch

from .._base.arguments import require_module, require_text
from .._ranks.agree import broadcast_json, failing_together, largest
from .._shards.at_rest import lacks_gradient
from ..global_var import context
from ..parameter import full_value, gather_flat
from ._statistics import mean_and_variance, smallest_and_largest

__all__ = ["inspect_model"]


def inspect_model(model: torch.nn.Module, param_name: str, prefix: str = "") -> list[dict[str, Any]]:
    """Statistics of the full parameters whose names match. Collective.

    Args:
        model: any module.
        param_name: shell pattern (``* ? [..]``, case-sensitive; ``*`` matches dots too) for ``prefix`` and the name.
        prefix: put in front of every name.

    Returns:
        one dict per parameter, a module's own before its children's, the same on all ranks: ``name``, ``shape``,
        ``max``, ``min``, ``mean``, ``std`` (unbiased), and ``grad_mean``, ``grad_std`` of the gradient as it is stored,
        loss scale included (0.0 if there is none).

    Raises:
        TypeError: an argument is of another type.

    Example:
        >>> model = bmtrain.BMTrainModelWrapper(torch.nn.Linear(2, 3))
        >>> rows = bmtrain.inspect.inspect_model(model, "*")  # print(format_summary(rows)) shows a table
        >>> [(row["name"], row["shape"]) for row in rows]
        [('weight', (3, 2)), ('bias', (3,))]
    """
    require_module("model", model)
    require_text("param_name", param_name)
    require_text("prefix", prefix)
    context("inspect_model()")
    found = [
        (name, param)
        for name, param in _named_parameters(model, prefix)
        if fnmatch.fnmatchcase(name, param_name)
    ]
    with failing_together("inspect_model"):
        lacks = [lacks_gradient(param) for _, param in found]
        flags = [not lack and param.grad is not None for lack, (_, param) in zip(lacks, found, strict=True)]
    highest = largest([*flags, *lacks], "inspect_model")
    has_gradient = [has and not lack for has, lack in zip(highest, highest[len(found) :], strict=False)]
    rows = [_row(name, param, has) for (name, param), has in zip(found, has_gradient, strict=True)]
    # What is not sharded may differ between ranks: rank 0's is shown.
    return [{**row, "shape": tuple(row["shape"])} for row in broadcast_json(rows, label="inspect_model")]


def _named_parameters(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, param in module._parameters.items():
        if param is not None:
            yield prefix + name, param
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_parameters(child, f"{prefix}{name}.")


def _row(name: str, param: torch.nn.Parameter, has_gradient: bool) -> dict[str, Any]:
    full = full_value(param)
    lowest, highest = smallest_and_largest(full)
    mean, variance = mean_and_variance(full)
    row = {
        "name": name,
        "shape": list(full.shape),
        "max": highest,
        "min": lowest,
        "mean": mean,
        "std": variance**0.5,
        "grad_mean": 0.0,
        "grad_std": 0.0,
    }
    del full
    if has_gradient:
        local = param.grad if param.grad is not None else torch.zeros_like(param.detach())
        mean, variance = mean_and_variance(gather_flat(param, local.detach()))
        row.update(grad_mean=mean, grad_std=variance**0.5)
    return row
