"""How fast an Adam step is, against other libraries' and against moving the same bytes.

A step touches 28 bytes per element. In 16 bits: the gradient (2), fp32 weight, first and second moment (4 each, read
and written), and the 16-bit parameter (2); in fp32: gradient (4), weight and moments. Two ceilings run along: one pass
that has the loads and stores of a 16-bit step and computes nothing, and a copy of as many bytes. With bf16 moments a
step touches 20. All candidates take turns, so that a busy machine disturbs them alike; the table shows the median and
the fastest turn. A turn is one step that brings the candidate's memory into the caches as far as it fits, and then
steps over 2^24 elements in all, whose mean counts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _C, _ops
from ..optim import AdamOffloadOptimizer, AdamOptimizer
from ..optim._adam_state import allocate
from ._bars import Bar, Chart, picture

__all__ = ["Size", "add_arguments", "measure", "run"]

_BYTES = 28
_SCALE = 1024.0
_ELEMENTS_OF_A_TURN = 1 << 24
_CEILING = "ceiling: one pass that only moves"
_OURS = (
    "16-bit: AdamOptimizer",
    "16-bit: AdamOffload",
    "16-bit: AdamOffload, bf16 moments",
    "fp32: AdamOptimizer",
    "fp32: AdamOffload",
)


class Size(NamedTuple):
    """So many tensors of 2^exponent elements."""

    num_tensors: int
    exponent: int

    @classmethod
    def read(cls, text: str) -> Size:
        """From ``26`` or ``100x16``."""
        count, _, exponent = text.rpartition("x")
        return cls(int(count or 1), int(exponent))

    @property
    def numel(self) -> int:
        return self.num_tensors << self.exponent

    def __str__(self) -> str:
        return f"{self.num_tensors} x 2^{self.exponent}" if self.num_tensors > 1 else f"2^{self.exponent}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of ``bench adam``."""
    parser.add_argument(
        "--sizes",
        default="20,24,26,100x16",
        help="elements as powers of two, 100x16 for 100 tensors of 2^16 (default: %(default)s)",
    )
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=9, help="turns of each candidate (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--plot", type=Path, help="draw them into this SVG file")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write JSON and a picture if asked to."""
    results = []
    print(f"kernels: {_C.cpu_isa()}, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})")
    before = torch.get_num_threads()
    try:
        for size in map(Size.read, arguments.sizes.split(",")):
            for threads in map(int, arguments.threads.split(",")):
                torch.set_num_threads(threads)
                seconds = measure(size, arguments.repeat)
                _print_table(size, threads, seconds)
                results.append({"size": str(size), "threads": threads, "seconds": seconds})
    finally:
        torch.set_num_threads(before)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bytes": _BYTES, "results": results}, indent=2))
    if arguments.plot is not None:
        arguments.plot.write_text(picture([_chart(result) for result in results], "GB/s"))


def measure(size: Size, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each candidate, in each of its turns.

    Args:
        size: of what is updated.
        repeat: number of turns, after one that does not count.
    """
    candidates = _candidates(size)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    steps = max(_ELEMENTS_OF_A_TURN // size.numel, 1)
    for _ in range(repeat + 1):
        for name, step in candidates.items():
            step()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            times[name].append((time.perf_counter() - start) / steps)
    return {name: values[1:] for name, values in times.items()}


# ---- candidates


def _candidates(size: Size) -> dict[str, Callable[[], Any]]:
    grads = [torch.randn(1 << size.exponent).bfloat16() for _ in range(size.num_tensors)]
    candidates = {_CEILING: _mover(size.numel), "ceiling: copy": _copier(size.numel)}
    for dtype, title in ((torch.bfloat16, "16-bit"), (torch.float32, "fp32")):
        params = _parameters(size, dtype, grads)
        candidates[f"{title}: AdamOptimizer"] = _stepper(AdamOptimizer(params), scale=_SCALE)
        params = _parameters(size, dtype, grads)
        offload = AdamOffloadOptimizer(params, overlap=False)
        candidates[f"{title}: AdamOffload"] = _stepper(offload, scale=_SCALE)
    params = _parameters(size, torch.bfloat16, grads)
    halved = AdamOffloadOptimizer(params, overlap=False, state_dtype=torch.bfloat16)
    candidates["16-bit: AdamOffload, bf16 moments"] = _stepper(halved, scale=_SCALE)
    for fused in (True, False):
        kind = "fused" if fused else "foreach"
        params = _parameters(size, torch.float32, grads)
        adamw = torch.optim.AdamW(params, fused=fused, foreach=not fused)
        candidates[f"fp32: torch AdamW {kind}"] = adamw.step
        candidates[f"16-bit: casts, unscale, torch AdamW {kind}"] = _by_casts(params, grads, adamw)
    params = _parameters(size, torch.float32, grads)
    if (deepspeed := _deepspeed(params)) is not None:
        candidates["fp32: DeepSpeedCPUAdam"] = deepspeed.step
        candidates["16-bit: casts, unscale, DeepSpeedCPUAdam"] = _by_casts(params, grads, deepspeed)
    return candidates


def _parameters(size: Size, dtype: torch.dtype, grads: list[Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(1 << size.exponent).to(dtype)) for _ in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.to(dtype, copy=True)
    return params


def _stepper(optimizer: Any, scale: float) -> Callable[[], Any]:
    return lambda: optimizer.step(scale=scale)


def _deepspeed(params: list[nn.Parameter]) -> Any:
    """DeepSpeed's optimizer for the CPU, where that library is installed."""
    try:
        module = importlib.import_module("deepspeed.ops.adam")
    except ImportError:
        return None
    return module.DeepSpeedCPUAdam(params, adamw_mode=True)


def _by_casts(params: list[nn.Parameter], grads: list[Tensor], optimizer: Any) -> Callable[[], Any]:
    """What a training loop in 16 bits does around an optimizer that knows fp32 only."""
    rounded = [p.detach().bfloat16() for p in params]
    wide = [p.grad for p in params if p.grad is not None]

    def step() -> None:
        torch._foreach_copy_(wide, grads)
        torch._foreach_mul_(wide, 1 / _SCALE)
        optimizer.step()
        torch._foreach_copy_(rounded, [p.detach() for p in params])

    return step


def _mover(numel: int) -> Callable[[], Any]:
    """The loads and stores of a 16-bit step, in one pass."""
    weight, exp_avg, exp_avg_sq = allocate([torch.Size([numel])], [torch.float32] * 3, torch.device("cpu"))
    grads, rounded = [torch.ones(numel).bfloat16()], [torch.ones(numel).bfloat16()]
    ranges = _ops.AdamRanges(weight, rounded, grads, exp_avg, exp_avg_sq, [1])
    return lambda: _ops.adam_move_(ranges)


def _copier(numel: int) -> Callable[[], Any]:
    source = torch.ones(numel * _BYTES // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


# ---- reports


def _print_table(size: Size, threads: int, times: dict[str, list[float]]) -> None:
    seconds = {name: statistics.median(values) for name, values in times.items()}
    print(f"\n{size} elements, {threads} threads")
    print(f"  {'':44} {'ms':>9} {'fastest':>9} {'GB/s':>7} {'of ceiling':>10}")
    for name, median in seconds.items():
        fastest, speed = min(times[name]), size.numel * _BYTES / median / 1e9
        share = seconds[_CEILING] / median
        print(f"  {name:44} {median * 1e3:9.3f} {fastest * 1e3:9.3f} {speed:7.1f} {share:10.2f}")
    for title in ("16-bit", "fp32"):
        peers = [name for name in seconds if name.startswith(title) and name not in _OURS]
        best = min(peers, key=lambda name: seconds[name])
        ratio = seconds[best] / seconds[f"{title}: AdamOffload"]
        print(f"  {title}: AdamOffload is {ratio:.2f} x as fast as {best.removeprefix(title + ': ')}")


def _chart(result: dict[str, Any]) -> Chart:
    moved = Size.read(result["size"].replace(" ", "").replace("2^", "")).numel * _BYTES
    bars = [
        Bar(name, moved / statistics.median(seconds) / 1e9, name in _OURS)
        for name, seconds in result["seconds"].items()
    ]
    return Chart(f"{result['size']} elements, {result['threads']} threads", bars)
