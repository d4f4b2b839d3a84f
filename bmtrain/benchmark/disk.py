"""Share of a drive's bandwidth that a step with state on it reaches.

A step reads and writes all the state of a Block. The raw program moves the same pieces of the same file, reads and
writes at once, by threads that do nothing else; both take turns with a step whose state is in memory.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .._engine.policy import BlockPolicy
from ..block_layer import Block
from ..errors import DiskError
from ..init import init_distributed
from ..nn import Linear
from ..optim import AdamOptimizer
from ..optim.places import disk_arena
from ._table import print_table

__all__ = ["add_arguments", "run"]

_PIECE = 2 << 20
_WIDTH = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench disk``."""
    parser.add_argument(
        "--directory", default=".", metavar="DIR", help="on the drive (default: the current one)"
    )
    parser.add_argument("--mib", type=int, default=768, help="state that is read and written")
    parser.add_argument("--threads", type=int, default=8, help="of the raw program")
    parser.add_argument("--repeat", type=int, default=5, help="measurements")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")


def run(arguments: argparse.Namespace) -> None:
    """Measures, and prints the table."""
    init_distributed(seed=0, tier_directories=[arguments.directory])
    rows = max((arguments.mib << 20) // (12 * _WIDTH), 1)
    try:
        on_disk = _optimizer(rows, BlockPolicy(optimizer="disk"))
    except DiskError as error:
        raise SystemExit(f"bmtrain bench disk: {error}") from None
    in_memory = _optimizer(rows, BlockPolicy())
    (arena,) = {home.arena for home in on_disk._place._homes.values()}
    candidates: dict[str, Callable[[], Any]] = {
        "step, state on the drive": on_disk.step,
        "raw program": lambda: _move(arena, arguments.threads),
        "step, state in memory": in_memory.step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(arguments.repeat + 1):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            if number:  # the first makes the state
                seconds[name].append(time.perf_counter() - start)
    _report(arguments, seconds, arena.file.nbytes, on_disk._place._stream.queue)


def _optimizer(rows: int, policy: BlockPolicy) -> Any:
    block = Block(Linear(_WIDTH, rows, bias=False, dtype=torch.bfloat16), policy=policy)
    for p in block.parameters():
        p.grad = torch.ones_like(p)
    return AdamOptimizer(block.parameters())


def _move(arena: disk_arena.Arena, num_threads: int) -> None:
    """Reads every piece of the file and writes it again, as it was."""
    file = os.open(f"/proc/self/fd/{arena.file.fileno()}", os.O_RDWR | os.O_DIRECT)

    def move(first: int) -> None:
        with mmap.mmap(-1, _PIECE) as memory, memoryview(memory) as view:
            for offset in range(first * _PIECE, arena.file.nbytes, num_threads * _PIECE):
                nbytes = min(_PIECE, arena.file.nbytes - offset)
                with view[:nbytes] as piece:
                    os.preadv(file, [piece], offset)
                    os.pwritev(file, [piece], offset)

    try:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(move, range(num_threads)))
    finally:
        os.close(file)


def _report(arguments: argparse.Namespace, seconds: dict[str, list[float]], nbytes: int, queue: Any) -> None:
    step, raw, memory = (statistics.median(values) for values in seconds.values())
    print(f"{nbytes >> 20} MiB read and written, {queue.back_end}, {torch.get_num_threads()} threads")
    rows = [
        [name, f"{statistics.median(values):.3f}", f"{2 * nbytes / statistics.median(values) / 1e9:.2f}"]
        for name, values in seconds.items()
    ]
    print_table(["", "s", "GB/s"], rows)
    share, bound = raw / step, step / max(raw, memory)
    print(f"the step reaches {share:.2f} of the raw program's speed,")
    print(f"and takes {bound:.2f} of the time of the slower of drive and computation")
    if arguments.json is not None:
        figures = {"bytes": nbytes, "back_end": queue.back_end, "share": share, "bound": bound}
        arguments.json.write_text(json.dumps({"seconds": seconds, **figures}, indent=2))
