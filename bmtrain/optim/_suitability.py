"""Checks and warnings for optimizers of distributed parameters."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from .._base.deprecate import warn_once
from .._engine.engine import current_engine
from .._ranks import context
from ..global_var import rank, world_size
from ..parameter import DistributedParameter
from ._grad_stats import parameters_of
from ._state import mark_rank, take_whole_state
from .places import wants_disk

#: Parts of class names of optimizers that need norms, factors or projections of full tensors, which shards cannot give.
_WHOLE_TENSOR_KINDS = (
    *("adafactor", "adalomo", "adammini", "apollo", "came", "galore", "lamb", "larc", "lars", "muon"),
    *("novograd", "shampoo", "sm3", "soap", "stableadam"),
)

#: Methods that see something else in a flat shard than in a tensor, also on one rank; and in a part of a tensor.
_OF_SHAPES = frozenset({"dim", "ndim", "matmul", "mm", "qr", "svd"})
_OF_ALL_ELEMENTS = frozenset({"cosine_similarity", "dot", "mean", "norm", "std", "sum", "var", "vector_norm"})


def require_steppable(optimizer: Any, lr_scheduler: Any) -> None:
    """Raises TypeError unless the optimizer, and the scheduler if there is one, can step without a number."""
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
        raise TypeError(
            f"optimizer: expected one with step() and param_groups, got {type(optimizer).__name__}"
        )
    if lr_scheduler is not None and not hasattr(lr_scheduler, "step"):
        raise TypeError(f"lr_scheduler: expected one with step(), or None, got {type(lr_scheduler).__name__}")
    if getattr(type(lr_scheduler), "step", None) is torch.optim.lr_scheduler.ReduceLROnPlateau.step:
        raise TypeError(
            "lr_scheduler: ReduceLROnPlateau.step() needs a number, which step() of the manager does not have; "
            "leave it out, and step it yourself with the same number on all ranks, such as sum_loss() gives"
        )


def takes_set_to_none(optimizer: Any) -> bool:
    """Whether ``zero_grad()`` has the argument of torch's optimizers, which wrappers of another one may lack."""
    if getattr(optimizer, "_bmtrain_optimizer", False):
        return True
    kinds = {name: p.kind for name, p in inspect.signature(optimizer.zero_grad).parameters.items()}
    return "set_to_none" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()


def adopt_optimizer(optimizer: Any) -> None:
    """Lets an optimizer of torch over shards load states of whole parameters, and mark its own.

    Raises:
        ValueError: it computes over whole tensors, or a policy wants its state on a drive.
    """
    if getattr(optimizer, "_bmtrain_optimizer", False):
        return
    name, parameters = type(optimizer).__name__, list(parameters_of(optimizer.param_groups))
    is_unsuited = any(kind in name.lower().replace("_", "") for kind in _WHOLE_TENSOR_KINDS)
    is_unsuited &= not getattr(optimizer, "for_shards", False)
    if is_unsuited and any(isinstance(p, DistributedParameter) for p in parameters):
        raise ValueError(
            f"optimizer: {name} computes over whole tensors and would see this rank's shards, flat; use "
            f"bmtrain.optim.whole_matrix({name}, params, ...), or bmtrain.optim.whole_norms() in its step, and declare "
            "for_shards = True in the class"
        )
    if rank() == 0 and any(isinstance(p, DistributedParameter) for p in parameters):
        _warn_of_whole_tensors(type(optimizer))
    if any(map(wants_disk, parameters)):
        raise ValueError(f"BlockPolicy(optimizer='disk'): expected an optimizer of bmtrain.optim, got {name}")
    if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):  # not of a class that wraps another optimizer
        optimizer.register_load_state_dict_pre_hook(take_whole_state)
        optimizer.register_state_dict_post_hook(mark_rank)


