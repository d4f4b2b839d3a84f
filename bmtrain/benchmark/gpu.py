"""Speed of a GPU's kernels and training step, against the card's own copy bandwidth and against torch.

Everything runs in turn in one process on one card: Adam over 16-bit gradients, the norm of gradients, cross-entropy
over a large vocabulary, and the step of a GPT, with its optimizer on the card and on the host. Times are medians
between events of the device. A ratio "of copy" is the bandwidth of a pass, counting only bytes that it must move,
relative to torch's copy on this card, measured just before; "of bound" is the time of a step with its optimizer on the
host relative to the lower bound given by the card, its bus and the host's memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from .._base import build as _build
from .._tools.gpt import GPT
from .._tools.terminal import output_file
from ..init import init_distributed, is_initialized
from ..loss import FusedCrossEntropy
from ..optim._arrays import allocate
from ..optim.formulas import Adam
from ._offload_gpu import Shape, measure_offload, print_offload
from ._options import add_names, numbers
from ._policies_gpu import measure_policies, print_policies
from ._tiers_gpu import measure_tiers
from ._training import clear_card
from ._variants import VARIANTS

__all__ = ["add_arguments", "measure_adam", "measure_cross_entropy", "measure_norm", "measure_step", "run"]

_ADAM_BYTES = 28  # of an element: the gradient, fp32 weight and moments read and written, the 16-bit weight
_GIB = 1 << 30
_VOCAB = 50304  # of the GPT
_PARTS = ("adam", "norm", "cross-entropy", "step", "policies", "tiers", "offload")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench gpu``."""
    add_names(parser, "--parts", _PARTS)
    parser.add_argument("--exponent", type=int, default=28, help="Adam has 2^N elements, the norm 2^(N + 2)")
    parser.add_argument("--rows", type=int, default=8192, help="of the logits")
    parser.add_argument("--vocab", type=int, default=131072, help="columns of the logits")
    parser.add_argument("--layers", type=int, default=24, help="of the GPT")
    parser.add_argument("--dim", type=int, default=2048, help="width")
    parser.add_argument("--heads", type=int, default=16, help="attention heads")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--tokens", type=numbers, default="4096,16384,65536", help="of a step with offload")
    parser.add_argument("--repeat", type=int, default=20, help="measurements")
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints a table, and writes JSON if asked to."""
    _require_card()
    copy = measure_copy(arguments.repeat)
    results: dict[str, Any] = {"card": _card(), "copy GB/s": copy / 1e9}
    _print("card", results["card"])
    _print("copy", {"GB/s": copy / 1e9})
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "adam": lambda: measure_adam(1 << arguments.exponent, copy, arguments.repeat),
        "norm": lambda: measure_norm(1 << (arguments.exponent + 2), copy, arguments.repeat),
        "cross-entropy": lambda: measure_cross_entropy(
            arguments.rows, arguments.vocab, copy, arguments.repeat
        ),
        "step": lambda: measure_step(arguments),
        "policies": lambda: _measure_training(measure_policies, arguments),
        "tiers": lambda: _measure_training(measure_tiers, arguments),
        "offload": lambda: _measure_offload(arguments),
    }
    tables = {"policies": print_policies, "offload": print_offload}
    for part in arguments.parts:
        results[part] = _measured(measures[part])
        if arguments.json is not None:  # after each part: an interrupted run keeps its results
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        if part in tables and "error" not in results[part]:
            print(f"\n{part}")
            tables[part](results[part])
        else:
            _print(part, results[part])
    if any("error" in results[part] for part in arguments.parts):
        raise SystemExit(1)


def _require_card() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench gpu: expected a usable CUDA device, got none")


def _measured(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a part, or its error: the other parts continue."""
    try:
        found = measure()
        gc.collect()  # models are in cycles, and the next part needs the memory
        torch.cuda.empty_cache()
        return found
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def _card() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory GiB": round(properties.total_memory / _GIB, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels": _build.build_info()["cuda_arch_list"],
    }


def seconds_of(work: Callable[[], Any], repeat: int, prepare: Callable[[], Any] | None = None) -> float:
    """The median time on the device of ``work``, with ``prepare`` before each run, not counted."""
    times: list[float] = []
    for number in range(repeat + 3):
        if prepare is not None:
            prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _occupy()
        begin.record()
        work()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _occupy() -> None:
    """Keeps the device busy for about a millisecond, while the host launches what is timed."""
    if torch.cuda.is_available():
        torch.cuda._sleep(2_000_000)


def measure_copy(repeat: int) -> float:
    """Bytes read and written in a second by torch's copy between two buffers of 2 GiB."""
    source, target = (torch.empty(2 * _GIB, dtype=torch.uint8, device="cuda").zero_() for _ in range(2))
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), repeat)


def measure_adam(size: int, copy: float, repeat: int) -> dict[str, Any]:
    """Our Adam over bf16 gradients, and torch's fused AdamW with the casts that it needs around it."""
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    shape = [torch.Size([size])]
    (weight,), (exp_avg,), (exp_avg_sq,) = allocate(shape, [torch.float32] * 3, torch.device("cuda"))
    weight.normal_()
    grad = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    rounded = weight.bfloat16()
    lists = [weight], [rounded], [grad], [exp_avg], [exp_avg_sq], [10]
    group = Adam().numbers_of({**options, "maximize": False}, is_low=True, scale=1024.0)
    ours = seconds_of(lambda: _ops.step_of_groups("adam", lists, [1], [group]), repeat)
    bits = _has_torchs_bits(options)
    master = torch.nn.Parameter(weight)
    master.grad = torch.empty_like(weight)
    peer = torch.optim.AdamW([master], fused=True, **options)

    def by_torch() -> None:
        assert master.grad is not None
        master.grad.copy_(grad).mul_(1 / 1024)
        peer.step()
        rounded.copy_(master.detach())

    theirs = seconds_of(by_torch, repeat)
    return {
        "elements": size,
        "ms": ours * 1e3,
        "GB/s": size * _ADAM_BYTES / ours / 1e9,
        "of copy": size * _ADAM_BYTES / ours / copy,
        "torch fused AdamW and casts, ms": theirs * 1e3,
        "times as fast as torch": theirs / ours,
        "fp32 has the bits of torch's Adam": bits,
    }


