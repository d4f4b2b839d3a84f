"""How long a training step takes, sharded and not: single process work without communication, DDP, FSDP2, and bmtrain.

All variants live in the same ranks and run in turn, so that a busy machine disturbs them alike. The table shows medians
and their ratio to the step without communication: the same ranks, each training a whole model alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import init_distributed
from ..block_layer import Block
from ..global_var import rank, world_size
from ..optim import AdamOptimizer, OptimManager
from ..synchronize import synchronize
from ..wrapper import BMTrainModelWrapper, model_wrapper_dispatch
from ._gpt import GPT

__all__ = ["VARIANTS", "add_arguments", "run"]

_Step = Callable[[Tensor], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of ``bench step``."""
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--dim", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=7, help="steps of each variant (default: %(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="(default: %(default)s)")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="measure peak memory instead, each variant in processes of its own",
    )
    parser.add_argument("--json", type=Path, help="write the results to this file as well")


def run(arguments: argparse.Namespace) -> None:
    """Start the ranks; in a rank: measure, and on rank 0 print the table."""
    unknown = set(arguments.variants.split(",")) - set(VARIANTS)
    if unknown:
        raise SystemExit(
            f"--variants: expected some of {', '.join(VARIANTS)}, got {', '.join(sorted(unknown))}"
        )
    if "RANK" not in os.environ:
        names = arguments.variants.split(",") if arguments.memory else [arguments.variants]
        for name in names:
            _launch(arguments.ranks, name)
        return
    init_distributed(seed=0)
    dist.init_process_group("gloo")  # the peers'; bmtrain does not use it
    model_options = {"num_layers": arguments.layers, "dim": arguments.dim, "num_heads": 8, "vocab": 256}
    names = arguments.variants.split(",")
    steps = {name: VARIANTS[name](lambda: GPT(**model_options, seq=arguments.seq)) for name in names}
    batches = [
        torch.randint(0, 256, (arguments.batch, arguments.seq + 1)) for _ in range(arguments.repeat + 2)
    ]
    seconds, losses = _measure(steps, batches)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if rank() == 0:
        _report(arguments, seconds, losses, peak)
    synchronize()
    dist.destroy_process_group()


def _launch(num_ranks: int, variants: str) -> None:
    options = sys.argv[1:]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if "--memory" in options:  # glibc keeps freed memory; make it give back what is freed
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *launcher, "-m", "bmtrain", *options, "--variants", variants]
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        raise SystemExit(status)


def _measure(
    steps: dict[str, _Step], batches: list[Tensor]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for batch in batches:
        for name, step in steps.items():
            synchronize()
            start = time.perf_counter()
            losses[name].append(step(batch))
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[2:] for name, values in seconds.items()}, losses


def _report(
    arguments: argparse.Namespace,
    seconds: dict[str, list[float]],
    losses: dict[str, list[float]],
    peak: float,
) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = medians.get("alone", next(iter(medians.values())))
    tokens = arguments.batch * arguments.seq * world_size()
    print(f"\n{'variant':<26}{'ms/step':>9}{'tokens/s':>10}{'speed':>7}{'last loss':>11}")
    for name, median in medians.items():
        print(
            f"{name:<26}{median * 1e3:>9.0f}{tokens / median:>10.0f}{base / median:>7.2f}{losses[name][-1]:>11.6f}"
        )
    if arguments.memory:
        print(f"peak resident memory of rank 0: {peak:.0f} MiB")
    if arguments.json is not None:
        results = {"seconds": seconds, "losses": losses, "peak_mib": peak, "ranks": world_size()}
        arguments.json.write_text(json.dumps(results, indent=2))


# ---- variants


def _training(model: nn.Module, optimizer: torch.optim.Optimizer) -> _Step:
    def step(batch: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _alone(build: Callable[[], nn.Module]) -> _Step:
    model = _seeded(build)
    return _training(model, torch.optim.Adam(model.parameters(), fused=True))


def _alone_recompute(build: Callable[[], nn.Module]) -> _Step:
    model = _seeded(build)
    _checkpoint_layers(model)
    return _training(model, torch.optim.Adam(model.parameters(), fused=True))


def _ddp(build: Callable[[], nn.Module]) -> _Step:
    model = nn.parallel.DistributedDataParallel(_seeded(build))
    return _training(model, torch.optim.Adam(model.parameters(), fused=True))


def _fsdp2(recompute: bool, reshard: bool) -> Callable[[Callable[[], nn.Module]], _Step]:
    def variant(build: Callable[[], nn.Module]) -> _Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size(),))
        model: Any = _seeded(build)
        if recompute:
            _checkpoint_layers(model)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return _training(model, torch.optim.Adam(model.parameters(), fused=True))

    return variant


def _checkpoint_layers(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)


def _ours(recompute: bool, level: int) -> Callable[[Callable[[], nn.Module]], _Step]:
    def variant(build: Callable[[], nn.Module]) -> _Step:
        model: Any = _seeded(build)
        layers = [
            Block(model_wrapper_dispatch(layer), use_checkpoint=recompute, zero_level=level)
            for layer in model.layers
        ]
        model.layers = nn.ModuleList(layers)
        model = BMTrainModelWrapper(model)
        optimizer = AdamOptimizer(model.parameters())
        manager = OptimManager()
        manager.add_optimizer(optimizer)

        def step(batch: Tensor) -> float:
            manager.zero_grad()
            loss = model(batch)
            manager.backward(loss)
            manager.step()
            return float(loss.detach())

        return step

    return variant


VARIANTS: dict[str, Callable[[Callable[[], nn.Module]], _Step]] = {
    "alone": _alone,
    "ddp": _ddp,
    "fsdp2": _fsdp2(recompute=False, reshard=True),
    "fsdp2-no-reshard": _fsdp2(recompute=False, reshard=False),
    "bmtrain-3": _ours(recompute=False, level=3),
    "bmtrain-2": _ours(recompute=False, level=2),
    "alone-recompute": _alone_recompute,
    "fsdp2-recompute": _fsdp2(recompute=True, reshard=True),
    "bmtrain-3-recompute": _ours(recompute=True, level=3),
}
