"""Refusal of torch functions that treat a shard's gradient as the full gradient.

[Note: Readers of a shard's gradient]
`DistributedParameter.grad` is this rank's shard. Most code that reads it is elementwise and correct; a few functions of
torch reduce over all elements, and would silently use this rank's elements only, with a different result on each rank.
They read only `grad`, where torch has no hook, so the attribute checks its caller: one lookup of the calling function's
file name in the set below.

torch.compile makes a fake tensor of each tensor of a graph together with its `grad`, which must have the same shape.
While a Block runs, its parameters have their full shape, and gradients of earlier passes have the shape of the shard:
they are not part of the graph, and hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch._subclasses import meta_utils
from torch.amp import grad_scaler
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import clip_grad
from torch.optim import _adafactor, lbfgs

from .._base.tensors import edge_of, nodes_of
from .._ranks.context import current
from ..global_var import world_size

_ELEMENTWISE = "use bmtrain.optim.AdamOptimizer, or an elementwise optimizer of torch.optim"

#: File and function of torch -> its name for users, and the remedy.
_REFUSED = {
    (clip_grad.__file__, "clip_grad_norm_"): (
        "torch.nn.utils.clip_grad_norm_",
        "use OptimManager.clip_grad_norm, which computes the norm over all ranks' gradients",
    ),
    (grad_scaler.__file__, "_unscale_grads_"): (
        "torch.amp.GradScaler",
        "use bmtrain.optim.OptimManager(loss_scale=...), whose ranks agree on which steps to skip",
    ),
    (_adafactor.__file__, "_init_group"): (
        "torch.optim.Adafactor",
        "use bmtrain.optim.whole_matrix(torch.optim.Adafactor, params, ...)",
    ),
    (lbfgs.__file__, "_gather_flat_grad"): ("torch.optim.LBFGS", _ELEMENTWISE),
}
#: The same by module, of libraries that may not be imported.
_REFUSED_IN_MODULES = {
    ("peft.tuners.adalora.layer", "update_ipt"): (
        "AdaLoRA of peft, which ranks rows and columns of adapters,",
        "use peft.LoraConfig, whose adapters have a fixed rank",
    )
}
_STAND_INS = meta_utils.__file__
#: Files with such functions. Checked first, because gradients are read often.
CHECKED_FILES = frozenset({_STAND_INS, *(file for file, _ in _REFUSED)})
CHECKED_FUNCTIONS = frozenset(function for _, function in _REFUSED_IN_MODULES)
#: Refused functions that are correct on a single rank, which has all elements.
_RIGHT_ALONE = ("torch.nn.utils.clip_grad_norm_", "torch.amp.GradScaler", "torch.optim.LBFGS")


def is_shown(param: torch.Tensor, gradient: torch.Tensor | None, reader: FrameType) -> bool:
    """Whether the function in frame ``reader`` may see the ``gradient`` of ``param``.

    Raises RuntimeError if it would treat a shard as the full gradient.
    """
    if reader.f_code.co_filename == _STAND_INS:
        return gradient is None or gradient.shape == param.shape
    _refuse_whole_tensor_tools(param, reader)
    return True


def _refuse_whole_tensor_tools(param: torch.Tensor, reader: FrameType) -> None:
    frame: FrameType | None = reader
    while frame is not None and frame.f_code.co_name.startswith("<"):  # a comprehension before Python 3.12
        frame = frame.f_back
    code = reader.f_code if frame is None else frame.f_code
    module = str(reader.f_globals.get("__name__"))
    refused = _REFUSED.get((code.co_filename, code.co_name)) or _REFUSED_IN_MODULES.get(
        (module, code.co_name)
    )
    if refused is None:
        return
    name, remedy = refused
    if world_size() == 1 and name in _RIGHT_ALONE:
        return
    shape = tuple(getattr(param, "_original_shape", param.shape))
    raise RuntimeError(
        f"{name} was given a DistributedParameter of shape {shape}, but would see {param.numel()} of its elements, "
        f"flat, on this rank: {remedy}"
    )


#: Key of a weak reference to the call in the metadata of its node.
CALL = "bmtrain"
#: Names of the node of a pipeline's call, and of nodes between a view of a result and the call.
_PIPELINE, _OF_VIEWS = "_PipelineBackward", ("torch::autograd::Identity", "AsStridedBackward0")


def refuse_hidden(outputs: tuple[Any, ...], inputs: Any) -> None:
    """Refuses inputs of a backward of whose gradient a part would be lost.

    [Note: Inputs that Blocks hide]
    torch runs the nodes that lead to the inputs, and sees one node of a Block. That leads to the Block's arguments
    alone: not to its parameters, to leaves that its forward reads elsewhere, or to a result with which it computes
    another one. Each call's node names the call, so that its graph is searched for inputs before any node runs.
    """
    engine: Any = getattr(current(), "engine", None)
    if engine is None or not engine.blocks:
        return
    inputs = [given for given in inputs if isinstance(given, (torch.Tensor, GradientEdge))]
    nodes = list(nodes_of(outputs))
    islands = [node for node in nodes if node.name() in ("bmtrain::Island", _PIPELINE)]
    if not islands:
        return
    used = {*map(edge_of, outputs), *(edge for node in nodes for edge in node.next_functions)}
    for given in inputs:
        _refuse_parameter(given)
        _refuse_operand(given, used)
    _refuse_inside(islands, inputs)


def _refuse_parameter(given: Any) -> None:
    if getattr(given, "_block", None) is not None and not given._is_full():
        raise _error(
            given,
            "of a Block, to which no graph leads; use backward(), with requires_grad_(False) on parameters "
            "that get none, in forward too",
        )


def _refuse_operand(given: Any, used: set[tuple[Any, int]]) -> None:
    """Refuses a result with which its Block's forward computes another one of the ``used`` edges."""
    node, number = edge_of(given)
    if node is not None and node.name() in _OF_VIEWS:
        node, number = node.next_functions[0]
    call = _call_of(node)
    if call is None or not call.outputs:
        return
    others = [call.outputs[other] for island, other in used if island is node and other != number]
    if is_used_for(call.outputs[number], others):
        raise _error(
            given,
            f"as a result of a Block ({call.block.label}), with which its forward computes another "
            "result; let two Blocks compute them",
        )


