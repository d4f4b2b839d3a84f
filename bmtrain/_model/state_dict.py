"""State dicts of sharded modules: they save and load full tensors.

The same two functions serve :class:`bmtrain.DistributedModule` (as overrides) and the plain modules inside a Block (as
state-dict hooks).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from .._base.stand_in import StandIn
from .._engine.copies import note_loaded, watch_entry
from .._engine.replaced import note_given
from .._shards.at_rest import show
from .._shards.meta import make_shard
from ..global_var import config, context
from ..parameter import DistributedParameter, full_value, shard_of, whole_shape

HANDLES_SHARDS = "_handles_shards"  # a class attribute of modules that override the state-dict methods
_HOOKED = "_bmtrain_load_hook"  # attribute of a module with our hooks: the key of its load hook
_LAST_HOOK = -1  # a key that torch, which counts hooks from 0, does not use


class Collection:
    """Full parameters, on the CPU of the ranks that keep them; the other ranks get tensors without data.

    A parameter that appears under several names is gathered, and kept, once.
    """

    needs_data = True

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self._tensors: dict[int, torch.Tensor] = {}  # by identity of the parameter

    def collect(self, param: DistributedParameter) -> torch.Tensor:
        """Returns the full value of ``param``. Collective."""
        if id(param) not in self._tensors:
            full = full_value(param)
            self._tensors[id(param)] = (
                _compact(full.cpu()) if self.keeps else torch.empty_like(full, device="meta")
            )
        return self._tensors[id(param)]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this collection made the tensor (so that it is not a parameter or buffer of a module)."""
        return any(tensor is known for known in self._tensors.values())


_collection: ContextVar[Collection | None] = ContextVar("collection", default=None)


@contextmanager
def collecting(keeps: bool, collection: Collection | None = None) -> Iterator[Collection]:
    """Context manager in which state dicts have full tensors only on ranks with ``keeps``.

    A ``collection`` of another class defines the values of state dicts itself.
    """
    collection = collection or Collection(keeps)
    token = _collection.set(collection)
    try:
        yield collection
    finally:
        _collection.reset(token)


