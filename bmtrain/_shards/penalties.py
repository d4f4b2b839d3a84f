"""Detection of losses that use shards themselves, such as penalties over ``model.parameters()``."""

from __future__ import annotations

import os
import weakref
from functools import partial
from sys import _getframe
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import unserializable_hook

from .._base.deprecate import warn_once, was_given
from .._base.tensors import nodes_of
from ..global_var import rank

_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


def watch(param: Any) -> None:
    """Warns of gradients that reach the shard of a trained parameter other than through its gathered tensor."""
    param._reduced = [] if param.requires_grad else None
    if param.requires_grad:
        torch.Tensor.register_hook(param, unserializable_hook(partial(_see, weakref.ref(param))))


def require_grad(param: Any, requires_grad: bool = True) -> Any:
    """A parameter's ``requires_grad_``: one that was frozen when it was made is watched from now on."""
    torch.Tensor.requires_grad_(param, requires_grad)
    if requires_grad and param._reduced is None and not param._backward_hooks:
        watch(param)
    return param


#: A parameter's ``requires_grad``, which is read without a call of Python.
REQUIRES_GRAD = property(torch.Tensor.requires_grad.__get__, require_grad)  # type: ignore[attr-defined]


def expected(param: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a shard from its gathered tensor, which a backward is about to send there."""
    if param._backward_hooks and param._reduced is not None:
        param._reduced.append((gradient.data_ptr(), gradient._version))
    return gradient


def _see(known: weakref.ref[Any], gradient: torch.Tensor | None) -> None:
    """Hook on the sum of the gradients that the graphs of autograd have for a shard; Blocks send theirs elsewhere."""
    param = known()
    if gradient is None or param is None or param._reduced is None:
        return
    sent, param._reduced = param._reduced, []
    # A sum is another tensor, or a later version of the first. Several gathered tensors have one in any case.
    is_gathered = len(sent) > 1 or sent == [(gradient.data_ptr(), gradient._version)]
    spec = param._spec
    number = spec.group.size * (1 if spec.replicas is None else spec.replicas.size)
    if is_gathered or rank() != 0 or param._is_full() or number == 1:
        return
    param._reduced = None  # its graph, which may be large, is searched once
    if was_given("shards_in_loss"):
        return
    level, outputs = 1, None
    frame: FrameType | None = _getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        outputs = outputs or frame.f_locals.get("t_outputs")  # of torch.autograd.graph._engine_run_backward
        level, frame = level + 1, frame.f_back
    if outputs is not None and not _is_used(param, outputs):
        return  # a thread of a GPU does not know them
    warn_once(
        "shards_in_loss",
        f"backward: the loss uses {param._label} itself, as sum(p.square().sum() for p in model.parameters()) does. "
        "It is this rank's shard (at level 0 a copy): each shard has a part of such a penalty, whose gradient is added "
        f"once, where gradients of the rest of the loss are summed over {number} ranks. Use p.gather(), or "
        f"weight_decay=; a sum over elements may be added to the divided rest instead: "
        f"(loss / {number} + penalty).backward()",
        stacklevel=level,
        category=UserWarning,
    )


def _is_used(param: torch.Tensor, outputs: Any) -> bool:
    """Whether a graph leads to a shard, other than through functions of the user or of gathers."""
    return any(
        getattr(follower, "variable", None) is param and not isinstance(node, BackwardCFunction)
        for node in nodes_of(outputs)
        for follower, _ in node.next_functions
    )
