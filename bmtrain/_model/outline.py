"""Outlines of state dicts: names and the parameters behind them, without gathering."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from .._base.tensors import place_of
from ..parameter import DistributedParameter
from .state_dict import Collection, collecting, install_hooks_below


@dataclass(frozen=True)
class Outline:
    """A state dict with distributed parameters in the place of full tensors.

    Args:
        entries: by key, in the order of the state dict: a parameter, a full tensor of this rank, or a value. A tensor
            with several keys (tied weights) is one object.
        metadata: as in the state dict.
    """

    entries: dict[str, Any]
    metadata: Any


class _StandIns(Collection):
    """Represents every distributed parameter by a tensor without data that identifies it."""

    needs_data = False

    def __init__(self) -> None:
        super().__init__(keeps=False)
        self.parameters: dict[int, DistributedParameter] = {}  # by identity of the stand-in
        self._given: dict[int, torch.Tensor] = {}  # by identity of the parameter

    def collect(self, param: DistributedParameter) -> torch.Tensor:
        if id(param) not in self._given:
            given = torch.empty(param._tp_original_shape, dtype=param.dtype, device="meta")
            self._given[id(param)] = given
            self.parameters[id(given)] = param
        return self._given[id(param)]


def outline_of(model: torch.nn.Module) -> Outline:
    """Returns the outline of a model's state dict.

    A ``state_dict`` that the model's class overrides is called, and may communicate.

    Raises:
        TypeError: such a method computes with the values of parameters, which are not available.
    """
    install_hooks_below(model)
    stand_ins = _StandIns()
    with collecting(keeps=False, collection=stand_ins):
        state = model.state_dict()
    entries: dict[str, Any] = {}
    whole: dict[Hashable, torch.Tensor] = {}
    for key, value in state.items():
        if id(value) in stand_ins.parameters:
            value = stand_ins.parameters[id(value)]
        elif isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise TypeError(f"{key}: expected a dense tensor, got layout {value.layout}")
            value = whole.setdefault(place_of(value), value.detach())
        entries[key] = value
    return Outline(entries, getattr(state, "_metadata", None))
