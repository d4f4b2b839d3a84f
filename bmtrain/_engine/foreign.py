"""Parts of torch that would shard shards again, or compute with them as if they were whole: they are refused."""

from __future__ import annotations

import functools
from types import FrameType
from typing import Any, NoReturn

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.nn.parallel import distributed as ddp

from .. import _context
from ..global_var import world_size

__all__ = [
    "check_substitute",
    "keep_reparametrized",
    "refuse_change",
    "refuse_fsdp",
    "refuse_reparametrizing",
    "refuse_replicas",
    "refuse_replicated",
    "require_gathering",
]

#: Attributes that torch.distributed.fsdp looks for in every parameter that it is about to take.
_ASKED_BY_FSDP = frozenset({"_fsdp_orig_uid", "_fsdp_flattened"})


def refuse_fsdp(name: str) -> None:
    """Told which missing attribute of a distributed parameter is read.

    Raises:
        RuntimeError: FSDP reads it.
    """
    if name in _ASKED_BY_FSDP:
        raise RuntimeError(
            "FSDP (fully_shard, FullyShardedDataParallel) of a model with DistributedParameters, which are shards "
            "already: use one or the other"
        )


def refuse_replicas(owner: str, reader: FrameType | None) -> None:
    """Told who lists the parameters of a distributed module.

    Raises:
        RuntimeError: DistributedDataParallel, which lists those of each module before it sends anything.
    """
    if world_size() == 1:
        return
    while reader is not None and reader.f_code.co_name.startswith("<"):  # a comprehension before Python 3.12
        reader = reader.f_back
    if reader is not None and reader.f_code.co_filename == ddp.__file__:
        raise _replicated(owner)


def refuse_replicated(param: torch.Tensor) -> None:
    """Called before ``param``, which is outside of Blocks, is gathered.

    Raises:
        RuntimeError: the forward that runs is that of a DistributedDataParallel which has taken the parameter, as it
            can where a plain module holds it.
    """
    model = ddp.DistributedDataParallel._active_ddp_module
    if model is not None and world_size() > 1 and any(param is member for member in model._module_parameters):
        raise _replicated(f"a DistributedParameter of a {type(model.module).__name__}")


def _replicated(owner: str) -> RuntimeError:
    return RuntimeError(
        f"DistributedDataParallel around {owner}, which is distributed already: it gives every rank the shards of "
        "rank 0; leave it out, backward() sums the gradients over the ranks"
    )


#: Modules of torch that put something computed from a parameter in the parameter's place.
_REPARAMETRIZING = frozenset(f"torch.nn.utils.{name}" for name in ("prune", "spectral_norm", "weight_norm"))
_OF_PARAMETRIZE = {"register_parametrization": "registering", "remove_parametrizations": "removing"}


def refuse_reparametrizing(owner: str, reader: FrameType | None) -> None:
    """Told who registers a parameter of a distributed module, or asks for its parametrizations.

    Raises:
        RuntimeError: a part of torch that takes what it reads for the whole parameter, and leaves a plain one, which
            no other rank knows.
    """
    if reader is None:
        return
    tool = reader.f_globals.get("__name__")
    if tool in _REPARAMETRIZING:
        refuse_change(f"applying {tool}", owner)
    asker = reader.f_back if reader.f_code.co_name == "is_parametrized" else None
    if asker is not None and asker.f_code.co_name in _OF_PARAMETRIZE:
        refuse_change(f"{_OF_PARAMETRIZE[asker.f_code.co_name]} a parametrization", owner)


def keep_reparametrized(module: torch.nn.Module) -> None:
    """What is there when a module is wrapped stays: it works on the gathered parameters, but cannot be taken back."""
    for hook in module._forward_pre_hooks.values():
        for base in type(hook).__mro__:
            if base.__module__ in _REPARAMETRIZING:
                what = f"removing {base.__module__}"
                vars(hook)["remove"] = functools.partial(refuse_change, what, type(module).__name__)


def refuse_change(what: str, owner: str, *_: object) -> NoReturn:
    """Raises RuntimeError: ``what`` would compute with shards as if they were whole parameters."""
    raise RuntimeError(
        f"{owner}: {what} after BMTrainModelWrapper, when parameters are shards: do it before, or load state_dict() "
        "into the model without the wrapper and do it there"
    )


def require_gathering(what: str) -> None:
    """Called before ``what`` gathers parameters.

    Raises:
        RuntimeError: a transform of torch.func is running, or this process was forked from a rank.
    """
    if _context.forked_from is None and peek_interpreter_stack() is None:
        return
    _context.refuse_child(what)
    raise RuntimeError(
        f"{what} inside a transform of torch.func (grad, vmap, jvp, jacrev, ...): parameters that are gathered "
        "over the ranks cannot be transformed; use backward(), or torch.func.functional_call with the full "
        "tensors of model.state_dict() on a model without Blocks"
    )


def check_substitute(owner: str, name: str, value: torch.Tensor, shapes: dict[str, Any]) -> None:
    """Looks at a tensor that ``torch.func.functional_call`` has put in the place of a distributed parameter.

    Args:
        owner: the class of the module.
        shapes: of the module's distributed parameters, whole.

    Raises:
        ValueError: it is a shard.
    """
    shape = shapes.get(name)
    if shape is not None and value.dim() == 1 and value.shape != shape:
        raise ValueError(
            f"functional_call: expected a full tensor of shape {tuple(shape)} for {owner}.{name}, got a shard of "
            f"shape {tuple(value.shape)}; parameters() gives shards, state_dict() full tensors"
        )
