"""Walking over the tensors of arguments and results, whatever structure they come in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

__all__ = ["map_tensors", "snapshot", "tensors_of"]

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.device, torch.dtype, torch.Size)


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with every tensor in it replaced by ``function(tensor)``.

    Lists, tuples (named ones too), dicts and other mutable mappings, and dataclasses are walked and rebuilt with their
    own type; a container in which nothing changes is returned itself. Everything else is a leaf.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = {}
        for key, item in value.items():
            new = map_tensors(item, function)
            if new is not item:
                changed[key] = new
        return _with_items(value, changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            new = map_tensors(item, function)
            if new is not item:
                changed[field.name] = new
        return _with_fields(value, changed)
    return value


def _with_items(value: Any, changed: dict[Any, Any]) -> Any:
    if not changed:
        return value
    clone = copy.copy(value)
    for key, new in changed.items():
        clone[key] = new
    return clone


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    if not changed:
        return value
    clone = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(clone, name, new)
    return clone


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, in the order in which :func:`map_tensors` meets them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _LEAVES):
        return
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, MutableMapping):
        for item in value.values():
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name, None))


def snapshot(value: Any) -> Any:
    """A copy of the containers in ``value`` (their tensors are shared), or ``value`` itself if it holds none.

    Besides lists, dicts and sets it copies objects that keep their state in ``__dict__``, such as key-value caches, so
    that a forward that fills them can be run again on what it was given. Modules, functions and types are not copied.
    """
    if isinstance(value, (torch.Tensor, torch.nn.Module, type, *_LEAVES)) or callable(value):
        return value
    if isinstance(value, list):
        return type(value)(snapshot(item) for item in value)
    if isinstance(value, tuple):
        items = [snapshot(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        for key, item in value.items():
            clone[key] = snapshot(item)
        return clone
    if isinstance(value, (set, bytearray)):
        return copy.copy(value)
    if hasattr(value, "__dict__"):
        clone = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(clone, name, snapshot(item))
        return clone
    return value
