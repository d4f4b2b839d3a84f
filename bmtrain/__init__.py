"""Sharded (ZeRO) training: parameters, gradients and optimizer state spread over all ranks.

A training script, started once for each rank by ``torchrun``::

    import bmtrain as bmt

    bmt.init_distributed(seed=0)
    model = bmt.BMTrainModelWrapper(model)  # any torch.nn.Module; layers of a ModuleList become Blocks
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()  # OptimManager(loss_scale=2**15) for float16
    manager.add_optimizer(optimizer)
    for batch in bmt.data.loader(dataset, batch_size=8):  # this rank's own samples
        manager.zero_grad()
        manager.backward(loss_of(model, batch))
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
    bmt.save(model, "model.pt")  # torch.load reads it, with the names of the plain model

To write models for it, see `Block`, `DistributedModule`, `DistributedParameter` and `TransformerBlockList`; to save a
run and resume it, ``bmtrain.distributed.checkpoint``; tools are ``bmtrain --help``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._tools.command_line import answer_early, report_broken

answer_early()  # `bmtrain --help` without the time that torch takes

try:
    from ._base.build import build_info, load_extension

    load_extension()  # before any module that needs it, so that a core built for another torch is named as such
except ImportError as error:
    report_broken(error)  # where this is a command, `bmtrain doctor` among them
    raise

from . import block_layer, global_var, layer, param_init, parameter, utils
from ._engine.policy import BlockPolicy, Recompute
from ._model.block_build import default_policy
from ._version import __version__
from .block_layer import Block, TransformerBlockList
from .checkpointing import checkpoint
from .global_var import config, rank, world_size
from .layer import DistributedModule
from .param_init import grouped_parameters, init_parameters
from .parameter import DistributedParameter, ParameterInitializer
from .synchronize import gather_result, sum_loss, synchronize, wait_loader
from .utils import load_nccl_pypi, print_block, print_dict, print_rank, see_memory
from .zero_context import whole

if TYPE_CHECKING:  # these load when they are first used, see _ON_FIRST_USE
    from . import accumulate as accumulate
    from . import backward as backward
    from . import (
        benchmark,
        data,
        dcp,
        debug,
        distributed,
        hook_func,
        init,
        inspect,
        loss,
        lr_scheduler,
        nccl,
        nn,
        optim,
        pipe_layer,
        plan,
        store,
        survive,
        timeline,
        virtual,
        weights,
        wrapper,
    )
    from . import convert as convert
    from . import memory as memory
    from .accumulate import no_sync
    from .backward import optim_step
    from .data import batches
    from .init import init_distributed
    from .memory import MemoryReport, memory_report
    from .nn import shard_sequence
    from .pipe_layer import PipelineTransformerBlockList
    from .store import load, save
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
    "batches",
    "benchmark",
    "block_layer",
    "build_info",
    "checkpoint",
    "config",
    "data",
    "dcp",
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
    "shard_sequence",
    "store",
    "sum_loss",
    "survive",
    "synchronize",
    "timeline",
    "utils",
    "virtual",
    "virtual_shards",
    "wait_loader",
    "weights",
    "whole",
    "world_size",
    "wrapper",
]

#: Module -> its names here. `import bmtrain` loads Blocks and what they need; these modules load when one of their
#: names, or the module itself, is first used.
_ON_FIRST_USE: dict[str, tuple[str, ...]] = {
    "accumulate": ("no_sync",),
    "backward": ("optim_step",),
    "benchmark": (),
    "convert": (),
    "data": ("batches",),
    "dcp": (),
    "debug": (),
    "distributed": (),
    "hook_func": (),
    "init": ("init_distributed",),
    "inspect": (),
    "loss": (),
    "lr_scheduler": (),
    "memory": ("MemoryReport", "memory_report"),
    "nccl": (),
    "nn": ("shard_sequence",),
    "optim": (),
    "pipe_layer": ("PipelineTransformerBlockList",),
    "plan": (),
    "store": ("load", "save"),
    "survive": (),
    "timeline": (),
    "virtual": ("virtual_shards",),
    "weights": (),
    "wrapper": ("BMTrainModelWrapper",),
}
_MODULE_OF = {name: module for module, names in _ON_FIRST_USE.items() for name in names}


def _elsewhere(name: str) -> str:
    """Returns a hint for a class that a module of the package has, such as an optimizer."""
    for module in ("optim", "nn", "loss", "lr_scheduler") if name[:1].isupper() else ():
        if name in importlib.import_module(f".{module}", __name__).__all__:
            return f": it is {__name__}.{module}.{name}"
    return ""


if not TYPE_CHECKING:  # with it, type checkers would accept any name

    def __getattr__(name: str) -> object:
        module = _MODULE_OF.get(name, name)
        if module not in _ON_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_elsewhere(name)}")
        loaded = importlib.import_module(f".{module}", __name__)
        for own in _ON_FIRST_USE[module]:
            globals()[own] = getattr(loaded, own)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE, *_MODULE_OF})
