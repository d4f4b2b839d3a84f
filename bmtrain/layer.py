"""Modules with sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from sys import _getframe
from typing import Any

import torch

from ._base.opaque import constant_while_traced, opaque, untraced_by_itself
from ._base.tensors import refuse_scripting
from ._engine.copies import GatheredCopy, Source, source_of
from ._engine.engine import current_engine
from ._engine.whole import give_whole_to_initialisers, writable_now, writing_function
from ._model.check import has_own
from ._model.looks import description, only_looks
from ._model.notes import name_strict
from ._model.state_dict import give_full_values, install_hooks_below, loading_local_parts, showing_full_values
from ._ranks import context as _context
from ._shards.block_ref import GREW, OWNER
from ._shards.foreign import check_substitute, refuse_listing, refuse_reparametrizing
from ._shards.meta import Placeholder, make_moved_shards
from .global_var import context
from .parameter import DistributedParameter

__all__ = ["DistributedModule", "DistributedParameter"]

#: Classes of torch that hold parameters -> what their objects become in a distributed module.
CONTAINERS: dict[type, type] = {}
_SHAPES = "_full_shapes"  # shapes of its distributed parameters, by name
#: Whether a module is printed, perhaps by one rank alone.
_describes: ContextVar[bool] = ContextVar("describes", default=False)


class DistributedModule(torch.nn.Module):
    """A :class:`torch.nn.Module` whose distributed parameters read as full tensors.

    Reading an attribute that is a :class:`bmtrain.DistributedParameter`, or an item of a list or dict of them, gathers
    it from all ranks: a tensor of the full shape, whose gradient is summed into the shards. In a Block it is the
    parameter itself: whole while the Block runs, and a shard to code that no module's forward runs. ``parameters()``
    gives shards.

    Example:
        >>> class Scale(bmtrain.DistributedModule):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.weight = bmtrain.DistributedParameter(torch.full((dim,), 2.0))
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> Scale(3)(torch.ones(3)).tolist()
        [2.0, 2.0, 2.0]
    """

    _handles_shards = True  # HANDLES_SHARDS of _model/state_dict.py
    __prepare_scriptable__ = refuse_scripting

    def __init_subclass__(cls, **options: Any) -> None:
        """Methods that initialise parameters get them whole, see [Note: Writing to a whole parameter]."""
        super().__init_subclass__(**options)
        give_whole_to_initialisers(cls)

    @untraced_by_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = _context.current()
        if current is None:
            return super().__call__(*args, **kwargs)
        reads = current_engine(current).reads
        if reads.innermost is not None:
            return super().__call__(*args, **kwargs)
        if reads.check_call is not None:
            reads.check_call(self, args, kwargs)
        with reads.scope(self):
            return super().__call__(*args, **kwargs)

    @untraced_by_itself
    def __getattr__(self, name: str) -> Any:
        parameters = self.__dict__.get("_parameters")
        if parameters is not None and name in parameters:
            param = parameters[name]
            is_traced = torch.compiler.is_compiling() and OWNER in self.__dict__ and GREW not in self.__dict__
            if is_traced and _runs_block():
                return param  # the compiler cannot look at the state of the Block
            if isinstance(param, DistributedParameter):
                return _read(self, param, name)
            if type(param) is torch.Tensor:
                check_substitute(type(self).__name__, name, param, self.__dict__.get(_SHAPES, {}))
            return param
        if name == "parametrizations" and not torch.compiler.is_compiling():
            refuse_reparametrizing(type(self).__name__, _getframe(1))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A tensor that came from reading a parameter stands for that parameter (tied weights).
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            source = source_of(value)
            value = value if source is None else source
        elif type(value) in CONTAINERS:
            value.__class__ = CONTAINERS[type(value)]
        super().__setattr__(name, value)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Any:
        """Calls ``fn`` with every module below and this one, as torch does; its writes reach the shards."""
        return super().apply(writing_function(fn))

    def __repr__(self) -> str:
        token = _describes.set(True)
        try:
            return super().__repr__()
        finally:
            _describes.reset(token)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        refuse_listing(type(self).__name__, _getframe(1))
        return super().named_parameters(*args, **kwargs)

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """Returns the parameter at a dotted path: the shard, as ``named_parameters()`` does."""
        path, _, name = target.rpartition(".")
        param = self.get_submodule(path)._parameters.get(name)
        return super().get_parameter(target) if param is None else param

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        refuse_reparametrizing(type(self).__name__, _getframe(1))
        super().register_parameter(name, param)
        if isinstance(param, DistributedParameter):
            note_full_shape(self, name, param)
        if OWNER in self.__dict__:
            self.__dict__[GREW] = True

    def __getstate__(self) -> dict[str, Any]:
        inherited = getattr(super(), "__getstate__", None)
        state = dict(self.__dict__ if inherited is None else inherited())
        forget_block(state)
        return state

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        make_moved_shards(self, fn)
        return super()._apply(fn, *args, **kwargs)  # a metric of torchmetrics takes none of 'recurse'

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        install_hooks_below(self)
        state = super().state_dict(*args, **kwargs)
        _context.require_intact(f"{type(self).__name__}.state_dict()")
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        install_hooks_below(self)
        try:
            return super().load_state_dict(*args, **kwargs)
        except RuntimeError as error:
            name_strict(error)
            raise

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with showing_full_values(self, prefix, is_own=has_own(type(self), "_save_to_state_dict")):
            super()._save_to_state_dict(destination, prefix, keep_vars)
        give_full_values(self, destination, prefix)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with loading_local_parts(self):
            super()._load_from_state_dict(*args, **kwargs)


def forget_block(attributes: dict[str, Any]) -> None:
    """Removes the reference to a Block from a copied or pickled module, which has a Block of its own or none."""
    attributes.pop(OWNER, None)
    attributes.pop(GREW, None)


def note_full_shape(module: torch.nn.Module, name: str, param: DistributedParameter) -> None:
    """Records the full shape of ``module.name``, to check its substitutes."""
    module.__dict__.setdefault(_SHAPES, {})[name] = param._original_shape


@constant_while_traced
def _runs_block() -> bool:
    """Whether a Block has full parameters; asked while code is compiled, and again for a parameter of another shape."""
    return any(block.is_bound for block in current_engine(context()).blocks)


@opaque
def _read(module: torch.nn.Module, param: DistributedParameter, name: str) -> torch.Tensor:
    owner = param._block
    if param._is_whole or (owner is not None and (owner.is_bound or param._is_full())):
        return param
    is_shard = (  # in a Block, to code that no forward runs, and no `torch.utils.checkpoint` again
        owner is not None
        and owner() is not None
        and not ((reads := current_engine(context()).reads).innermost or reads.in_step)
        and not (torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1)
        and module.__dict__.get(OWNER) is owner
    )
    if param.is_meta:
        if is_shard:
            return param
        label = f"{module.__class__.__name__}.{name}"
        placeholder = Placeholder.of(param, label, param.clone())
        Source(param, placeholder, label)
        return placeholder
    reads = current_engine(context()).reads
    if _describes.get():
        return description(param)
    if reads.innermost is None:
        held = writable_now()
        if held is not None:
            held.add(param)
            return param
        if not is_shard and only_looks(_getframe(2), name):
            return description(param)
    if is_shard:
        return param
    full = reads.read(param)
    full.__class__ = GatheredCopy
    if source_of(full) is None:
        Source(param, full, f"{module.__class__.__name__}.{name}")
    return full
