"""State that torch does not track and a forward may change: attributes of modules, random numbers of Python and NumPy.

Comparing everything before and after each forward would be slow. The first forward that is to run again shows what
changes in place; later ones keep only that. Attributes that are replaced, by a forward or between forward and backward,
need no copy: the second run has the values of the first. Integers that forwards count up count each run.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .._base.deprecate import warn_once
from .._base.generators import host_state, is_same_host_state, set_host_state
from .._base.tensors import version_of
from .._base.tree import with_items
from .helper_state import SMALL_BYTES, Holder, contents_of, put_contents

_OF_TORCH = frozenset(vars(torch.nn.Module()))
_REGISTERED = ("_modules", "_parameters", "_buffers")
_CONTAINERS = (tuple, list, dict, deque)
_ABSENT: Any = object()
#: Modules that have other attributes now, and what their __dict__ was.
_Changed = Iterable[tuple[torch.nn.Module, dict[str, Any]]]
#: The __dict__ of a module, the name of an attribute, and whether forwards replace its value.
_Place = tuple[dict[str, Any], str, bool]


#: Dicts of hooks, of modules and of all modules, and what is in them.
Hooks = list[tuple[dict[int, Any], dict[int, Any]]]


class Buffer(NamedTuple):
    """A buffer at the start of a forward; ``old`` is a copy, or None if none was made."""

    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor | None
    version: int
    old: torch.Tensor | None


class _Attribute(NamedTuple):
    """An attribute at the start of a forward.

    Attributes:
        kept: a copy of its value, or of the state of a generator.
        items: a copy of a container with its own tensors, where ``kept`` has copies of these.
    """

    place: dict[str, Any]
    name: str
    value: Any
    kept: Any
    items: Any = None

    @classmethod
    def of(cls, place: dict[str, Any], name: str, is_replaced: bool = False) -> _Attribute:
        value = kept = place.get(name, _ABSENT)
        items = None
        if isinstance(value, torch.Generator):
            kept = value.get_state()
        elif isinstance(value, torch.Tensor):
            kept = value.detach() if is_replaced and not _is_trained(value) else _copied(value)
        elif isinstance(value, _CONTAINERS):
            items = None if is_replaced else _container(value, _same)
            kept = _container(value, _same if is_replaced else _copied)
        return cls(place, name, value, kept, items)

    def is_replaced(self) -> bool:
        """Whether a forward has given it another value, or other items, and has not written to a tensor."""
        if self.items is not None:
            return bool(self.items) and _is_equal(self.items, self.kept)
        had_value = self.value is not None and self.value is not _ABSENT
        return had_value and self.place.get(self.name) is not self.value

    def has_changed(self) -> bool:
        now = self.place.get(self.name, _ABSENT)
        if now is not self.value:
            return _is_state(self.name, now)  # not where a module or a parameter has come
        return not _is_equal(now.get_state() if isinstance(now, torch.Generator) else now, self.kept)

    def is_small(self) -> bool:
        """Whether each forward can afford a copy, for one that begins to write to it later."""
        value = self.value
        return type(value) is torch.Tensor and value.nbytes <= SMALL_BYTES and value.is_contiguous()

    def put(self, itself: bool = False) -> None:
        """Gives the module its value again: a copy of it, or ``itself``."""
        value = self.value if itself else self.kept
        if isinstance(self.value, torch.Generator):
            self.value.set_state(self.kept)
            value = self.value
        elif not itself and isinstance(value, torch.Tensor) and value is not self.value:
            value = value.clone()
        elif not itself and isinstance(value, _CONTAINERS):
            value = _container(value, _same if self.items is None else _copied)
        _set(self.place, self.name, value)


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _container(value: Any, copied: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a copy of ``value``, of the containers in it, and of the tensors in these."""
    if isinstance(value, torch.Tensor):
        return copied(value)
    if isinstance(value, tuple):
        return with_items(value, [_container(item, copied) for item in value])
    if isinstance(value, _CONTAINERS):
        value = copy.copy(value)
        for key in value if isinstance(value, dict) else range(len(value)):
            value[key] = _container(value[key], copied)
    return value


