"""State outside modules that a forward reads: objects such as configurations, containers, NumPy arrays, generators.

Modules refer to them, and functions among the arguments, and scripts and forwards change their fields and items. A
second run of a forward begins with the same ones as the first. Tensors in them are left to :mod:`.plain_state`.
Of tensors that functions refer to, large ones are not copied: writes to them are errors.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from .._base.tree import attributes_of

#: Tensors and arrays up to this size are copied before each forward; larger tensors only once they are known to be
#: written to.
SMALL_BYTES = 1 << 16
#: Bounds of the search: references from a module to an object, objects, and items of a container.
_DEPTH, _MOST_HOLDERS, _MOST_ITEMS = 4, 100, 1000
#: Modules of classes whose objects have no fields of users, or belong to threads.
_FOREIGN = (sys.stdlib_module_names - {"argparse", "collections", "types"}) | {"bmtrain", "numpy", "torch"}
_OF_THREADS = {"_queue", "_thread", "asyncio", "concurrent", "multiprocessing", "queue", "threading"}
_CONTAINERS = (dict, list, deque, set)
_NOT_OF_USERS = {*vars(torch.nn.Module()), "_full_shapes"}
#: A container, the __dict__ of an object, an object with __slots__, a variable of a closure or an array, and a copy of
#: what it contains.
Holder = tuple[Any, Any]
#: The __dict__ of a module and the name of an attribute.
_Slot = tuple[dict[str, Any], str]


def _origin(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _fields(value: Any) -> dict[str, Any] | None:
    """Returns the ``__dict__`` of an object that users' code changes, or None."""
    if isinstance(value, (type, torch.nn.Module, torch.Tensor)) or _origin(value) in _FOREIGN:
        return None
    fields = getattr(value, "__dict__", None)
    return fields if isinstance(fields, dict) and not _is_of_threads(fields) else None


def _is_of_threads(fields: dict[str, Any]) -> bool:
    """Whether a thread may change the fields at any time: one is a lock, a queue or the like."""
    return any(_origin(field) in _OF_THREADS for field in fields.values())


def _is_small_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(value, numpy.ndarray)
        and value.nbytes <= SMALL_BYTES
        and value.flags.writeable
        and not value.dtype.hasobject
    )


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    of_numpy = type(value).__module__.startswith("numpy.random.")
    has_state = of_numpy and (hasattr(value, "bit_generator") or hasattr(value, "get_state"))
    return has_state or isinstance(value, torch.Generator)


def _state_of(generator: Any) -> Any:
    if hasattr(generator, "get_state"):  # an old one of numpy
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return copy.deepcopy(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "set_state"):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _is_data(value: Any) -> bool:
    """Whether ``value`` is a tensor whose version shows what is written to it, and no result of a graph."""
    return type(value) is torch.Tensor and not (value.requires_grad or value.is_inference())


def _holders(value: Any, with_tensors: bool = False) -> Iterator[Any]:
    """Yields what contains the state of ``value``; nothing for numbers, modules and tensors outside functions."""
    if isinstance(value, tuple):
        for item in value:
            yield from _holders(item, with_tensors)
    elif callable(value) and (parts := _parts(value)):
        yield from _holders(parts, with_tensors=True)
    elif (
        (with_tensors and _is_data(value))
        or isinstance(value, CellType)
        or _is_small_array(value)
        or _is_generator(value)
    ):
        yield value
    elif (fields := _fields(value)) is not None:
        yield fields
    if _has_slots(value) or (isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS):
        yield value


def _parts(function: Any) -> tuple[Any, ...]:
    """Returns what a function, a method or a partial refers to."""
    if isinstance(function, FunctionType):
        return (
            *(function.__closure__ or ()),
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
            *([function.__dict__] if function.__dict__ else ()),
        )
    if isinstance(function, partial):
        return function.func, function.args, function.keywords
    owner = getattr(function, "__self__", None)
    return () if owner is None else (owner,)


def _has_slots(value: Any) -> bool:
    if isinstance(value, (type, torch.nn.Module, torch.Tensor)) or callable(value):
        return False
    has_slots = any(kind.__dict__.get("__slots__") for kind in type(value).__mro__)
    return has_slots and _origin(value) not in _FOREIGN and not _is_of_threads(dict(attributes_of(value)))


