"""Modules whose parameters are sharded."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from sys import _getframe
from typing import Any

import torch

from . import _context
from ._engine.block_ref import OWNER, BlockRef
from ._engine.foreign import check_substitute, refuse_reparametrizing, refuse_replicas
from ._engine.meta import Placeholder, make_moved_shards
from ._engine.opaque import opaque, untraced_by_itself
from ._engine.state_dict import give_full_values, install_hooks_below, loading_local_parts
from .global_var import context
from .parameter import DistributedParameter

__all__ = ["DistributedModule", "DistributedParameter"]

# In a module's __dict__: whether it got parameters after it got an OWNER, which no Block gathers.
GREW = "_got_parameters_since"
_SHAPES = "_full_shapes"  # of its distributed parameters, by name


class DistributedModule(torch.nn.Module):
    """A :class:`torch.nn.Module` whose distributed parameters read as full tensors.

    Reading an attribute that is a :class:`bmtrain.DistributedParameter` gathers it from all ranks: the result has the
    full shape, takes part in autograd, and its gradient is summed into the shards. Inside a Block the Block has done
    that already, and reading returns the parameter itself, which is a shard while neither the Block runs nor the module
    is called by itself. ``parameters()`` always gives the shards.

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

    @untraced_by_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = _context.current()
        if current is None:
            return super().__call__(*args, **kwargs)
        caller = current.engine.reads.innermost
        if caller is not None:
            owner = self.__dict__.get(OWNER)
            if owner is None or caller.owner is owner or torch.compiler.is_compiling():
                return super().__call__(*args, **kwargs)
        with current.engine.reads.scope(self):
            return super().__call__(*args, **kwargs)

    @untraced_by_itself
    def __getattr__(self, name: str) -> Any:
        parameters = self.__dict__.get("_parameters")
        if parameters is not None and name in parameters:
            param = parameters[name]
            if torch.compiler.is_compiling() and OWNER in self.__dict__ and GREW not in self.__dict__:
                return param  # compiled code runs in the Block, and the compiler cannot look at its state
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
            source = value.__dict__.get("_bmtrain_source")
            if source is not None and source() is not None:
                value = source()
        super().__setattr__(name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        refuse_replicas(type(self).__name__, _getframe(1))
        return super().named_parameters(*args, **kwargs)

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """Return the parameter at a dotted path: the shard, as ``named_parameters()`` does."""
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
        for name in (OWNER, GREW):
            state.pop(name, None)  # what is copied or pickled has a Block of its own, or none
        return state

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        make_moved_shards(self, fn)
        return super()._apply(fn, recurse)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        install_hooks_below(self)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        install_hooks_below(self)
        return super().load_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        give_full_values(self, destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        with loading_local_parts(self):
            super()._load_from_state_dict(
                state_dict,
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )


def forget_block(module: torch.nn.Module) -> None:
    """A copy of a module that is in a Block is in none."""
    for name in (OWNER, GREW):
        module.__dict__.pop(name, None)


def note_full_shape(module: torch.nn.Module, name: str, param: DistributedParameter) -> None:
    """Remembers what may take the place of ``module.name`` for a while."""
    module.__dict__.setdefault(_SHAPES, {})[name] = param._original_shape


def _is_shard_in(owner: BlockRef, module: torch.nn.Module) -> bool:
    """Whether ``module``, which is in a Block that does not run, reads shards: not while somebody calls it alone."""
    return (
        owner() is not None
        and module.__dict__.get(OWNER) is owner
        and not context().engine.reads.belong_to(owner)
    )


@opaque
def _read(module: torch.nn.Module, param: DistributedParameter, name: str) -> torch.Tensor:
    owner = param._block
    if owner is not None and (owner.is_bound or param._is_full() or _is_shard_in(owner, module)):
        return param
    if param.is_meta:
        full: torch.Tensor = Placeholder.of(param, f"{type(module).__name__}.{name}", param.clone())
    else:
        full = context().engine.reads.read(param)
    full.__dict__["_bmtrain_source"] = weakref.ref(param)
    return full
