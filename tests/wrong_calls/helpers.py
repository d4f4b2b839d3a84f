"""What is called beside the training itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bmtrain as bmt
from bmtrain import timeline, utils

from .kinds import Calls

__all__ = ["helpers"]


def helpers() -> Calls:
    """Lists of Blocks, policies, rounding, names of NCCL, reports."""
    block = bmt.Block(bmt.nn.Linear(2, 2))
    optimizer = bmt.optim.AdamOptimizer(block.parameters(), lr=0.1)

    def entered(make: Callable[..., Any]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            with make(*arguments):
                pass

        return call

    return {
        "TransformerBlockList": (
            lambda modules, num_hidden: bmt.TransformerBlockList(modules, num_hidden),
            {"modules": ("modules", [bmt.Block(bmt.nn.Linear(2, 2))]), "num_hidden": ("positive count", 1)},
        ),
        "PipelineTransformerBlockList": (
            bmt.PipelineTransformerBlockList,
            {"modules": ("modules", [bmt.Block(bmt.nn.Linear(2, 2), mode="PIPE")])},
        ),
        "default_policy": (entered(bmt.default_policy), {"policy": ("policy", bmt.BlockPolicy())}),
        "grouped_parameters": (
            lambda module: list(bmt.grouped_parameters(module)),
            {"module": ("modules", block)},
        ),
        "optim_step": (
            bmt.optim_step,
            {"optim": ("stepped", optimizer), "lr_scheduler": ("schedule", None)},
        ),
        "memory_report": (
            bmt.memory_report,
            {"model": ("optional module", block), "optim": ("optimizers", optimizer)},
        ),
        "round_up": (utils.round_up, {"x": ("integer", 5), "d": ("positive count", 4)}),
        "tp_split_tensor": (
            utils.tp_split_tensor,
            {"t": ("a tensor", torch.ones(2, 2)), "dim": ("dimension", 0)},
        ),
        "AverageRecorder": (
            utils.AverageRecorder,
            {"alpha": ("share", 0.9), "start_value": ("a float", 0.0)},
        ),
        "AverageRecorder.record": (
            lambda v: utils.AverageRecorder().record(v),
            {"v": ("a float", 1.0)},
        ),
        "survive.register": (
            lambda get, set: bmt.survive.register("state", get, set),
            {"get": ("callable", dict), "set": ("callable", len)},
        ),
        "survive.steps": (bmt.survive.steps, {"stop": ("integer", 2), "start": ("integer", 0)}),
        "op2nccl": (bmt.nccl.op2nccl, {"op": ("op", "sum")}),
        "dtype2nccl": (bmt.nccl.dtype2nccl, {"dtype": ("nccl dtype", torch.float32)}),
        "timeline.record": (
            lambda steps, skip, directory: timeline.record(steps, skip=skip, directory=directory),
            {
                "steps": ("optional positive", 1),
                "skip": ("step number", 0),
                "directory": ("optional path", None),
            },
        ),
    }
