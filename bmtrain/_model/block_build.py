"""Preparation and checks of a module before a Block is built around it, and the policy of Blocks built without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._engine.engine import current_engine
from .._engine.policy import BlockPolicy
from .._ranks.context import Group
from .._shards.block_ref import GREW, OWNER, BlockRef
from .._shards.sharding import ShardSpec
from .._shards.stage import StagedShardSpec
from ..global_var import context
from ..parameter import DistributedParameter
from .state_dict import install_hooks_below


@contextmanager
def default_policy(policy: BlockPolicy) -> Iterator[None]:
    """Context manager that sets the policy of Blocks built in it; their own arguments take precedence.

    Args:
        policy: for Blocks built without ``policy``, ``zero_level`` and ``use_checkpoint``.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`.
        TypeError: ``policy`` is not a :class:`BlockPolicy`.

    Example:
        >>> with bmtrain.default_policy(bmtrain.BlockPolicy(level=2)):
        ...     model = bmtrain.BMTrainModelWrapper(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    """
    if not isinstance(policy, BlockPolicy):
        raise TypeError(f"policy: expected a BlockPolicy, got {policy!r:.80} ({type(policy).__name__})")
    engine = current_engine(context())
    before, engine.default_policy = engine.default_policy, policy
    try:
        yield
    finally:
        engine.default_policy = before


def dissolve_inner_blocks(module: torch.nn.Module, block_class: type) -> torch.nn.Module:
    """Returns ``module`` with every Block in it replaced by the module that the Block was built around."""
    if type(module) is block_class:
        _release_parameters(module)
        module = module.__dict__["_module"]
    for owner in list(module.modules()):
        for name, child in owner._modules.items():
            if type(child) is block_class:
                _release_parameters(child)
                owner._modules[name] = child.__dict__["_module"]
    return module


def _release_parameters(block: Any) -> None:
    for storage in block._storages:
        storage.shards.adopt_data()
    for param in block.parameters():
        if isinstance(param, DistributedParameter):
            param._block = None
            param.__dict__.pop("_trains_in_block", None)


def adopt_parameters(
    block: Any, module: torch.nn.Module, reference: BlockRef
) -> list[tuple[str, DistributedParameter]]:
    """Returns the parameters below ``module``, whose modules are marked as belonging to ``block``.

    Raises:
        ValueError: a parameter is not distributed, or another Block owns it.
    """
    named: dict[int, tuple[str, DistributedParameter]] = {}
    for name, param in module.named_parameters():
        if not isinstance(param, DistributedParameter):
            shape = "unknown" if isinstance(param, torch.nn.UninitializedParameter) else tuple(param.shape)
            raise ValueError(
                f"{block._label}: parameter {name!r} of shape {shape} is a {type(param).__name__}; a "
                "Block needs bmtrain.DistributedParameter (or wrap the model with bmtrain.BMTrainModelWrapper)"
            )
        owner = param._block() if param._block is not None else None
        if owner is not None and owner is not block:
            raise ValueError(
                f"parameter {name!r} of {block._label} belongs to another Block already: {owner._label}; put what "
                "uses it in one Block, or hold the module that owns it outside of Blocks and pass the tensor"
            )
        named[id(param)] = (name, param)
    for child in module.modules():
        child.__dict__[OWNER] = reference
        child.__dict__.pop(GREW, None)
    install_hooks_below(module)
    return list(named.values())


@contextmanager
def packed_again(block: Any) -> Iterator[None]:
    """Context manager in which the parameters of a block of a pipeline belong to its stage alone, as its ranks build it
    again while other stages build others."""
    staged = None
    for param in (param for storage in block._storages for param in storage.parameters):
        spec = param._spec
        if isinstance(spec, StagedShardSpec):
            staged = spec
            param._spec = ShardSpec(spec.shape, spec.group, spec.layout, spec.index, spec.replicas)
    try:
        yield
    finally:  # some may have moved before an error
        for param in (param for storage in block._storages for param in storage.parameters):
            if staged is not None:
                own = param._spec
                place = own.shape, own.group, own.layout, own.index, own.replicas
                param._spec = StagedShardSpec(*place, staged.pipe, staged.owner)


def leave_to_stage(block: Any, pipe: Group, owner: int) -> None:
    """Frees the block's shards on all stages of the pipeline except ``owner``."""
    for storage in block._storages:
        for index, param in enumerate(storage.parameters):
            param._spec = StagedShardSpec(
                param._original_shape,
                storage.group,
                storage.shards.layout,
                index,
                storage.replicas,
                pipe,
                owner,
            )
            if pipe.rank != owner and not param.is_meta:
                param.data = param.data.new_empty(0)
    if pipe.rank != owner:
        block.__dict__["_storages"] = []
        # Not a new state, which would take a number: later Blocks must get the same numbers on all stages.
        block._runtime.engine.replace_buffers(block._runtime, [])
        block._runtime.store([], pipe.comm)
        block._runtime.other_stage = owner
        block._runtime.reference.runtime = lambda: None
