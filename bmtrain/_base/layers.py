"""Layers that run one after the other, each on the hidden states of the one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def run_layers(
    layers: Mapping[str, Any],
    hidden: tuple[Any, ...],
    rest: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int,
    inputs: list[tuple[torch.Tensor, ...]] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Runs layers in order and returns the last hidden states; appends the inputs of each layer to ``inputs``."""
    for name, layer in layers.items():
        if inputs is not None:
            inputs.append(hidden)
        hidden = _hidden_states(layer(*hidden, *rest, **kwargs), count, name)
    return hidden


def _hidden_states(result: Any, count: int, name: str) -> tuple[torch.Tensor, ...]:
    results = result if isinstance(result, (tuple, list)) else (result,)
    if len(results) < count:
        raise ValueError(f"layer {name}: expected at least {count} results (num_hidden), got {len(results)}")
    return tuple(results[:count])


def stacked(states: list[torch.Tensor]) -> torch.Tensor:
    """One hidden state of all layers, ``(num_layers, *shape)``."""
    shapes = {tuple(state.shape) for state in states}
    if len(shapes) > 1:
        raise ValueError(f"return_hidden_states: expected hidden states of one shape, got {sorted(shapes)}")
    return torch.stack(states)