def _warn_of_whole_tensors(cls: type) -> None:
    found = set() if getattr(cls, "for_shards", False) else _names_in_step(cls)
    found &= _OF_SHAPES if world_size() == 1 else _OF_SHAPES | _OF_ALL_ELEMENTS
    if found:
        warn_once(
            f"optimizer.{cls.__module__}.{cls.__qualname__}",
            f"{cls.__name__}: its step() uses {', '.join(sorted(found))}, and parameters and gradients are this rank's "
            f"shards, flat. If it needs whole tensors, use bmtrain.optim.whole_matrix({cls.__name__}, params, ...), or "
            "bmtrain.optim.whole_norms() in its step; if not, declare for_shards = True in the class",
            stacklevel=4,
            category=UserWarning,
        )


def _names_in_step(cls: type) -> set[str]:
    """Attributes read in the step of a class, and in functions of its packages that it leads to.

    Those of a global (``numpy.mean``, ``config.dim``) count only if it is a module of torch. Nothing is asked of a
    global that is no function: proxies and configurations answer anything, or raise.
    """
    packages = {_package(base.__module__) for base in cls.__mro__} - {"bmtrain", "builtins", "torch"}
    names: set[str] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [inspect.getattr_static(cls, "step", None)]
    while waiting:
        function = waiting.pop()
        if type(function) in (classmethod, staticmethod):
            function = function.__func__
        if type(function) not in (FunctionType, functools._lru_cache_wrapper) or function in seen:
            continue
        seen.add(function)
        waiting.append(vars(function).get("__wrapped__"))
        if waiting[-1] is not None or _package(function.__module__) not in packages:
            continue
        is_of_tensor = True
        for instruction in _instructions(function.__code__):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                names |= {instruction.argval} if is_of_tensor else set()
                waiting.append(inspect.getattr_static(cls, instruction.argval, None))
            elif instruction.opname == "LOAD_GLOBAL":
                value = function.__globals__.get(instruction.argval)
                waiting.append(value)
                is_module_of_torch = type(value) is ModuleType and _package(value.__name__) == "torch"
                is_of_tensor = is_module_of_torch or value is torch.Tensor
            elif instruction.opname != "EXTENDED_ARG":
                is_of_tensor = True
    return names


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _instructions(inner)


def warn_of_likely_mistakes(optimizer: Any) -> None:
    """Warns on rank 0, once, of plain parameters, and of a group that is empty as if selected by dimensions."""
    if rank() != 0:
        return
    trained = [p for p in parameters_of(optimizer.param_groups) if p.requires_grad]
    num_plain = sum(not isinstance(p, DistributedParameter) for p in trained)
    if num_plain and world_size() > 1:
        warn_once(
            "OptimManager.plain_parameters",
            f"{type(optimizer).__name__}: {num_plain} of its {len(trained)} parameters are plain ones, whose gradients "
            f"are not summed over the ranks: each of the {world_size()} ranks trains a copy of its own. "
            "BMTrainModelWrapper(model), before the optimizer is made, makes them distributed",
            stacklevel=3,
            category=UserWarning,
        )
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if empty and num_plain < len(trained):
        warn_once(
            "OptimManager.empty_group",
            f"{type(optimizer).__name__}: parameter group {empty[0]} is empty. If the groups were told apart by "
            "p.dim(): a distributed parameter is flat, whatever its shape; choose by name, or by "
            "len(p.full_shape)",
            stacklevel=3,
            category=UserWarning,
        )


def warn_of_uninitialised(param_groups: Iterable[Any]) -> None:
    """Warns on rank 0, at the first step after they were made, of parameters that are not initialised."""
    current = context.current()
    if current is not None and (uninitialised := current_engine(current).reads.uninitialised).before_step:
        uninitialised.check_step(parameters_of(param_groups))


def warn_of_unsent_gradients(param_groups: Iterable[Any]) -> None:
    """Warns on rank 0, once, of a step without gradients that were left unsent on each rank."""
    current = context.current()
    if current is None or rank() != 0:
        return
    if current_engine(current).gradients.unsent.has_any_of(parameters_of(param_groups)):
        warn_once(
            "OptimManager.unsent_gradients",
            "OptimManager.step: gradients of backwards in no_sync() were not sent, and this step does not use them: "
            "make the last backward before a step outside of no_sync(), or drop them by zero_grad()",
            stacklevel=3,
            category=UserWarning,
        )
