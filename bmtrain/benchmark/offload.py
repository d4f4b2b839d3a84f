"""Exposed time of the offloaded optimizer step: updates inside the step, and overlapped.

The same GPT is trained three times by the same ranks: without any update, with updates that are computed inside
``step()`` (``overlap=False``), and with updates that continue while the next forward runs. The additional time over the
first variant is the exposed part of the optimizer. The variants take turns of several steps. The clock stops before the
last overlapped updates of a turn end, because updates that began before it started are included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._tools.gpt import GPT
from .._tools.terminal import output_file
from ..block_layer import Block
from ..global_var import rank, world_size
from ..init import init_distributed
from ..optim import AdamOffloadOptimizer, OptimManager
from ..synchronize import synchronize
from ._bars import Bar, Chart, picture
from ._launch import launch
from ._options import add_run
from ._training import in_turn, sharded, timed

__all__ = ["add_arguments", "run"]

_STEPS = 3  # of a turn
_NONE, _INSIDE, _OVERLAPPED = "no update", "overlap=False", "overlap=True"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench offload``."""
    add_run(parser, ranks=1, seq=128)
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of the parameters")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each variant")
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")
    parser.add_argument("--plot", type=output_file, help="draw them into this SVG file")


def run(arguments: argparse.Namespace) -> None:
    """Starts the ranks; in a rank, measures, and on rank 0 prints the table."""
    if "RANK" not in os.environ:
        launch(arguments.ranks, {"OMP_NUM_THREADS": str(arguments.threads)})
        return
    init_distributed(seed=0)
    torch.set_num_threads(arguments.threads)
    variants = {name: _Variant.build(arguments, name) for name in (_NONE, _INSIDE, _OVERLAPPED)}
    seconds = in_turn(
        variants, lambda variant, turn: variant.turn(_batches(arguments, turn)), arguments.repeat
    )
    if variants[_INSIDE].losses != variants[_OVERLAPPED].losses:
        raise RuntimeError("overlapped updates and updates inside the step gave different losses")
    first, later = _access_costs(variants[_OVERLAPPED], _batches(arguments, 0))
    if rank() == 0:
        _report(arguments, seconds, variants)
        print(
            f"  first access to a block whose update has ended: {first * 1e6:.1f} us, later ones: {later * 1e6:.1f} us"
        )
    synchronize()


def _batches(arguments: argparse.Namespace, turn: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(world_size() * turn + rank())
    shape = (arguments.batch, arguments.seq + 1)
    return [torch.randint(0, 256, shape, generator=generator) for _ in range(_STEPS + 1)]


class _Variant(NamedTuple):
    """A model, its optimizer and its manager."""

    step: Callable[[Tensor], Tensor]
    drain: Callable[[], Any]
    model: nn.Module
    losses: list[float]

    @classmethod
    def build(cls, arguments: argparse.Namespace, name: str) -> _Variant:
        torch.manual_seed(0)
        gpt = GPT(arguments.layers, arguments.dim, num_heads=8, vocab=256, seq=arguments.seq)
        model = sharded(gpt.bfloat16() if arguments.dtype == "bf16" else gpt)
        # By default a GPU with room for the state would keep it, and there would be nothing to measure.
        optimizer = AdamOffloadOptimizer(model.parameters(), lr=1e-4, overlap=name == _OVERLAPPED, fraction=0)
        manager = OptimManager()
        manager.add_optimizer(optimizer)

        def step(batch: Tensor) -> Tensor:
            manager.zero_grad()
            loss = model(batch)
            manager.backward(loss)
            manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
            if name != _NONE:
                manager.step()
            detached: Tensor = loss.detach()
            return detached

        return cls(step, lambda: optimizer.state, model, [])

    def turn(self, batches: list[Tensor]) -> float:
        """Seconds of a step, between a step that comes before and updates that come after."""
        losses = [self.step(batches[0])]
        seconds = timed(lambda: losses.extend(map(self.step, batches[1:]))) / (len(batches) - 1)
        self.drain()
        self.losses.extend(loss.item() for loss in losses)
        return seconds


def _access_costs(variant: _Variant, batches: list[Tensor]) -> tuple[float, float]:
    """Median seconds of ``p.data``, of one parameter of each block: the first time after a step, and the second."""
    parameters = [next(m.parameters()) for m in variant.model.modules() if isinstance(m, Block)]
    costs: list[list[float]] = [[], []]
    for batch in batches:
        variant.step(batch)
        time.sleep(0.5)  # by then the workers are done
        for values in costs:
            start = time.perf_counter()
            for p in parameters:
                p.data  # noqa: B018 (the access is what is timed)
            values.append((time.perf_counter() - start) / len(parameters))
    return statistics.median(costs[0]), statistics.median(costs[1])


def _report(
    arguments: argparse.Namespace, seconds: dict[str, list[float]], variants: dict[str, _Variant]
) -> None:
    numel = sum(p.numel() for p in variants[_INSIDE].model.parameters())
    print(
        f"{numel / 1e6:.1f} million elements on rank 0, {arguments.dtype}, {world_size()} ranks of "
        f"{torch.get_num_threads()} threads, {os.cpu_count()} processors"
    )
    print(f"  {'':14} {'ms/step':>9} {'exposed':>9} {'fastest':>9} {'exposed':>9}")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    fastest = {name: min(values) for name, values in seconds.items()}
    for name in seconds:
        columns = [times[name] - base for times in (medians, fastest) for base in (0, times[_NONE])]
        print(f"  {name:14} " + " ".join(f"{value * 1e3:9.1f}" for value in columns))
    print("  the losses of the last two are the same, bit for bit")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seconds": seconds, "numel": numel}, indent=2))
    if arguments.plot is not None:
        bars = [Bar(name, value * 1e3, name == _OVERLAPPED) for name, value in medians.items()]
        arguments.plot.write_text(picture([Chart("a training step", bars)], "ms"))
