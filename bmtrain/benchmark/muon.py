"""Time of a Muon step over shards, against `torch.optim.Muon` over whole matrices and against Adam.

The matrices have the shapes of the layers of a GPT and random gradients. `torch.optim.Muon` has whole matrices on every
rank, as under data parallelism, and orthogonalises all of them there; so has DeepSpeed's, where it is installed, whose
ranks divide them and gather the new weights; over shards each matrix has one owner. The candidates take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch

from .._tools.table import print_table
from .._tools.terminal import output_file
from ..block_layer import Block
from ..global_var import config, rank, world_size
from ..init import init_distributed
from ..layer import DistributedModule
from ..optim import AdamOptimizer, MuonOptimizer, whole_matrix
from ..parameter import DistributedParameter
from ..synchronize import synchronize
from ._launch import launch
from ._training import in_turn, timed

__all__ = ["add_arguments", "run"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TORCH = "torch.optim.Muon, whole"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench muon``."""
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--layers", type=int, default=4, help="layers")
    parser.add_argument("--dim", type=int, default=512, help="width")
    parser.add_argument("--dtype", choices=_DTYPES, default="fp32", help="dtype of the parameters")
    parser.add_argument("--repeat", type=int, default=7, help="steps of each optimizer")
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")


def run(arguments: argparse.Namespace) -> None:
    """Starts the ranks; in a rank, measures, and on rank 0 prints the table."""
    if "RANK" not in os.environ:
        launch(arguments.ranks)
        return
    init_distributed(seed=0)
    candidates = _candidates(arguments)
    seconds = in_turn(candidates, lambda optimizer, _: timed(optimizer.step), arguments.repeat)
    if rank() == 0:
        _report(arguments, seconds, {name: _state_bytes(o) for name, o in candidates.items()})
    synchronize()


class _Layer(DistributedModule):
    """The matrices of a layer: query, key, value, output; up and down."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = [(dim, dim)] * 4 + [(4 * dim, dim), (dim, 4 * dim)]
        self.weights = torch.nn.ParameterList(
            DistributedParameter(torch.randn(shape).to(dtype)) for shape in shapes
        )


def _candidates(arguments: argparse.Namespace) -> dict[str, torch.optim.Optimizer]:
    dtype = _DTYPES[arguments.dtype]

    def shards() -> list[DistributedParameter]:
        torch.manual_seed(0)
        layers = [Block(_Layer(arguments.dim, dtype)) for _ in range(arguments.layers)]
        parameters: list[Any] = [p for layer in layers for p in layer.parameters()]
        for p in parameters:
            p.load_grad(torch.randn(p.full_shape))
        return parameters

    def whole() -> list[torch.nn.Parameter]:
        parameters = [torch.nn.Parameter(p.gather().detach().float().clone()) for p in shards()]
        for p in parameters:
            p.grad = torch.randn_like(p)
        return parameters

    return {
        _TORCH: torch.optim.Muon(whole()),
        **_deepspeed(whole),
        "MuonOptimizer": MuonOptimizer(shards()),
        "whole_matrix(torch.optim.Muon)": whole_matrix(torch.optim.Muon, shards()),
        "AdamOptimizer": AdamOptimizer(shards()),
    }


def _deepspeed(whole: Callable[[], list[torch.nn.Parameter]]) -> dict[str, torch.optim.Optimizer]:
    try:
        deepspeed = importlib.import_module("deepspeed")
        muon = importlib.import_module("deepspeed.runtime.zero.muon.original_muon").Muon
    except ImportError:
        return {}
    deepspeed.ops.__compatible_ops__.clear()  # it would compile its all-reduce in shared memory
    deepspeed.init_distributed("gloo" if config["device"].type == "cpu" else "nccl", verbose=False)
    return {"DeepSpeed's Muon, whole": muon(whole(), ns_method="standard")}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )


def _report(arguments: argparse.Namespace, seconds: dict[str, list[float]], state: dict[str, int]) -> None:
    print(
        f"{arguments.layers} layers of width {arguments.dim}, {arguments.dtype}, {world_size()} ranks of "
        f"{torch.get_num_threads()} threads, {os.cpu_count()} processors"
    )
    base = seconds[_TORCH]
    rows = []
    for name, values in seconds.items():
        ratio = statistics.median(own / whole for own, whole in zip(values, base, strict=True))
        figures = [statistics.median(values) * 1e3, min(values) * 1e3, ratio, state[name] / 2**20]
        rows.append([name, *(f"{figure:.2f}" for figure in figures)])
    print_table(["", "ms", "fastest", "of torch", "state MiB"], rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seconds": seconds, "state": state}, indent=2))