def _has_torchs_bits(options: dict[str, Any]) -> bool:
    """Whether our kernel over fp32 parameters is bit-identical to ``torch.optim.Adam`` with its defaults."""
    torch.manual_seed(0)
    start = torch.randn(100_003, device="cuda")
    exp_avgs, exp_avg_sqs = allocate([start.shape], [torch.float32] * 2, start.device)
    theirs = torch.nn.Parameter(start.clone())
    peer = torch.optim.Adam([theirs], **options)
    group = Adam().numbers_of({**options, "maximize": False}, is_low=False, scale=1.0)
    for step in range(1, 6):
        theirs.grad = torch.randn_like(start)
        lists: Any = [start], [], [theirs.grad], exp_avgs, exp_avg_sqs, [step]
        _ops.step_of_groups("adam", lists, [1], [group], as_torch=True)
        peer.step()
    return torch.equal(start, theirs.detach())


def measure_norm(size: int, copy: float, repeat: int) -> dict[str, Any]:
    """The pass that gives norm and overflow of bf16 gradients, and torch's norm of the same."""
    grad = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    ours = seconds_of(lambda: _ops.squared_sum([grad]), repeat)
    theirs = seconds_of(lambda: torch._foreach_norm([grad], 2, dtype=torch.float32), repeat)
    return {
        "elements": size,
        "ms": ours * 1e3,
        "of copy": 2 * size / ours / copy,
        "torch _foreach_norm, ms": theirs * 1e3,
        "times as fast as torch": theirs / ours,
    }


def measure_cross_entropy(rows: int, vocab: int, copy: float, repeat: int) -> dict[str, Any]:
    """Forward and backward over bf16 logits: in place, not in place, and torch's; with the memory each adds."""
    values = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(vocab, (rows,), device="cuda")
    size = values.numel() * values.element_size()
    candidates: dict[str, Callable[..., Tensor]] = {
        "in place": FusedCrossEntropy(inplace=True),
        "default": FusedCrossEntropy(),
        "torch": F.cross_entropy,
    }
    results: dict[str, Any] = {"rows": rows, "vocab": vocab}
    for name, loss_of in candidates.items():
        logits = values.detach().requires_grad_()

        def clear(logits: Tensor = logits) -> None:
            logits.grad = None

        def train(logits: Tensor = logits, loss_of: Callable[..., Tensor] = loss_of) -> None:
            loss_of(logits, target).backward()

        train()
        clear()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train()
        results[f"{name}, memory in logits"] = (torch.cuda.max_memory_allocated() - before) / size
        taken = seconds_of(train, repeat, clear)
        results[f"{name}, ms"] = taken * 1e3
        results[f"{name}, of copy"] = 3 * size / taken / copy  # read twice, written once
        clear()
    return results


def measure_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """The step of a bf16 GPT with recomputation: alone in plain torch, by FSDP2, and by bmtrain."""
    import torch.distributed as dist

    if not is_initialized():
        init_distributed(seed=0)
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # FSDP2's

    def build() -> torch.nn.Module:
        with torch.device("cuda"):
            return GPT(arguments.layers, arguments.dim, arguments.heads, _VOCAB, arguments.seq)

    results: dict[str, Any] = {"parameters": sum(p.numel() for p in build().parameters())}
    batch = torch.randint(_VOCAB, (arguments.batch, arguments.seq + 1), device="cuda")
    repeat = max(3, arguments.repeat // 4)
    for kind in ("alone", "fsdp2", "bmtrain-3"):
        clear_card()
        step = VARIANTS[f"{kind}-recompute-bf16"](build)
        results[f"{kind}, ms"] = seconds_of(partial(step, batch), repeat) * 1e3
        results[f"{kind}, peak GiB"] = torch.cuda.max_memory_allocated() / _GIB
        del step
    results["bmtrain / alone"] = results["bmtrain-3, ms"] / results["alone, ms"]
    results["bmtrain / fsdp2"] = results["bmtrain-3, ms"] / results["fsdp2, ms"]
    return results


def _measure_training(
    measure: Callable[..., dict[str, Any]], arguments: argparse.Namespace
) -> dict[str, Any]:
    if not is_initialized():
        init_distributed(seed=0)
    repeat = max(3, arguments.repeat // 4)
    return measure(arguments, _VOCAB, partial(seconds_of, repeat=repeat))


def _measure_offload(arguments: argparse.Namespace) -> dict[str, Any]:
    if not is_initialized():
        init_distributed(seed=0)
    tokens = tuple(arguments.tokens)
    repeat = max(3, arguments.repeat // 6)
    return measure_offload(
        Shape(arguments.layers, arguments.dim, arguments.heads, arguments.seq, tokens, repeat, _VOCAB)
    )


def _print(title: str, values: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, value in values.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"  {name:40} {shown:>14}", flush=True)
