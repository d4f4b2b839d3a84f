"""Refusal of inputs of ``torch.autograd.grad()`` and ``backward(inputs=)`` that Blocks hide."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._base.tensors import edge_of, nodes_of
from .._ranks.context import current

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
