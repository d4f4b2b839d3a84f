"""Conversion of ordinary models into sharded ones, in place."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ._base.arguments import require_module
from ._engine.engine import current_engine
from ._engine.replaced import forget_if_written, note_given
from ._engine.sync_batch_norm import SyncedBatchNorm
from ._engine.whole import give_whole_to_initialisers
from ._model.divided_experts import DividedExperts, can_divide, divide_experts, own_experts, takes_routing
from ._ranks.context import current as current_context
from ._shards.foreign import keep_reparametrized, refuse_change
from .block_layer import Block, TransformerBlockList, as_block, chain_blocks
from .global_var import context
from .layer import DistributedModule, forget_block, note_full_shape
from .parameter import DistributedParameter
from .pipe_layer import PipelineTransformerBlockList

__all__ = ["BMTrainModelWrapper", "make_distributed", "model_wrapper_dispatch"]


def BMTrainModelWrapper(model: torch.nn.Module) -> torch.nn.Module:
    """Makes an ordinary model a sharded one, in place.

    Every parameter becomes a :class:`bmtrain.DistributedParameter` with the same values (which must be equal on all
    ranks), every module a :class:`bmtrain.DistributedModule` that is still an instance of its old class, and every
    element of an outermost ``ModuleList`` and each ``AdaptiveLogSoftmaxWithLoss`` a :class:`bmtrain.Block`. Distributed
    modules stay unchanged, and modules (adapters) and parameters added since are converted.

    Args:
        model: any module.

    Returns:
        the same object, or the Block of an ``AdaptiveLogSoftmaxWithLoss``.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`.
        TypeError: if ``model`` is not a module, or holds one whose class cannot be derived from (a scripted one).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
        >>> model = bmtrain.BMTrainModelWrapper(model)
        >>> isinstance(model[1], torch.nn.Linear), isinstance(model[1], bmtrain.DistributedModule)
        (True, True)
    """
    return model_wrapper_dispatch(model)


def model_wrapper_dispatch(model: torch.nn.Module) -> torch.nn.Module:
    """Converts the tree below ``model``, as :func:`BMTrainModelWrapper` does."""
    _check(model)
    conversion = _Conversion()
    model = (conversion.element if isinstance(model, _PARTLY_RUN) else conversion.tree)(model)
    conversion.put_blocks_everywhere(model)
    if context().topology.sp_size > 1:
        from .nn._divided_model import prepare  # here: few runs divide sequences

        prepare(model)
    _watch_growth()
    current_engine(context()).wrapped.add(model)
    return model


def make_distributed(model: torch.nn.Module) -> torch.nn.Module:
    """Makes one module distributed, in place, without its children."""
    _check(model)
    _Conversion().node(model)
    return model


@functools.cache
def _watch_growth() -> None:
    """Once in a process: notes parameters that are put into modules after the first model was wrapped."""
    register_module_parameter_registration_hook(_note_parameter)
    register_module_module_registration_hook(_note_module)


def _note_parameter(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
    if param is not None and not isinstance(param, DistributedParameter):
        _note_growth()


def _note_module(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    if isinstance(module, DistributedModule):
        _note_growth()


def _note_growth() -> None:
    current = current_context()
    if current is not None:
        current_engine(current).wrapped.note_growth()


def _check(model: object) -> None:
    context("BMTrainModelWrapper")
    require_module("model", model)


class _Conversion:
    """One call of the wrapper; it maps old objects to new ones, so that shared objects stay shared."""

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[weakref.ref[torch.nn.Parameter], DistributedParameter]] = {}
        self._blocks: dict[int, Block] = {}  # by the identity of the module in the Block
        self._converted: set[int] = set()

    def tree(self, module: torch.nn.Module, in_block: bool = False) -> torch.nn.Module:
        """Converts a module and all below it."""
        if id(module) in self._converted:
            return module
        self._converted.add(id(module))
        if type(module) is Block:
            self.tree(module._module, in_block=True)
            return module
        makes_blocks = isinstance(module, torch.nn.ModuleList) and not in_block
        for name, child in module._modules.items():
            if child is not None:
                as_one = makes_blocks or (isinstance(child, _PARTLY_RUN) and not in_block)
                convert = self.element if as_one else self.tree
                module._modules[name] = convert(child, in_block)
        self.node(module)
        if makes_blocks:
            chain_blocks(module)
        return module

    def element(self, module: torch.nn.Module, in_block: bool = False) -> torch.nn.Module:
        """Converts an element of an outermost ModuleList: to a Block, unless it cannot be called."""
        if type(module) is Block:
            return self.tree(module)
        if type(module).forward is torch.nn.Module.forward:  # a container itself
            return self.tree(module, in_block)
        block = as_block(self.tree(module, in_block=True), self._blocks.get(id(module)), 0)
        self._blocks.setdefault(id(module), block)
        return block

    def node(self, module: torch.nn.Module) -> None:
        """Converts one module, without its children; of a converted one, the parameters registered since."""
        if issubclass(type(module), _Converted):
            self.parameters_of(module)
        if isinstance(module, (DistributedModule, *_LISTS)):
            return
        if isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            raise TypeError(f"model: a scripted module ({module.original_name}) cannot be made distributed")
        if is_divided := can_divide(module):
            divide_experts(module)
        self.parameters_of(module, is_divided)
        if getattr(module, "max_norm", None) is not None and isinstance(module, _EMBEDDINGS):
            raise ValueError(
                f"{type(module).__name__}: max_norm={module.max_norm} writes to the weight in every forward, which a "
                "gathered weight would forget; without max_norm, scale the rows that are read instead"
            )
        keep_reparametrized(module)
        device = context().device
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
        _set_class(module, _distributed_class(type(module)))

    def parameters_of(self, module: torch.nn.Module, of_experts: bool = False) -> None:
        """Converts the parameters of one module."""
        for name, param in module._parameters.items():
            if param is not None:
                made = self.parameter(param, f"{type(module).__name__}.{name}", of_experts)
                module._parameters[name] = made
                note_full_shape(module, name, made)

    def parameter(
        self, param: torch.nn.Parameter, name: str, of_experts: bool = False
    ) -> DistributedParameter:
        """Returns the distributed parameter for ``param``: the same one for the same object."""
        if isinstance(param, DistributedParameter):
            return param
        if isinstance(param, torch.nn.UninitializedParameter):
            raise ValueError(
                f"parameter {name}: expected an initialised parameter; run the lazy module once first"
            )
        known = self._parameters.get(id(param))
        if known is not None and known[0]() is param:
            return known[1]
        data = own_experts(param) if of_experts else param
        try:
            made = DistributedParameter(data, requires_grad=param.requires_grad, ep_mode=of_experts)
        except TypeError as error:
            raise TypeError(f"parameter {name}: {str(error).removeprefix('data: ')}") from None
        note_given(made, param)
        forget_if_written(made)
        made._take_hooks(param)
        for key, value in param.__dict__.items():
            made.__dict__.setdefault(key, value)
        self._parameters[id(param)] = (
            weakref.ref(param),
            made,
        )  # weakly: full parameters are freed as shards are made
        current_engine(context()).replaced.add(param)
        return made

    def put_blocks_everywhere(self, model: torch.nn.Module) -> None:
        """Replaces modules that became Blocks wherever else they are registered outside of Blocks."""
        pending = [model]
        seen: set[int] = set()
        while pending:
            module = pending.pop()
            if id(module) in seen or type(module) is Block:
                continue
            seen.add(id(module))
            for name, child in module._modules.items():
                if child is not None:
                    block = self._blocks.get(id(child))
                    if block is not None:
                        module._modules[name] = block
                    pending.append(child if block is None else block)


_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
#: A module of which each rank runs the parts that its data need: it is one Block, which all ranks run.
_PARTLY_RUN = torch.nn.AdaptiveLogSoftmaxWithLoss
_LISTS = (TransformerBlockList, PipelineTransformerBlockList)
_CHECKPOINTING = "_gradient_checkpointing_func"  # as transformers calls it


# ---- classes

_set_class = object.__dict__["__class__"].__set__


class _Converted(DistributedModule):
    """First base class of converted modules; the second is their old class."""

    _old_class: type[torch.nn.Module]

    def __init_subclass__(cls, **options: Any) -> None:
        """The old class has noted itself, perhaps in a registry, and may need options that are unknown here."""
        give_whole_to_initialisers(cls)

    @property
    def __class__(self) -> type:  # saved configurations and printed models name the old class
        return type(self)._old_class

    @__class__.setter
    def __class__(self, new: type[torch.nn.Module]) -> None:
        _set_class(self, new if issubclass(new, DistributedModule) else _distributed_class(new))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self)._old_class,), self.__getstate__()


def _rebuild(old: type[torch.nn.Module]) -> torch.nn.Module:
    made: Any = _distributed_class(old)
    module: torch.nn.Module = made.__new__(made)
    return module


def _derive_class(old: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Returns the class of a converted module of class ``old``."""
    bases = (
        *([_quiet_subclass(old)] if _is_of_another_layout(old) else []),
        _Converted,
        *([_RecurrentWeights] if issubclass(old, torch.nn.RNNBase) else []),
        *([SyncedBatchNorm] if issubclass(old, torch.nn.SyncBatchNorm) else []),
        *([DividedExperts] if takes_routing(old) else []),
        *([_CopiesItself] if hasattr(old, "__deepcopy__") else []),
        *([_OfTransformers] if hasattr(old, "resize_token_embeddings") else []),
        old,
    )
    return types.new_class(
        f"bmtrain.Distributed{old.__name__}",
        bases,
        exec_body=lambda body: body.update(_old_class=old, __module__=old.__module__, __doc__=old.__doc__),
    )


def _quiet_subclass(old: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Returns a class derived from ``old`` without a call of ``__init_subclass__``, see :class:`_Converted`."""
    own = vars(old).get("__init_subclass__")
    old.__init_subclass__ = classmethod(lambda cls: None)  # type: ignore[assignment, method-assign]
    try:
        return types.new_class(old.__name__, (old,))
    finally:
        if own is None:
            del old.__init_subclass__
        else:
            old.__init_subclass__ = own  # type: ignore[method-assign]


def _is_of_another_layout(old: type[torch.nn.Module]) -> bool:
    """Whether ``old`` adds a dict to a class without one (``ABC``, ``Generic``) that is a base before Module.

    Python then gives its objects only classes whose first base is ``old`` or derived from it.
    """
    while old.__base__.__dictoffset__:  # type: ignore[union-attr]
        old = old.__base__  # type: ignore[assignment]
    return old.__base__ is not object


#: One class for each old class.
_distributed_class: Callable[[Any], type[Any]] = functools.cache(_derive_class)


class _CopiesItself:
    """Copying for classes with a copy method (parametrized ones), which would make an object of the old class."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        if type(copied) is type(self)._old_class:  # type: ignore[attr-defined]
            _set_class(copied, type(self))
            forget_block(copied.__dict__)
        return copied


class _RecurrentWeights:
    """Recurrent networks keep a second list of their parameters; it must be read like the first."""

    @property
    def _flat_weights(self) -> list[Any]:
        names: list[str] = self.__dict__["_flat_weights_names"]
        return [getattr(self, name, None) for name in names]  # None if a script has removed it

    @_flat_weights.setter
    def _flat_weights(self, value: Any) -> None:
        self.__dict__.pop("_flat_weights", None)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the attribute, but not in that list, which would gather every weight."""
        torch.nn.Module.__setattr__(self, name, value)  # type: ignore[arg-type]


class _OfTransformers:
    """Methods of transformers models that handle all modules, adapted to shards and Blocks."""

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        super()._set_gradient_checkpointing(*args, **kwargs)  # type: ignore[misc]
        for block in self.modules():  # type: ignore[attr-defined]
            if type(block) is Block and _CHECKPOINTING in vars(block):  # in the place of its layer
                vars(block._module)[_CHECKPOINTING] = vars(block)[_CHECKPOINTING]

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As transformers counts, with whole parameters in the place of shards."""
        modules: Any = self.modules()  # type: ignore[attr-defined]
        params: Any = self.parameters()  # type: ignore[attr-defined]
        embeddings = [m._parameters["weight"] for m in modules if isinstance(m, torch.nn.Embedding)]
        left_out = {id(weight) for weight in embeddings} if exclude_embeddings else set()
        counted = (p for p in params if id(p) not in left_out and (p.requires_grad or not only_trainable))
        return sum(p.full_numel if isinstance(p, DistributedParameter) else p.numel() for p in counted)

    # It would write the resized table to a gathered copy, and make a plain last layer.
    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        embeddings: Any = self.get_input_embeddings()  # type: ignore[attr-defined]
        if pad_to_multiple_of is not None or new_num_tokens not in (None, embeddings.num_embeddings):
            refuse_change("resize_token_embeddings()", type(self).__name__)
        return embeddings
