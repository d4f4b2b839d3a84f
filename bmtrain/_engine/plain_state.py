"""State that torch does not track and a forward may change: attributes of modules, random numbers of Python and NumPy.

Comparing everything before and after each forward would be slow. The first forward that is to run again shows what
changes; later ones keep only that. Numbers, strings and flags are left alone, so that counters count each run.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch

from .._base.generators import host_state, is_same_host_state, set_host_state

_OF_TORCH = frozenset(vars(torch.nn.Module()))
_CONTAINERS = (tuple, list, dict, deque)
_ABSENT: Any = object()
#: The __dict__ of a module, the name of an attribute, and whether forwards replace its value.
_Place = tuple[dict[str, Any], str, bool]


class _Attribute(NamedTuple):
    """An attribute at the start of a forward; ``kept`` is a copy of its value, or of the state of a generator."""

    place: dict[str, Any]
    name: str
    value: Any
    kept: Any

    @classmethod
    def of(cls, place: dict[str, Any], name: str, is_replaced: bool = False) -> _Attribute:
        value = kept = place.get(name, _ABSENT)
        if isinstance(value, torch.Generator):
            kept = value.get_state()
        elif isinstance(value, torch.Tensor):
            if not (value.requires_grad and value.is_leaf):
                kept = value.detach() if is_replaced else value.detach().clone()
        elif isinstance(value, _CONTAINERS):
            kept = copy.copy(value)
        return cls(place, name, value, kept)

    def has_changed(self) -> bool:
        now = self.place.get(self.name, _ABSENT)
        if now is not self.value:
            return _is_state(self.name, now)  # not where a module or a parameter has come
        if isinstance(now, _CONTAINERS):
            return len(now) != len(self.kept) or not all(map(is_, _items(now), _items(self.kept)))
        value = now.get_state() if isinstance(now, torch.Generator) else now
        return (
            isinstance(value, torch.Tensor) and value is not self.kept and not torch.equal(value, self.kept)
        )

    def put(self, itself: bool = False) -> None:
        """Gives the module its value again: a copy of it, or ``itself``."""
        value = self.value if itself else self.kept
        if isinstance(self.value, torch.Generator):
            self.value.set_state(self.kept)
            value = self.value
        elif not itself and isinstance(value, torch.Tensor) and value is not self.value:
            value = value.clone()
        elif not itself and isinstance(value, _CONTAINERS):
            value = copy.copy(value)
        if value is _ABSENT:
            self.place.pop(self.name, None)
        else:
            self.place[self.name] = value


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _is_state(name: str, value: Any) -> bool:
    """Whether an attribute may hold state: a tensor, a generator, tensors in a container, or nothing yet."""
    if name in _OF_TORCH:
        return False
    if isinstance(value, _CONTAINERS):
        return any(isinstance(item, torch.Tensor) for item in _items(value))
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and not value.is_meta
    return value is None or isinstance(value, torch.Generator)


class PlainState:
    """The state of this kind that the forwards of a Block's modules change.

    Attributes:
        is_unused: whether they change none.
    """

    def __init__(self) -> None:
        self.is_unused = False
        self._changing: list[_Place] | None = None  # None before the first forward
        self._draws = True

    def before_forward(self, modules: Iterable[torch.nn.Module]) -> PlainSnapshot:
        """Takes a snapshot; :meth:`PlainSnapshot.after_forward` must be called when the forward has run."""
        snapshot = PlainSnapshot(self, host_state() if self._draws else None)
        if self._changing is None:
            snapshot.known = [(vars(module), set(vars(module))) for module in modules]
            found = [(place, name) for place, names in snapshot.known for name in names]
            snapshot.attributes = [
                _Attribute.of(place, name) for place, name in found if _is_state(name, place[name])
            ]
        else:
            snapshot.attributes = [_Attribute.of(*place) for place in self._changing]
        return snapshot

    def learn(self, changed: Iterable[_Attribute], draws: bool) -> None:
        """Records the attributes that the first forward changed, and whether it drew random numbers."""
        self._changing = [(a.place, a.name, a.place.get(a.name) is not a.value) for a in changed]
        self._draws = draws
        self.is_unused = not (self._changing or draws)


class PlainSnapshot:
    """Attributes and random numbers at the start of a forward; ``known``: all names, in the first forward."""

    def __init__(self, state: PlainState, numbers: tuple[Any, Any] | None) -> None:
        self._state = state
        self._numbers = numbers
        self.attributes: list[_Attribute] = []
        self.known: list[tuple[dict[str, Any], set[str]]] | None = None

    def after_forward(self) -> None:
        """After the first forward: keeps, now and in later forwards, only what has changed."""
        if self.known is None or self._numbers is None:
            return
        new = [(place, name) for place, names in self.known for name in place.keys() - names]
        self.attributes = [each for each in self.attributes if each.has_changed()]
        self.attributes += [
            _Attribute(place, name, _ABSENT, _ABSENT) for place, name in new if _is_state(name, place[name])
        ]
        self.known = None
        if is_same_host_state(self._numbers, host_state()):
            self._numbers = None
        self._state.learn(self.attributes, self._numbers is not None)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager with the state of the snapshot; afterwards the current one is put back."""
        current = [_Attribute.of(each.place, each.name, True) for each in self.attributes]
        numbers = None if self._numbers is None else host_state()
        for each in self.attributes:
            each.put()
        if self._numbers is not None:
            set_host_state(self._numbers)
        try:
            yield
        finally:
            for each in current:
                each.put(itself=True)
            if numbers is not None:
                set_host_state(numbers)
