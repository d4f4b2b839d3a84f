"""Checks of groups and numeric options of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from .._base.arguments import require_number


def check_group(group: Any) -> None:
    """Raises TypeError unless ``group`` is a dict with ``params``."""
    if not (isinstance(group, dict) and "params" in group):
        raise TypeError(f"param_group: expected a dict with 'params', got {group!r:.80}")
    if isinstance(group["params"], nn.Module):
        _refuse(type(group["params"]).__name__)


def listed_parameters(params: Any) -> list[Any]:
    """Returns parameters, with names or without, or groups as a list; TypeError for a model and other things."""
    if isinstance(params, (Tensor, nn.Module, Mapping, str)) or not isinstance(params, Iterable):
        _refuse(type(params).__name__)
    items = list(params)
    for item in items:
        if not isinstance(item, (Tensor, tuple, dict)):
            _refuse(f"a {type(params).__name__} with {type(item).__name__}")
    return items


def _refuse(got: str) -> NoReturn:
    raise TypeError(f"params: expected parameters or group dicts, as of model.parameters(), got {got}")


def check_not_negative(options: dict[str, Any], *names: str) -> None:
    """Raises TypeError or ValueError unless all of ``names`` are numbers of 0 or more."""
    for name in names:
        require_number(name, options[name])
        if not options[name] >= 0:
            raise ValueError(f"{name}: expected 0 or more, got {options[name]}")


def check_betas(options: dict[str, Any], name: str = "betas") -> None:
    """Raises TypeError or ValueError unless the option ``name`` is two numbers in [0, 1)."""
    betas = options[name]
    if not isinstance(betas, (tuple, list)):
        raise TypeError(f"{name}: expected a pair of numbers, got {betas!r} ({type(betas).__name__})")
    for beta in betas:
        require_number(name, beta)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name}: expected two numbers from 0 up to but not including 1, got {betas}")
