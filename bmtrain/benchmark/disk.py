"""Share of a drive's bandwidth that a step and its update reach with blocks on the drive, and the cost of a checkpoint.

The raw program makes the transfers of a step again: the same bytes of the same files in the same order, as many at one
time, by threads that do nothing else. It and the same step in memory take turns with the step. An update continues in
the next forward, so a step is timed that follows another one.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .._engine.engine import current_engine
from .._engine.policy import BlockPolicy
from .._model.block_build import default_policy
from .._tools.table import print_table
from .._tools.terminal import output_file
from ..block_layer import Block, TransformerBlockList
from ..distributed import checkpoint
from ..errors import DiskError
from ..global_var import context
from ..init import init_distributed
from ..nn import Linear
from ..optim import AdamOptimizer, OptimManager
from ..param_init import init_parameters
from ._nvme import measure_deepspeed

__all__ = ["add_arguments", "run"]

_Move = tuple[Any, int, int, bool]  # file, offset, bytes, and whether they are written
_MOST = 16  # threads, as many as the pool of transfers has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench disk``."""
    parser.add_argument(
        "--directory", default=".", metavar="DIR", help="on the drive (default: the current one)"
    )
    parser.add_argument("--mib", type=int, default=768, help="parameters, gradients and state in files")
    parser.add_argument("--width", type=int, default=2048, help="of layers, one matrix each")
    parser.add_argument("--tokens", type=int, default=64, help="of a step, which its computation grows with")
    parser.add_argument(
        "--in-backward",
        action="store_true",
        help="update blocks inside backward (OptimManager(step_in_backward=True))",
    )
    parser.add_argument("--repeat", type=int, default=5, help="measurements")
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")


def run(arguments: argparse.Namespace) -> None:
    """Measures, and prints the tables."""
    init_distributed(seed=0, tier_directories=[arguments.directory])
    try:
        on_disk = _Training(arguments, BlockPolicy(parameters="disk", gradients="disk", optimizer="disk"))
    except DiskError as error:
        raise SystemExit(f"bmtrain bench disk: {error}") from None
    in_memory = _Training(arguments, BlockPolicy())
    results = {}
    for name in ("step",) if arguments.in_backward else ("step", "update"):  # which has no gradients there
        on_disk.step()
        in_memory.step()
        on_disk.finish()
        trace = _Trace(on_disk, getattr(on_disk, name))
        raw = _Raw(trace)
        candidates: dict[str, Callable[[], Any]] = {
            f"{name}, blocks on the drive": getattr(on_disk, name),
            "raw program": raw,
            f"{name} in memory": getattr(in_memory, name),
        }
        seconds: dict[str, list[float]] = {candidate: [] for candidate in candidates}
        for _ in range(arguments.repeat):
            for candidate, call in candidates.items():
                on_disk.finish()
                if call is raw:
                    raw.prepare()
                elif call == on_disk.step:
                    call()
                start = time.perf_counter()
                call()
                seconds[candidate].append(time.perf_counter() - start)
        results[name] = _report(name, trace, seconds)
    results["save"] = _save(on_disk, arguments)
    results["deepspeed"] = _peer(arguments, len(on_disk.layers), results["step"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))


class _Training:
    """Layers in fp32, their optimizer and a step."""

    def __init__(self, arguments: argparse.Namespace, policy: BlockPolicy) -> None:
        width = arguments.width
        count = max((arguments.mib << 20) // (16 * width * width), 2)
        with default_policy(policy):
            self.layers = TransformerBlockList(
                [Block(Linear(width, width, bias=False)) for _ in range(count)]
            )
        init_parameters(self.layers)
        self.optimizer: Any = AdamOptimizer(self.layers.parameters(), lr=1e-5)
        self._manager = OptimManager(step_in_backward=arguments.in_backward)
        self._manager.add_optimizer(self.optimizer)
        self._x = torch.randn(arguments.tokens, width)

    def step(self) -> None:
        self._manager.zero_grad(set_to_none=True)
        self._manager.backward(self.layers(self._x).square().mean())
        self._manager.step()

    def update(self) -> None:
        self.optimizer.step()
        self.finish()

    def finish(self) -> None:
        """Waits for the update."""
        self.optimizer._place.finish()


class _Trace:
    """The transfers of a call.

    Args:
        training: whose queues make them.
        call: is followed by its update.

    Attributes:
        moves: in their order.
        depth: the most transfers at one time.
    """

    def __init__(self, training: _Training, call: Callable[[], Any]) -> None:
        self.moves: list[_Move] = []
        self.depth = 0
        owners: list[Any] = [current_engine(context()).tier, training.optimizer._place._stream]
        queues = [owner.queue for owner in owners]
        self.back_end = queues[0].back_end
        for owner in owners:
            owner.queue = _Recorder(owner.queue, self)
        call()
        training.finish()
        for owner, queue in zip(owners, queues, strict=True):
            owner.queue = queue


class _Recorder:
    """A queue whose transfers are recorded."""

    def __init__(self, queue: Any, trace: _Trace) -> None:
        self._queue = queue
        self._trace = trace
        self._under_way: set[int] = set()

    def read(self, buffer: int, *place: Any) -> None:
        self._queue.read(buffer, *place)
        self._note(buffer, *place[:3], False)

    def write(self, buffer: int, *place: Any) -> None:
        self._queue.write(buffer, *place)
        self._note(buffer, *place[:3], True)

    def _note(self, buffer: int, *move: Any) -> None:
        self._under_way.add(buffer)
        self._trace.depth = max(self._trace.depth, len(self._under_way))
        self._trace.moves.append(move)

    def wait(self, buffer: int) -> None:
        self._queue.wait(buffer)
        self._under_way.discard(buffer)


class _Raw:
    """The raw program. It writes what the files have."""

    def __init__(self, trace: _Trace) -> None:
        self._moves = trace.moves
        self._files: dict[int, tuple[int, mmap.mmap]] = {}
        for file in {id(file): file for file, *_ in trace.moves}.values():
            opened = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)
            self._files[id(file)] = opened, mmap.mmap(-1, file.nbytes)
        largest = max(nbytes for _, _, nbytes, _ in trace.moves)
        self._buffers = [mmap.mmap(-1, largest) for _ in range(min(trace.depth, _MOST))]
        for buffer in self._buffers:
            buffer.write(bytes(largest))  # so that its pages are there

    def prepare(self) -> None:
        """Reads the files."""
        for file, contents in self._files.values():
            os.preadv(file, [contents], 0)

    def __call__(self) -> None:
        turns = iter(self._moves)  # of all threads
        with ThreadPoolExecutor(len(self._buffers)) as pool:
            list(pool.map(lambda buffer: self._move(turns, buffer), self._buffers))

    def _move(self, turns: Iterator[_Move], buffer: mmap.mmap) -> None:
        for owner, offset, nbytes, is_write in turns:
            file, contents = self._files[id(owner)]
            if is_write:
                os.pwritev(file, [memoryview(contents)[offset : offset + nbytes]], offset)
            else:
                os.preadv(file, [memoryview(buffer)[:nbytes]], offset)


