"""Lists of layers, which are sequences and run one after the other, each on the hidden states of the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class LayerSequence(torch.nn.Module):
    """Its children are its items, in their order."""

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getitem__(self, index: int | str | slice) -> Any:
        """One layer, by its number or its name, or a list of some."""
        if isinstance(index, str):
            return self._modules[index]
        return list(self._modules.values())[index]


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
    results = () if result is None else result if isinstance(result, (tuple, list)) else (result,)
    if len(results) < count:
        raise ValueError(f"layer {name}: expected {count} results or more (num_hidden), got {len(results)}")
    return tuple(results[:count])


def stacked(states: list[torch.Tensor]) -> torch.Tensor:
    """One hidden state of all layers, ``(num_layers, *shape)``."""
    shapes = {tuple(state.shape) for state in states}
    if len(shapes) > 1:
        raise ValueError(f"return_hidden_states: expected hidden states of one shape, got {sorted(shapes)}")
    return torch.stack(states)
