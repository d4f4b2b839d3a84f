"""Calls of blocks: with gradients or without, and with which parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .._base.precision import computing_in
from .._base.tensors import refuse_tangents
from .._base.tree import tensors_of
from .._ranks.context import require_gathering
from .block_state import BlockState
from .call import BlockCall, OwnCaches, kept_alive
from .engine import Engine
from .hooked import HookedResults, SeveralResults
from .offload import Offload
from .phase import Phase
from .recompute import Replay
from .run_state import ModuleState


def run_block(
    block: BlockState, forward: Callable[..., Any], modules: ModuleState, args: Any, kwargs: Any
) -> Any:
    """Runs ``forward(*args, **kwargs)`` with the block's parameters gathered.

    Returns:
        The result of ``forward``, a list as a tuple, attached to the caller's graph.

    Raises:
        RuntimeError: the block's parameters are on another stage of a pipeline.
    """
    require_gathering("a Block")
    if block.other_stage is not None:
        raise RuntimeError(
            f"{block.label} runs on stage {block.other_stage} of the pipeline, which alone has its parameters: "
            "call the PipelineTransformerBlockList, on all ranks, and not its blocks one by one"
        )
    if block.policy.compute_dtype is not None:
        forward = computing_in(block.policy.compute_dtype, forward)
    if not torch.is_grad_enabled():
        return _as_tuple(_evaluated(block, forward, modules, args, kwargs))
    if forward_ad._current_level >= 0:
        refuse_tangents(block.label, tensors_of((args, kwargs)))
    call = BlockCall(block, forward, modules)
    # In the order in which they enclose each other: the last one is nearest to the forward.
    if modules.has_own_forward_hooks():
        call.parts.append(HookedResults(call))
    if block.policy.offload_activations and call.engine.mover is not None:
        call.parts.append(Offload(call, call.engine.mover, args, kwargs))
    if block.recomputes:
        call.parts.append(Replay(call))
    call.of_several = SeveralResults
    return _as_tuple(call.run(args, kwargs))


def _evaluated(
    block: BlockState, forward: Callable[..., Any], modules: ModuleState, args: Any, kwargs: Any
) -> Any:
    engine: Engine = block.engine
    try:
        engine.open(block, Phase.EVALUATE)
        with OwnCaches(), engine.reads.scope(modules.root):
            result = kept_alive(block, forward(*args, **kwargs))
    except BaseException:
        engine.abandon(block)
        raise
    engine.close(block, keep=False)
    return result


def _as_tuple(result: Any) -> Any:
    return tuple(result) if type(result) is list else result
