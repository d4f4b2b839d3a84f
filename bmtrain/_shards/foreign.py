"""Refusals and warnings of code that would shard shards again or treat them as full parameters."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from sys import _getframe
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import distributed as ddp

from .._base.deprecate import warn_once
from .._ranks import context
from .._ranks.operands import OVER_ELEMENTS
from ..global_var import rank, world_size

#: Attributes that torch.distributed.fsdp looks up on every parameter before it shards it.
_ASKED_BY_FSDP = frozenset({"_fsdp_orig_uid", "_fsdp_flattened"})


def refuse_fsdp(name: str) -> None:
    """Raises RuntimeError for FSDP, recognised by the missing attribute of a distributed parameter that it reads."""
    if name in _ASKED_BY_FSDP:
        raise RuntimeError(
            "FSDP (fully_shard, FullyShardedDataParallel) of a model with DistributedParameters, which are shards "
            "already: use one or the other"
        )


def refuse_listing(owner: str, reader: FrameType | None) -> None:
    """Refuses some callers that list the parameters of a distributed module of class ``owner``.

    Raises:
        RuntimeError: the caller is DistributedDataParallel, or a function of torch.distributed.checkpoint that treats
            sharded optimizer states as full ones.
    """
    while reader is not None and reader.f_code.co_name.startswith("<"):  # a comprehension before Python 3.12
        reader = reader.f_back
    if reader is None:
        return
    file = reader.f_code.co_filename
    if file == ddp.__file__ and world_size() > 1:
        raise _replicated(owner)
    if file == _STATES_FILE and (name := _function_on_optimizers(reader)):
        raise RuntimeError(
            f"{name} of torch.distributed.checkpoint.state_dict was given {owner}, whose optimizer states are shards, "
            "which it takes for whole tensors: use OptimManager.state_dict(gather_opt=True) and load_state_dict(), "
            "state_dict(gather=True) of bmtrain's optimizers, or bmtrain.distributed.checkpoint"
        )


#: Source file of torch.distributed.checkpoint.state_dict, whose import is slow.
_STATES_FILE = os.path.join(os.path.dirname(torch.distributed.__file__), "checkpoint", "state_dict.py")


def _function_on_optimizers(reader: FrameType | None) -> str:
    """Returns the function of torch's state_dict.py that was called with optimizers, or an empty string."""
    name, has_optimizers = "", False
    while reader is not None and reader.f_code.co_filename == _STATES_FILE:
        name = reader.f_code.co_name
        has_optimizers |= name == "_verify_options" and bool(reader.f_locals.get("optims"))
        reader = reader.f_back
    return name if has_optimizers else ""


def refuse_replicated(param: torch.Tensor) -> None:
    """Refuses DistributedDataParallel that holds ``param``, which is outside of Blocks, through a plain module."""
    model = ddp.DistributedDataParallel._active_ddp_module
    if model is not None and world_size() > 1 and any(param is member for member in model._module_parameters):
        raise _replicated(f"a DistributedParameter of a {type(model.module).__name__}")


def adapt_torch_errors() -> None:
    """Makes functions of torch raise errors where they would mix shards, or where their advice does not fit."""
    for kind, explanation in (
        (ddp.DistributedDataParallel, _without_group),
        (torch.optim.Muon, _with_shards),
    ):
        if not hasattr(kind.__init__, "_bmtrain"):
            kind.__init__ = _explained(kind.__init__, explanation)  # type: ignore[method-assign]

    check = getattr(c10d, "_check_single_tensor", None)  # private
    if check is not None and not hasattr(check, "_bmtrain"):
        c10d._check_single_tensor = _refusing_shards(check)


def _refusing_shards(plain: Callable[..., None]) -> Callable[..., None]:
    """Wraps the check that torch's collectives make of their tensors."""

    @functools.wraps(plain)
    def check(x: Any, *args: Any, **kwargs: Any) -> None:
        plain(x, *args, **kwargs)
        caller, now = _getframe(1), context.current()
        is_world = caller.f_locals.get("group") in (None, c10d.GroupMember.WORLD)
        if now is not None and is_world and caller.f_code.co_name in OVER_ELEMENTS:
            now.engine.refuse_shard(f"torch.distributed.{caller.f_code.co_name}", x)

    check._bmtrain = True  # type: ignore[attr-defined]
    return check