def _save(training: _Training, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares a checkpoint beside the files with a copy of its own file; both end when they are on the drive."""
    seconds: dict[str, list[float]] = {"save": [], "copy": []}
    with TemporaryDirectory(dir=arguments.directory) as folder:
        for number in range(arguments.repeat):
            training.step()
            start = time.perf_counter()
            path = checkpoint.save(folder, number, training.layers, training.optimizer, keep=1).path
            seconds["save"].append(time.perf_counter() - start)
            start = time.perf_counter()
            with open(next(path.glob("shard-*")), "rb") as shard, open(f"{folder}/copy", "wb") as copy:
                shutil.copyfileobj(shard, copy, 8 << 20)
                os.fsync(copy)
            seconds["copy"].append(time.perf_counter() - start)
    share = statistics.median(seconds["save"]) / statistics.median(seconds["copy"])
    print(f"a checkpoint in the same directory takes {share:.3f} of the time of a copy of it")
    return {"seconds": seconds, "share": share}


def _peer(arguments: argparse.Namespace, count: int, ours: dict[str, Any]) -> dict[str, Any]:
    """Compares DeepSpeed's step of the same layers with the raw program of ours."""
    shape = count, arguments.width, arguments.tokens
    with TemporaryDirectory(dir=arguments.directory) as folder, redirect_stdout(sys.stderr):
        found = measure_deepspeed(folder, *shape, arguments.repeat)
    if "error" in found:
        print(f"DeepSpeed's NVMe offload was not measured: {found['error']}")
        return found
    moved, step = found["read"] + found["written"], statistics.median(found["seconds"])
    raw = (ours["read"] + ours["written"]) / statistics.median(ours["seconds"]["raw program"])
    share = moved / step / raw
    print(
        f"a step of DeepSpeed's NVMe offload takes {step:.3f} s, reads {found['read'] >> 20} MiB and writes "
        f"{found['written'] >> 20} MiB: {share:.2f} of the raw program's bytes per second"
    )
    return {**found, "share": share}


def _report(name: str, trace: _Trace, seconds: dict[str, list[float]]) -> dict[str, Any]:
    step, raw, memory = (statistics.median(values) for values in seconds.values())
    read = sum(nbytes for _, _, nbytes, is_write in trace.moves if not is_write)
    written = sum(nbytes for _, _, nbytes, _ in trace.moves) - read
    print(
        f"{read >> 20} MiB read and {written >> 20} MiB written, {trace.back_end}, {torch.get_num_threads()} threads, "
        f"up to {trace.depth} transfers at one time"
    )
    rows = [
        [
            candidate,
            *(f"{f(values):.3f}" for f in (statistics.median, min, max)),
            f"{(read + written) / statistics.median(values) / 1e9:.2f}",
        ]
        for candidate, values in seconds.items()
    ]
    print_table(["", "s", "least", "most", "GB/s"], rows)
    share, bound = raw / step, step / max(raw, memory)
    print(f"the {name} reaches {share:.2f} of the raw program's speed,")
    print(f"and takes {bound:.2f} of the time of the slower of drive and computation\n")
    figures = {"read": read, "written": written, "back_end": trace.back_end, "share": share, "bound": bound}
    return {"seconds": seconds, **figures}
