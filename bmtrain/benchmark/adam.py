"""How fast an Adam step is, against torch's and against moving the same bytes.

A 16-bit step touches 28 bytes per element: the gradient (2), fp32 weight, first and second moment (4 each, read and
written), and the 16-bit parameter (2). The ceiling is what the same bytes cost when nothing is computed. All
candidates run in turn, so that a busy machine disturbs them alike; the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C, _ops
from ..optim import AdamOffloadOptimizer, AdamOptimizer
from ..optim._adam_state import allocate

__all__ = ["add_arguments", "measure", "run"]

_BYTES = 28
_SCALE = 1024.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of ``bench adam``."""
    parser.add_argument(
        "--sizes", default="20,25", help="elements in all, as powers of two (default: %(default)s)"
    )
    parser.add_argument(
        "--tensors", type=int, default=1, help="tensors they are divided into (default: %(default)s)"
    )
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=9, help="measurements of each candidate (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file as well")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write JSON if asked to."""
    results = []
    print(f"kernels: {_C.cpu_isa()}, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})")
    before = torch.get_num_threads()
    try:
        for exponent in map(int, arguments.sizes.split(",")):
            for threads in map(int, arguments.threads.split(",")):
                torch.set_num_threads(threads)
                seconds = measure(1 << exponent, arguments.tensors, arguments.repeat)
                _print_table(exponent, arguments.tensors, threads, seconds)
                results.append({"size": 1 << exponent, "threads": threads, "seconds": seconds})
    finally:
        torch.set_num_threads(before)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"tensors": arguments.tensors, "results": results}, indent=2))


def measure(size: int, num_tensors: int, repeat: int) -> dict[str, float]:
    """Return the median seconds of one step of each candidate.

    Args:
        size: number of elements in all.
        num_tensors: how many parameters they are divided into.
        repeat: how often each candidate runs, after one run that does not count.
    """
    candidates = _candidates(max(size // num_tensors, 1), num_tensors)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeat + 1):
        for name, step in candidates.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def _candidates(size: int, num: int) -> dict[str, Callable[[], Any]]:
    grads = [torch.randn(size).bfloat16() for _ in range(num)]
    candidates: dict[str, Callable[[], Any]] = {"ceiling: the same bytes moved": _mover(size * num)}
    for dtype, title in ((torch.bfloat16, "16-bit"), (torch.float32, "fp32")):
        for cls in (AdamOptimizer, AdamOffloadOptimizer):
            params = _parameters(size, num, dtype, grads)
            candidates[f"{title}: {cls.__name__}"] = _stepper(cls(params), scale=_SCALE)
    for fused in (True, False):
        kind = "fused" if fused else "foreach"
        params = _parameters(size, num, torch.float32, grads)
        adamw = torch.optim.AdamW(params, fused=fused, foreach=not fused)
        candidates[f"fp32: torch AdamW {kind}"] = adamw.step
        candidates[f"16-bit: casts, unscale and torch AdamW {kind}"] = _by_casts(params, grads, adamw)
    return candidates


def _parameters(size: int, num: int, dtype: torch.dtype, grads: list[Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(size).to(dtype)) for _ in range(num)]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.to(dtype, copy=True)
    return params


def _stepper(optimizer: Any, scale: float) -> Callable[[], Any]:
    return lambda: optimizer.step(scale=scale)


def _by_casts(params: list[nn.Parameter], grads: list[Tensor], adamw: torch.optim.AdamW) -> Callable[[], Any]:
    """What a training loop in 16 bits does around an optimizer that knows fp32 only."""
    rounded = [p.detach().bfloat16() for p in params]
    wide = [p.grad for p in params if p.grad is not None]

    def step() -> None:
        torch._foreach_copy_(wide, grads)
        torch._foreach_mul_(wide, 1 / _SCALE)
        adamw.step()
        torch._foreach_copy_(rounded, [p.detach() for p in params])

    return step


def _mover(size: int) -> Callable[[], Any]:
    """Three fp32 arrays changed in place and one 16-bit array turned into another: the bytes of a step."""
    arrays = [views[0] for views in allocate([torch.Size([size])], 3, torch.device("cpu"))]
    for array in arrays:
        array.fill_(1.0)
    source, target = torch.ones(size).bfloat16(), torch.ones(size).half()

    def move() -> None:
        for array in arrays:
            _ops.ordered_sum_(array, [array], factor=-1.0)
        _ops.cast_(target, source)

    return move


def _print_table(exponent: int, num_tensors: int, threads: int, seconds: dict[str, float]) -> None:
    size = 1 << exponent
    ceiling = next(iter(seconds.values()))
    print(f"\n2^{exponent} elements in {num_tensors} tensors, {threads} threads")
    print(f"  {'':44} {'ms':>9} {'GB/s':>7} {'of ceiling':>10}")
    for name, value in seconds.items():
        print(f"  {name:44} {value * 1e3:9.3f} {size * _BYTES / value / 1e9:7.1f} {ceiling / value:10.2f}")
