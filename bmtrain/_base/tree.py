"""Traversal of the tensors in arguments and results of any nested structure.

Tuples (named ones too) are rebuilt where a tensor in them is replaced. Mutable containers keep their
identity and are changed in place: lists and other mutable sequences, dicts and other mutable mappings,
dataclasses, and objects that keep their state in ``__dict__``, such as key-value caches, also callable ones. Modules,
optimizers, functions and types are leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from copyreg import _slotnames as slots_of  # type: ignore[attr-defined]
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any

import torch

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.device, torch.dtype, torch.Size)
_OPAQUE = (torch.nn.Module, torch.optim.Optimizer, type)
BYTES = (bytearray, memoryview)
NO_CONTAINERS = (torch.Tensor, *_LEAVES)
_WITHOUT_STATE = (*NO_CONTAINERS, *_OPAQUE)


def is_opaque(value: Any) -> bool:
    """Whether ``value`` is a module, an optimizer, a type or a function, or is of torch and called as one."""
    kind = type(value)
    is_called = not isinstance(kind.__call__, FunctionType) or kind.__module__.startswith("torch")
    return isinstance(value, _OPAQUE) or (callable(value) and is_called)


def is_function(value: Any) -> bool:
    """Whether ``value`` is a function, or is of torch and called as one."""
    return is_opaque(value) and not isinstance(value, _OPAQUE)


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """The attributes of an object that is traversed, in ``__dict__`` or ``__slots__``; none for leaves."""
    if is_opaque(value):
        return []
    found = list(getattr(value, "__dict__", {}).items())
    return found + [(name, getattr(value, name)) for name in slots_of(type(value)) if hasattr(value, name)]


def data_fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass; no attributes of other objects."""
    if not dataclasses.is_dataclass(value) or isinstance(value, _OPAQUE):
        return []
    names = (field.name for field in dataclasses.fields(value))
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def detached(tensor: torch.Tensor, alias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``alias``, or a new one without history, with the attributes that a script has given to the tensor."""
    alias = tensor.detach() if alias is None else alias
    if type(tensor) is torch.Tensor:  # a subclass has its own
        vars(alias).update(vars(tensor))
    return alias


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a mutable container, with indices or keys, at which others may be put meanwhile."""
    if isinstance(value, MutableSequence) and not isinstance(value, BYTES):
        return enumerate(value)
    return list(value.items()) if isinstance(value, MutableMapping) else ()


def with_items(value: Any, items: list[Any]) -> Any:
    """``value``, a tuple or a named one, with other items; itself if they are the same objects."""
    if all(map(is_, items, value)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def replace_tensors(
    value: Any,
    function: Callable[[torch.Tensor], Any],
    _seen: dict[int, Any] | None = None,
    attributes: Callable[[Any], list[tuple[str, Any]]] = attributes_of,
) -> Any:
    """``value`` with every tensor in it replaced by ``function(tensor)``; mutable containers are changed in place.

    ``attributes`` returns the attributes of an object that are traversed.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, tuple):
        return with_items(value, [replace_tensors(item, function, _seen, attributes) for item in value])
    seen = {} if _seen is None else _seen
    if id(value) in seen:
        return value
    seen[id(value)] = value
    for key, item in items_of(value):
        new = replace_tensors(item, function, seen, attributes)
        if new is not item:
            value[key] = new
    for name, item in attributes(value):
        new = replace_tensors(item, function, seen, attributes)
        if new is not item:
            object.__setattr__(value, name, new)
    return value


def replace_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    function: Callable[[torch.Tensor], Any],
    attributes: Callable[[Any], list[tuple[str, Any]]] = attributes_of,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with every tensor in them replaced, see :func:`replace_tensors`."""
    replaced = partial(replace_tensors, function=function, attributes=attributes)
    return (
        tuple(map(replaced, args)),
        {name: replaced(value) for name, value in kwargs.items()} if kwargs else kwargs,
    )


def tensors_of(value: Any, _seen: dict[int, Any] | None = None) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, in the order in which :func:`replace_tensors` meets them."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, _LEAVES):
        return
    seen = {} if _seen is None else _seen
    if isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item, seen)
        return
    if id(value) in seen:
        return
    seen[id(value)] = value
    for _, item in (*items_of(value), *attributes_of(value)):
        yield from tensors_of(item, seen)


def has_containers(value: Any) -> bool:
    """Whether ``value`` is or contains a mutable object other than a tensor, or a function, which may refer to one."""
    return (
        any(map(has_containers, value)) if isinstance(value, tuple) else not isinstance(value, _WITHOUT_STATE)
    )


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Every tensor once, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())
