"""Sharded (ZeRO) training: parameters, gradients and optimizer state spread over all ranks."""

from __future__ import annotations

from . import debug, global_var, hook_func, init, utils
from ._version import __version__
from .global_var import config, rank, world_size
from .init import init_distributed
from .synchronize import gather_result, sum_loss, synchronize, wait_loader
from .utils import load_nccl_pypi, print_block, print_dict, print_rank, see_memory

__all__ = [
    "__version__",
    "config",
    "debug",
    "gather_result",
    "global_var",
    "hook_func",
    "init",
    "init_distributed",
    "load_nccl_pypi",
    "print_block",
    "print_dict",
    "print_rank",
    "rank",
    "see_memory",
    "sum_loss",
    "synchronize",
    "utils",
    "wait_loader",
    "world_size",
]