def _is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_trained(tensor) else tensor.detach().clone()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_equal(now: Any, kept: Any) -> bool:
    if now is kept:
        return True
    if isinstance(now, torch.Tensor) and isinstance(kept, torch.Tensor):
        is_plain = now.layout is kept.layout is torch.strided and not now.is_meta
        return is_plain and now.dtype == kept.dtype and torch.equal(now, kept)
    if not isinstance(now, _CONTAINERS) or type(now) is not type(kept) or len(now) != len(kept):
        return False
    return all(map(_is_equal, _items(now), _items(kept)))


def _is_state(name: str, value: Any) -> bool:
    """Whether an attribute may hold state: a tensor, a generator, tensors in a container, or nothing yet."""
    if name in _OF_TORCH:
        return False
    if isinstance(value, _CONTAINERS):
        return not value or any(isinstance(item, (torch.Tensor, *_CONTAINERS)) for item in _items(value))
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and not value.is_meta
    return value is None or isinstance(value, torch.Generator)


def _is_resized(buffer: Buffer) -> bool:
    now = buffer.owner._buffers.get(buffer.name)
    return now is not None and buffer.tensor is not None and now.shape != buffer.tensor.shape


def may_be_updated(buffer: Buffer) -> bool:
    """Whether a forward has replaced a buffer, or may have written to it."""
    tensor, old = buffer.tensor, buffer.old
    if buffer.owner._buffers.get(buffer.name) is not tensor:
        return True
    if tensor is None or old is None or version_of(tensor) != buffer.version:
        return tensor is not None and version_of(tensor) != buffer.version
    if tensor.nbytes <= SMALL_BYTES and old.stride() == tensor.stride():
        return True
    # A copy with other strides (of an expanded tensor) could make a kernel round differently.
    return not torch.equal(old, tensor)


def old_value(buffer: Buffer, label: str) -> torch.Tensor | None:
    """Returns the value that a buffer had at the start of a forward, in a new tensor."""
    if buffer.tensor is None:
        return None
    if buffer.old is None and version_of(buffer.tensor) == buffer.version:
        return buffer.tensor.clone()  # replaced, not written to
    if buffer.old is None:
        raise RuntimeError(
            f"{label}: the forward updated its buffer {buffer.name!r} (shape {tuple(buffer.tensor.shape)}), which "
            "earlier forwards left alone, so that there is no copy to run it again with; build the Block with "
            "use_checkpoint=False, or repeat the step"
        )
    return buffer.old.clone()


def exchanged_error(label: str) -> RuntimeError:
    """Returns the error of a Block whose modules or parameters are others than in its forward."""
    return RuntimeError(
        f"{label}: its modules or parameters were exchanged between forward and backward (as functional_call() does), "
        "so its forward cannot be run again; exchange them after the backward, or give it use_checkpoint=False"
    )


@contextmanager
def hooked_as(before: Hooks, now: Hooks) -> Iterator[None]:
    """Context manager with the hooks of the first run, which registered and removed ones since then are not."""
    try:
        _exchange_hooks(now, before)
        yield
    finally:
        _exchange_hooks(before, now)


def _exchange_hooks(old: Hooks, new: Hooks) -> None:
    for hooks, _ in old:
        hooks.clear()
    for hooks, kept in new:
        hooks.update(kept)


def _differing(changed: _Changed) -> Iterator[tuple[torch.nn.Module, str, Any, Any]]:
    """Yields attributes that are not what they were, with both values; none that became a module or a parameter."""
    for module, old in changed:
        now = vars(module)
        for name in {**old, **now}:
            before, after = old.get(name, _ABSENT), now.get(name, _ABSENT)
            is_registered = after is _ABSENT and any(name in now[kind] for kind in _REGISTERED)
            if before is not after and not is_registered and (name == "training" or name not in _OF_TORCH):
                yield module, name, before, after