def _explained(plain: Callable[..., None], explanation: Callable[[Any], str]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain(self, *args, **kwargs)
        except ValueError:
            if text := explanation(self):
                raise ValueError(text) from None
            raise

    init._bmtrain = True  # type: ignore[attr-defined]
    return init


def _without_group(_: Any) -> str:
    if world_size() == 1 or torch.distributed.is_initialized():
        return ""
    return (
        "DistributedDataParallel: expected a process group of torch, got none, as init_distributed() makes none. "
        "Around a model of bmtrain, leave it out: backward() sums the gradients over the ranks. Around a plain model, "
        "call torch.distributed.init_process_group() before"
    )


def _with_shards(optimizer: torch.optim.Optimizer) -> str:
    if not any(hasattr(p, "full_shape") for group in optimizer.param_groups for p in group["params"]):
        return ""
    return (
        "torch.optim.Muon: expected whole matrices, got DistributedParameters, which are flat: use "
        "bmtrain.optim.MuonOptimizer, or bmtrain.optim.whole_matrix(torch.optim.Muon, params, ...)"
    )


def warn_of_flatness(reader: FrameType) -> None:
    """Warns a script whose frame ``reader`` asks a flat shard for its number of dimensions."""
    warn_script(
        reader,
        "dim",
        "dim() and ndim of a DistributedParameter are 1 outside of forwards, as its shards are flat: a selection "
        "such as p.dim() > 1 (of what decays, of what is initialised) finds nothing. Use len(p.full_shape)",
    )


def warn_of_positions(key: str, what: str, shape: tuple[int, ...], reader: FrameType | None) -> None:
    """Warns a script whose frame ``reader``, perhaps through a function of torch, uses ``what`` on a shard."""
    level = 5
    while reader is not None and reader.f_globals.get("__name__") == "torch.nn.functional":
        level, reader = level + 1, reader.f_back
    warn_script(
        reader,
        key,
        f"{what} was used on a DistributedParameter of shape {shape}, or its .data, which outside of the Block's "
        "forward is this rank's shard, flat: it takes other elements than of the full tensor. Write in `with "
        "bmtrain.whole(module, write=True):`, and read from p.gather()",
        level,
    )


def warn_script(reader: FrameType | None, key: str, message: str, level: int = 4) -> None:
    """Warns once, on rank 0, at the frame ``reader``, ``level`` - 1 calls above, if it is a script's."""
    module = "torch" if reader is None else reader.f_globals.get("__name__", "")
    if rank() == 0 and module.partition(".")[0] not in ("bmtrain", "torch"):
        warn_once(f"parameter.{key}", message, stacklevel=level, category=UserWarning)


def _replicated(owner: str) -> RuntimeError:
    return RuntimeError(
        f"DistributedDataParallel around {owner}, which is distributed already: it gives every rank the shards of "
        "rank 0; leave it out, backward() sums the gradients over the ranks"
    )


#: Modules of torch that replace a parameter by a value computed from it.
_REPARAMETRIZING = frozenset(f"torch.nn.utils.{name}" for name in ("prune", "spectral_norm", "weight_norm"))
_OF_PARAMETRIZE = {"register_parametrization": "registering", "remove_parametrizations": "removing"}


def refuse_reparametrizing(owner: str, reader: FrameType | None) -> None:
    """Refuses callers that would reparametrize a shard as if it were the full parameter, and leave a plain one here.

    ``reader`` is the frame that registers a parameter of a distributed module, or reads its parametrizations.
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
    """Keeps reparametrizations of a module that is wrapped, and makes their removal an error.

    They compute with the gathered parameters, so they continue to work.
    """
    for hook in module._forward_pre_hooks.values():
        for base in type(hook).__mro__:
            if base.__module__ in _REPARAMETRIZING:
                what = f"removing {base.__module__}"
                vars(hook)["remove"] = functools.partial(refuse_change, what, type(module).__name__)


def refuse_change(what: str, owner: str, *_: object) -> NoReturn:
    """Raises RuntimeError: ``what`` would treat shards as full parameters."""
    raise RuntimeError(
        f"{owner}: {what} after BMTrainModelWrapper, when parameters are shards: do it before, or load state_dict() "
        "into the model without the wrapper and do it there"
    )


def check_substitute(owner: str, name: str, value: torch.Tensor, shapes: dict[str, Any]) -> None:
    """Raises ValueError if ``torch.func.functional_call`` put a shard in the place of the full parameter ``name``."""
    shape = shapes.get(name)
    if shape is not None and value.dim() == 1 and value.shape != shape:
        raise ValueError(
            f"functional_call: expected a full tensor of shape {tuple(shape)} for {owner}.{name}, got a shard of "
            f"shape {tuple(value.shape)}; parameters() gives shards, state_dict() full tensors"
        )