def give_full_values(module: torch.nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Replaces the shards of the module's own parameters in ``destination`` by full tensors. Collective."""
    for name, param in module._parameters.items():
        if isinstance(param, DistributedParameter) and prefix + name in destination:
            destination[prefix + name] = _full_entry(param, prefix + name)
    for name, buffer in module._buffers.items():
        if buffer is not None and prefix + name in destination:
            destination[prefix + name] = buffer.detach() if buffer.is_meta else _for_saving(buffer.detach())


def _full_entry(param: DistributedParameter, key: str) -> torch.Tensor:
    collection = _collection.get()
    if collection is not None:
        if collection.needs_data:
            param.require_data(key)
        return collection.collect(param)
    if param.is_meta:
        return torch.empty(param._tp_original_shape, dtype=param.dtype, device="meta")
    value = _for_saving(full_value(param))
    watch_entry(key, value)
    return value


@contextmanager
def showing_full_values(module: torch.nn.Module, prefix: str, *, is_own: bool) -> Iterator[None]:
    """Context manager for a saving method; if it is the user's, it may rename or convert entries. Collective."""
    own = dict(module._parameters)
    for name, param in own.items():
        if param is not None and (pending := param.__dict__.get("_pending")) is not None:
            pending.finish_together()
        if is_own and isinstance(param, DistributedParameter):
            module._parameters[name] = _full_entry(param, prefix + name)  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_own:
            module._parameters.update(own)


def take_local_parts(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> None:
    """Replaces the full tensors of the module's own sharded parameters in ``state_dict`` by this rank's parts.

    Entries that do not fit are reported in ``error_msgs``, and their parameters stay unchanged.
    """
    for name, param in module._parameters.items():
        key = prefix + name
        if not isinstance(param, DistributedParameter) or key not in state_dict:
            continue
        value = state_dict[key]
        note_loaded(value)
        problem = misfit(key, param, value)
        if problem:
            error_msgs.append(problem)
            state_dict[key] = param.detach()
            continue
        make_shard(param)
        show(param)
        note_given(param, value)
        if isinstance(value, torch.Tensor):
            state_dict[key] = shard_of(param, value.detach())
        else:
            state_dict[key] = value.part_of(param)
        param._unversioned_writes += 1
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and prefix + name in state_dict:
            module._buffers[name] = torch.empty_like(buffer, device=context().device)


def misfit(key: str, target: torch.Tensor, value: Any) -> str:
    """The error of torch for a ``value`` that cannot be loaded into ``target``; empty if it can."""
    if not torch.overrides.is_tensor_like(value):
        return (
            f"While copying the parameter named {key!r}, expected torch.Tensor or Tensor-like object from checkpoint "
            f"but received {type(value)}"
        )
    is_sharded = isinstance(target, DistributedParameter)
    expected, shape = tuple(whole_shape(target)), tuple(value.shape)
    if shape != expected and (is_sharded or (expected, shape) != ((), (1,))):
        return (
            f"size mismatch for {key}: copying a param with shape {shape} from checkpoint, the shape "
            f"in current model is {expected}."
        )
    return f"{key}: the tensor to load is on the meta device and has no values." if value.is_meta else ""


@contextmanager
def loading_local_parts(module: torch.nn.Module) -> Iterator[None]:
    """Makes ``_load_from_state_dict`` load local parts, after all hooks that may rename or edit entries."""
    hooks = module._load_state_dict_pre_hooks
    hooks[_LAST_HOOK] = partial(_before_load, module)
    try:
        yield
    finally:
        del hooks[_LAST_HOOK]


def install_hooks_below(root: torch.nn.Module) -> None:
    """Makes plain modules that hold distributed parameters, at any depth, save and load full tensors.

    Most of them have the hooks since they got their parameters, see `_note_parameter`; here the load hook is moved
    behind hooks that may rename or edit entries.
    """
    for module in root.modules():
        if isinstance(module, StandIn):
            module = module._module  # which is not among the modules, and shares its hooks
        if any(isinstance(p, DistributedParameter) for p in module._parameters.values()):
            _install_hooks(module)


def _note_parameter(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> None:
    """Installs the hooks; torch calls it for each parameter that is registered in any module."""
    if isinstance(param, DistributedParameter):
        _install_hooks(module)


register_module_parameter_registration_hook(_note_parameter)


def _handles_shards(module: torch.nn.Module) -> bool:
    return getattr(type(module), HANDLES_SHARDS, False)


def _install_hooks(module: torch.nn.Module) -> None:
    if _handles_shards(module):
        return
    after_save: Any = module._state_dict_hooks
    before_load: Any = module._load_state_dict_pre_hooks
    if _HOOKED not in module.__dict__:
        handle = module.register_state_dict_post_hook(_after_save_of_plain)
        after_save.move_to_end(handle.id, last=False)
        module.__dict__[_HOOKED] = module.register_load_state_dict_pre_hook(_before_load_of_plain).id
    before_load.move_to_end(module.__dict__[_HOOKED])


def _after_save_of_plain(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    if not _handles_shards(module):  # the wrapper may have made it distributed since
        give_full_values(module, state_dict, prefix)


def _before_load_of_plain(module: torch.nn.Module, *args: Any) -> None:
    if not _handles_shards(module):
        _before_load(module, *args)


def _before_load(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any
) -> None:
    """A load hook; ``rest`` is strict, missing_keys, unexpected_keys, error_msgs."""
    local_metadata["assign_to_params_buffers"] = False  # a shard is copied to, never replaced
    take_local_parts(module, state_dict, prefix, rest[-1])


def _for_saving(value: torch.Tensor) -> torch.Tensor:
    return _compact(value.cpu() if config["save_param_to_cpu"] else value)


def _compact(value: torch.Tensor) -> torch.Tensor:
    """Returns ``value`` in a storage of its own size: a file would hold the whole storage. Sparse tensors have none."""
    is_sparse = value.layout is not torch.strided
    return value if is_sparse or value.untyped_storage().nbytes() == value.nbytes else value.clone()
