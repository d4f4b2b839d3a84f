"""State that may change between two runs of a forward: of modules, random numbers and torch's global modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from .._base.tensors import version_of
from .block_state import BlockState
from .helper_state import SMALL_BYTES, HelperState, Holder, helpers_of, reached_from
from .plain_state import Buffer, Hooks, PlainState, exchanged_error, hooked_as, may_be_updated, old_value

_FORWARD_HOOKS, _PARAMETERS = attrgetter("_forward_hooks"), attrgetter("_parameters")
_HOOKS = itemgetter(*(name for name in vars(torch.nn.Module()) if name[:5] in ("_forw", "_back")))
_HOOKS_OF_ALL = [
    hooks
    for name, hooks in vars(torch.nn.modules.module).items()
    if name.startswith(("_global_forward", "_global_backward"))
]


class ModuleState:
    """State of modules that may change between two runs of a forward: training flags, and buffers it updates.

    Small buffers are copied before each forward, and a second run gets the copies, updated or not: batch norm and
    writes through `.data` count no version. Large ones (tables of positions, masks) are copied before the first forward
    only, which shows whether it updates them.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self._modules: list[torch.nn.Module] = [root]
        self._children: list[torch.nn.Module | None] = [None]
        self._large: set[tuple[int, str]] | None = None  # known to be updated; None before the first forward
        self._forget()

    def _forget(self) -> None:
        """Has the next forwards show again what they change."""
        self._plain = PlainState(), PlainState()  # in evaluation and in training: only one may draw or write
        self._helpers: HelperState | None = None
        self._num_attributes = -1

    def walk(self) -> list[torch.nn.Module]:
        children: list[torch.nn.Module | None] = []
        for module in self._modules:
            children += module._modules.values()  # a comprehension costs a call of its own before Python 3.12
        if children != self._children:
            self._modules = list(self.root.modules())
            self._forget()
            self._children = [child for module in self._modules for child in module._modules.values()]
        return self._modules

    def has_own_forward_hooks(self) -> bool:
        """Whether one of the modules has a forward hook that receives its result."""
        return any(map(_FORWARD_HOOKS, self.walk()))  # a generator costs as much again, for each module

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yields all buffers of the modules."""
        for module in self.walk():
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)

    def before_forward(self, functions: list[Any]) -> ModuleSnapshot:
        """Takes a snapshot, also of what ``functions`` refer to; :meth:`ModuleSnapshot.after_forward` must follow."""
        modules = self.walk()
        buffers = []
        copies: dict[int, torch.Tensor] = {}  # one of each tensor, as modules may share it
        for owner in modules:
            for name, tensor in owner._buffers.items():
                if tensor is None:
                    buffers.append(Buffer(owner, name, None, 0, None))
                    continue
                is_written = self._large is None or (id(owner), name) in self._large
                if (is_written or tensor.nbytes <= SMALL_BYTES) and id(tensor) not in copies:
                    copies[id(tensor)] = tensor.clone()
                buffers.append(Buffer(owner, name, tensor, version_of(tensor), copies.get(id(tensor))))
        size = sum(map(len, map(vars, modules)))
        if size != self._num_attributes:
            self._num_attributes, self._helpers = size, helpers_of(modules)
            for plain in self._plain:
                plain.learn_more()
        held = self._helpers.before_forward() if self._helpers else []
        held = [*held, *reached_from(functions)] if functions else held
        return ModuleSnapshot(self, modules, buffers, self._plain[self.root.training], held)

    def learn(self, updated: list[Buffer]) -> None:
        """Records the large buffers that a forward updated."""
        large = (b for b in updated if b.tensor is not None and b.tensor.nbytes > SMALL_BYTES)
        self._large = (self._large or set()) | {(id(b.owner), b.name) for b in large}


class ModuleSnapshot:
    """Attributes and buffers at the start of one forward."""

    def __init__(
        self,
        state: ModuleState,
        modules: list[torch.nn.Module],
        buffers: list[Buffer],
        plain: PlainState,
        held: list[Holder],
    ) -> None:
        self._state, self._buffers, self._plain, self._held = state, buffers, plain, held
        self._in_place = None if plain.is_unused and not held else plain.before_forward(modules, held)
        self._attributes = [(module, vars(module).copy()) for module in modules]
        self.hooks = _hooks_of(modules)
        self._parameters = list(map(dict.copy, map(_PARAMETERS, modules)))

    def _changed(self) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
        """Returns the modules that have other attributes now, and the old ones."""
        return [
            (module, old)
            for module, old in self._attributes
            if len(vars(module)) != len(old) or not all(map(is_, vars(module).values(), old.values()))
        ]

    def after_forward(self) -> None:
        """Keeps old values only of the buffers that the forward updated or may have updated."""
        self._modules = self._state.walk()
        if changed := self._changed():
            self._plain.note_counters(changed, self._buffers)
        self._buffers = [buffer for buffer in self._buffers if may_be_updated(buffer)]
        self._state.learn(self._buffers)
        if self._in_place is not None:
            self._in_place.after_forward()

    @contextmanager
    def restored(self, label: str) -> Iterator[None]:
        """Context manager with the old attributes and (new tensors of) buffers; the current ones are put back."""
        if self._state.walk() != self._modules:
            raise exchanged_error(label)
        for (module, _), old in zip(self._attributes, self._parameters, strict=True):
            if not all(map(is_, map(module._parameters.get, old), old.values())):
                raise exchanged_error(label)
        changed, held, hooks = self._changed(), self._held, _hooks_of(self._modules)
        distinct = {id(noted.tensor): noted for noted in self._buffers} if self._buffers else {}
        values = {key: old_value(noted, label) for key, noted in distinct.items()} if distinct else {}
        current = [(noted.owner, noted.name, noted.owner._buffers.get(noted.name)) for noted in self._buffers]
        for noted in self._buffers:
            noted.owner._buffers[noted.name] = values[id(noted.tensor)]
        try:
            with (
                self._plain.as_before(self._changed, held, label) if changed or held else nullcontext(),
                nullcontext() if self._in_place is None else self._in_place.restored(),
                nullcontext() if hooks == self.hooks else hooked_as(self.hooks, hooks),
            ):
                yield
        finally:
            if not changed and (changed := self._changed()):  # by the second run alone
                self._plain.put_old(changed)
            for owner, name, buffer in current:
                owner._buffers[name] = buffer


def _hooks_of(modules: list[torch.nn.Module]) -> Hooks:
    own = chain.from_iterable(map(_HOOKS, map(vars, modules)))
    return [(hooks, hooks.copy()) for hooks in filter(None, chain(own, _HOOKS_OF_ALL))]


@contextmanager
def trainable_as(block: BlockState, trains: list[list[bool]]) -> Iterator[None]:
    """Restores the ``requires_grad`` that the parameters had in the first run."""
    changed = [
        (param, flag)
        for buffer, flags in zip(block.buffers, trains, strict=True)
        if buffer.requires_grad() != flags
        for param, flag in zip(buffer.parameters, flags, strict=True)
        if param.requires_grad != flag
    ]
    for param, flag in changed:
        param.requires_grad_(flag)
    try:
        yield
    finally:
        for param, flag in changed:
            param.requires_grad_(not flag)


#: The present recorder, see `recording.Recorder`: an inspector, or within a pipeline the stage.
active_recorder: ContextVar[Any] = ContextVar("recorder", default=None)


class ModeSnapshot:
    """Random numbers, torch's modes and context variables at the start of a forward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers, self._modes, self._context = _numbers(device), _modes(device), copy_context()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that restores the state of the snapshot, and afterwards the current one."""
        numbers, modes = _numbers(self._device), _modes(self._device)
        try:
            _set_numbers(self._device, *self._numbers)
            if modes != self._modes:
                _exchange(modes, self._modes)
            yield
        finally:
            if modes != self._modes:
                _exchange(self._modes, modes)
            _set_numbers(self._device, *numbers)

    def context(self) -> Context:
        """Returns the context variables of the snapshot, with the present recorder."""
        context = self._context.copy()
        context.run(active_recorder.set, active_recorder.get())
        return context


def _numbers(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_numbers(device: torch.device, cpu: torch.Tensor, cuda: torch.Tensor | None = None) -> None:
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


_Modes = tuple[torch.dtype, list[tuple[str, bool, torch.dtype]], list[Any], int]


def _modes(device: torch.device) -> _Modes:
    """Returns the default dtype, autocast, function modes (the default device is one), and uses of `cached()`.

    Dispatch modes count operators rather than change them: a second run is in the current ones.
    """
    kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    functions = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
    return torch.get_default_dtype(), autocast, functions, parametrize._cache_enabled


def _exchange(old: _Modes, new: _Modes) -> None:
    torch.set_default_dtype(new[0])
    parametrize._cache_enabled = new[3]
    for kind, enabled, dtype in new[1]:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    for _ in old[2]:
        _pop_mode()
    for mode in new[2]:
        _push_mode(mode)
