"""Copies of arguments, so that a forward can be run again on the same values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from .tree import NO_CONTAINERS, attributes_of, is_opaque, items_of, with_items


def snapshot(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """A copy of all mutable containers in ``value``, so that a forward can be run again on its original
    arguments.

    Tensors are shared, not copied. An object that occurs twice occurs twice in the copy as well. Functions are shared,
    too; ``seen`` receives them and the copies.

    Raises:
        TypeError: for a generator, or an iterator over others (zip), which can be read only once.
    """
    if isinstance(value, NO_CONTAINERS):
        return value
    seen = {} if seen is None else seen
    if is_opaque(value):
        seen[id(value)] = value
        return value
    if isinstance(value, tuple):
        return with_items(value, [snapshot(item, seen) for item in value])
    if id(value) in seen:
        return seen[id(value)]
    try:
        if isinstance(value, Iterator) and any(isinstance(it, Iterator) for it in value.__reduce_ex__(4)[1]):
            raise TypeError("its copy would read the same iterators")  # zip, map, ...
        of_numpy = type(value).__module__.startswith("numpy.random")  # its copies would share one state
        clone = seen[id(value)] = copy.deepcopy(value) if of_numpy else copy.copy(value)
    except Exception as error:
        if isinstance(value, Iterator):
            raise TypeError(
                f"argument of type {type(value).__name__}: it can be read only once, but a Block with "
                "use_checkpoint=True runs its forward twice; pass a list or tuple"
            ) from error
        return value  # a lock, a process group: nothing that a forward changes
    for key, item in items_of(clone):
        clone[key] = snapshot(item, seen)
    if clone is not value:
        for name, item in attributes_of(clone):
            object.__setattr__(clone, name, snapshot(item, seen))
    return clone