def _refuse_inside(islands: list[Any], inputs: list[Any]) -> None:
    """Refuses leaves that the forward of a Block reads, and tensors that it computes."""
    leaves, inner = {id(given): given for given in inputs}, {edge_of(given)[0]: given for given in inputs}
    for island in islands:  # with those inside of others
        call = _call_of(island)
        # The loss of a pipeline has run its backward; a script's function may have the name of the pipeline's.
        of_pipeline = getattr(island, "call", None) if island.name() == _PIPELINE else None
        alive = getattr(of_pipeline, "alive", {})
        for node in nodes_of([each.out for each in alive.values()] if call is None else call.outputs):
            if node.name() == "bmtrain::Island":
                islands.append(node)
            is_leaf = node.name() == "torch::autograd::AccumulateGrad"
            given = inner.get(node, leaves.get(id(node.variable)) if is_leaf else None)
            if given is not None and call is not None:
                remedy = (
                    "reads other than as an argument; pass it as an argument, or use backward(), with "
                    "requires_grad_(False) on parameters that get none"
                    if is_leaf
                    else "computes; return it from the Block, or record it by bmtrain.inspect.record_tensor"
                )
                raise _error(given, f"which the forward of a Block ({call.block.label}) {remedy}")


def _error(given: Any, problem: str) -> RuntimeError:
    shape = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else "an edge"
    name = getattr(given, "_label", shape)
    return RuntimeError(f"torch.autograd.grad() or backward(inputs=...): got {name} {problem}")


def _call_of(node: Any) -> Any:
    reference = node.metadata.get(CALL) if node is not None and node.name() == "bmtrain::Island" else None
    return reference and reference()


def is_used_for(tensor: Any, others: Iterable[Any]) -> bool:
    """Whether ``others`` were computed with ``tensor``."""
    # A leaf has an edge too.
    edge = edge_of(get_gradient_edge(tensor) if isinstance(tensor, torch.Tensor) else tensor)
    return any(edge in node.next_functions for node in nodes_of(others))