def _items(holder: Any) -> Any:
    """Returns the items of a holder, or their dict; None for an array or a generator."""
    if isinstance(holder, CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # a variable without a value
            return []
    if isinstance(holder, _CONTAINERS):
        return holder
    return dict(attributes_of(holder)) if _has_slots(holder) else None


def _content(holder: Any) -> Any:
    items = _items(holder)
    if isinstance(holder, torch.Tensor):
        is_plain = holder.layout is torch.strided and not holder.is_meta and 0 not in holder.stride()
        old = holder.detach().clone() if is_plain and holder.nbytes <= SMALL_BYTES else None
        return _unsafe_preserve_version_counter(holder), old
    if items is None:
        return _state_of(holder) if _is_generator(holder) else holder.copy()
    return dict(items) if isinstance(items, dict) else set(items) if isinstance(items, set) else list(items)


def _differs(holder: Any, content: Any) -> bool:
    items = _items(holder)
    if isinstance(items, dict):
        return items.keys() != content.keys() or not all(map(is_, items.values(), content.values()))
    if isinstance(items, set):
        return bool(items != content)
    if isinstance(holder, torch.Tensor):
        return bool(content[0].prev_versions != (holder._version,))
    if items is not None:
        return len(items) != len(content) or not all(map(is_, items, content))
    if _is_generator(holder):
        state = _state_of(holder)
        if isinstance(state, torch.Tensor):
            return not torch.equal(state, content)
        return pickle.dumps(state) != pickle.dumps(content)
    return bool(holder.shape != content.shape or holder.tobytes() != content.tobytes())


def contents_of(holders: Iterable[Any]) -> list[Holder]:
    """Returns the holders, and copies of what they contain."""
    return [(holder, _content(holder)) for holder in holders]


def _put_tensor(tensor: torch.Tensor, content: Any, label: str) -> None:
    """Gives a tensor its content and its version again: what both runs save of it is the same for autograd."""
    version, old = content
    if old is None or old.shape != tensor.shape or tensor.requires_grad:
        raise RuntimeError(
            f"{label}: a tensor (shape {tuple(tensor.shape)}) that a function refers to (as a variable of a closure, a "
            "default or an argument of a partial) was modified in place after the forward started, and has more than "
            f"{SMALL_BYTES >> 10} KiB, another shape or a gradient, so that the forward cannot be run again; keep "
            "it in a buffer, or build the Block with use_checkpoint=False"
        )
    with torch.no_grad(), version:
        tensor.copy_(old)


def put_contents(holders: Iterable[Holder], label: str) -> None:
    """Gives the holders their content again, in the call of the Block ``label``."""
    for holder, content in holders:
        if not _differs(holder, content):
            continue
        if isinstance(holder, torch.Tensor):
            _put_tensor(holder, content, label)
        elif isinstance(holder, dict):
            holder.update(content)
            for name in holder.keys() - content.keys():
                del holder[name]
        elif isinstance(holder, set):
            holder |= content
            holder &= content
        elif isinstance(holder, deque):
            holder.clear()
            holder.extend(content)
        elif isinstance(holder, list):
            holder[:] = content
        elif isinstance(holder, CellType):
            if content:
                holder.cell_contents = content[0]
            else:
                del holder.cell_contents
        elif _has_slots(holder):
            for name in _items(holder).keys() - content.keys():
                object.__delattr__(holder, name)
            for name, item in content.items():
                object.__setattr__(holder, name, item)
        elif _is_generator(holder):
            _set_state(holder, content)
        else:
            holder[...] = content


class HelperState:
    """The objects that attributes of modules lead to.

    Args:
        slots: where there are such attributes, or None, in the place of which one may come.
    """

    def __init__(self, slots: list[_Slot]) -> None:
        self._slots = slots
        self._values: list[Any] = []
        self._held: list[Holder] = []

    def before_forward(self) -> list[Holder]:
        """Returns what the objects contain now."""
        values = [place.get(name) for place, name in self._slots]
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        if not same or any(_differs(*each) for each in self._held):
            self._values, self._held = values, reached_from(values)
        return self._held


def helpers_of(modules: Iterable[torch.nn.Module]) -> HelperState | None:
    """Returns the state that the attributes of ``modules`` lead to, or None if there is none."""
    slots = [
        (vars(module), name)
        for module in modules
        for name, value in vars(module).items()
        if name not in _NOT_OF_USERS and (value is None or next(_holders(value), None) is not None)
    ]
    return HelperState(slots) if slots else None


def reached_from(values: list[Any]) -> list[Holder]:
    """Returns what holds state in ``values`` and in what they refer to, the nearest first."""
    found: dict[int, Holder] = {}
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for holder in (holder for value in values for holder in _holders(value)):
            if id(holder) not in found and len(found) < _MOST_HOLDERS:
                found[id(holder)] = (holder, _content(holder))
                items = _items(holder)
                inner += items.values() if isinstance(items, dict) else items or ()
                if isinstance(holder, CellType):
                    found.update({id(each): (each, _content(each)) for each in filter(_is_data, items)})
        values = inner
    return list(found.values())