def _set(place: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        place.pop(name, None)
    else:
        place[name] = value


class PlainState:
    """The state of this kind that the forwards of a Block's modules change.

    Attributes:
        is_unused: whether they change none.
    """

    def __init__(self) -> None:
        self.is_unused = False
        self._changing: list[_Place] | None = None  # None before a forward that is to show them
        self._known: list[_Place] = []
        self._searched: dict[int, dict[str, Any]] = {}  # kept, so that no other has the identity
        self._draws = True
        self._counters: set[tuple[int, str]] = set()

    def before_forward(self, modules: Iterable[torch.nn.Module], held: list[Holder]) -> PlainSnapshot:
        """Takes a snapshot; :meth:`PlainSnapshot.after_forward` must be called when the forward has run.

        Args:
            modules: modules of the Block.
            held: other objects that hold state, first in each pair.
        """
        snapshot = PlainSnapshot(self, host_state() if self._draws else None)
        if self._changing is None:
            places = [*map(vars, modules), *(holder for holder, _ in held if isinstance(holder, dict))]
            self._searched = {id(place): place for place in places}
            snapshot.known = [(place, set(place)) for place in places]
            found = [(place, name) for place, names in snapshot.known for name in names]
            snapshot.known += [(module._buffers, set(module._buffers)) for module in modules]  # for new ones
            snapshot.attributes = [
                _Attribute.of(place, name) for place, name in found if _is_state(name, place[name])
            ]
        else:
            snapshot.attributes = [_Attribute.of(*place) for place in self._changing]
            new = [each for each, _ in held if isinstance(each, dict) and id(each) not in self._searched]
            snapshot.attributes += [
                _Attribute.of(place, name) for place in new for name in place if _is_state(name, place[name])
            ]
        return snapshot

    def note_counters(self, changed: _Changed, buffers: Iterable[Buffer]) -> None:
        """Records the integers that a forward increased by 1, which count both runs, and warns of the first.

        Not where one of the ``buffers`` of the module has another shape now: the integer may be its length.
        """
        resized = {id(buffer.owner) for buffer in buffers if _is_resized(buffer)}
        for module, name, old, now in _differing(changed):
            is_counted = type(old) is type(now) is int and now - old == 1
            if is_counted and id(module) not in resized:
                self._counters.add((id(module), name))
                warn_once(
                    "plain_state.counter",
                    f"the forward of a Block changes the number {type(module).__name__}.{name}, and runs again in "
                    "backward: both runs count. If it computes with the number, keep that in a buffer, or give the "
                    "Block use_checkpoint=False",
                    category=UserWarning,
                )

    @contextmanager
    def as_before(self, changed: Callable[[], _Changed], held: list[Holder], label: str) -> Iterator[None]:
        """Context manager with what modules and ``held`` objects had; afterwards the current state is put back."""
        differing = self.put_old(changed())
        now = contents_of(holder for holder, _ in held)
        try:
            put_contents(held, label)
            yield
        finally:
            self.put_old(changed())  # also what the second run alone has changed
            for module, name, _, new in differing:
                _set(vars(module), name, new)
            put_contents(now, label)

    def put_old(self, changed: _Changed) -> list[tuple[torch.nn.Module, str, Any, Any]]:
        """Gives modules the attributes that they had, but counters; returns them with the old and the new value."""
        differing = [each for each in _differing(changed) if (id(each[0]), each[1]) not in self._counters]
        for module, name, old, _ in differing:
            _set(vars(module), name, old)
        return differing

    def learn_more(self) -> None:
        """Has the next forward show what it changes, in addition to what is known: the modules have new attributes."""
        self._known, self._changing = self._changing or self._known, None
        self._draws, self.is_unused = True, False

    def learn(self, changed: Iterable[_Attribute], draws: bool) -> None:
        """Records the attributes that a first forward changed, and whether it drew random numbers."""
        places = {(id(each[0]), each[1]): each for each in self._known}
        places.update({(id(a.place), a.name): (a.place, a.name, a.is_replaced()) for a in changed})
        self._changing = list(places.values())
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
        self.attributes = [each for each in self.attributes if each.has_changed() or each.is_small()]
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
