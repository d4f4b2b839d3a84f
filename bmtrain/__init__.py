"""Sharded (ZeRO) training: parameters, gradients and optimizer state spread over all ranks.

A training script, started once for each rank by ``torchrun``::

    import bmtrain as bmt

    bmt.init_distributed(seed=0)
    model = bmt.BMTrainModelWrapper(model)  # any torch.nn.Module; layers of a ModuleList become Blocks
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()  # OptimManager(loss_scale=2**15) for float16
    manager.add_optimizer(optimizer)
    for batch in batches:  # this rank's own, on bmt.config["device"]
        manager.zero_grad()
        manager.backward(loss_of(model, batch))
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
    bmt.save(model, "model.pt")  # torch.load reads it, with the names of the plain model

To write models for it, see `Block`, `DistributedModule`, `DistributedParameter` and `TransformerBlockList`; to save a
run and resume it, ``bmtrain.distributed.checkpoint``; tools are ``python -m bmtrain --help``.
"""

from __future__ import annotations

from ._build import build_info, load_extension

load_extension()  # before any module that needs it, so that a core built for another torch is named as such

from . import (
    benchmark,
    block_layer,
    debug,
    distributed,
    global_var,
    hook_func,
    init,
    inspect,
    layer,
    loss,
    lr_scheduler,
    nccl,
    nn,
    optim,
    param_init,
    parameter,
    pipe_layer,
    plan,
    store,
    timeline,
    utils,
    virtual,
    weights,
    wrapper,
)
from ._engine.policy import BlockPolicy, Recompute, default_policy
from ._version import __version__
from .accumulate import no_sync
from .backward import optim_step
from .block_layer import Block, TransformerBlockList
from .checkpointing import checkpoint
from .global_var import config, rank, world_size
from .init import init_distributed
from .layer import DistributedModule
from .memory import MemoryReport, memory_report
from .param_init import grouped_parameters, init_parameters
from .parameter import DistributedParameter, ParameterInitializer
from .pipe_layer import PipelineTransformerBlockList
from .store import load, save
from .synchronize import gather_result, sum_loss, synchronize, wait_loader
from .utils import load_nccl_pypi, print_block, print_dict, print_rank, see_memory
from .virtual import virtual_shards
from .wrapper import BMTrainModelWrapper

CheckpointBlock = Block

__all__ = [
    "BMTrainModelWrapper",
    "Block",
    "BlockPolicy",
    "CheckpointBlock",
    "DistributedModule",
    "DistributedParameter",
    "MemoryReport",
    "ParameterInitializer",
    "PipelineTransformerBlockList",
    "Recompute",
    "TransformerBlockList",
    "__version__",
    "benchmark",
    "block_layer",
    "build_info",
    "checkpoint",
    "config",
    "debug",
    "default_policy",
    "distributed",
    "gather_result",
    "global_var",
    "grouped_parameters",
    "hook_func",
    "init",
    "init_distributed",
    "init_parameters",
    "inspect",
    "layer",
    "load",
    "load_nccl_pypi",
    "loss",
    "lr_scheduler",
    "memory_report",
    "nccl",
    "nn",
    "no_sync",
    "optim",
    "optim_step",
    "param_init",
    "parameter",
    "pipe_layer",
    "plan",
    "print_block",
    "print_dict",
    "print_rank",
    "rank",
    "save",
    "see_memory",
    "store",
    "sum_loss",
    "synchronize",
    "timeline",
    "utils",
    "virtual",
    "virtual_shards",
    "wait_loader",
    "weights",
    "world_size",
    "wrapper",
]
