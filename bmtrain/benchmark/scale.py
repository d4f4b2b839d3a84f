"""Cost of a step against the number of blocks and of ranks, and of one Block on the host.

A GPT whose layers are Blocks (level 3, recomputed) is trained with more and more layers on --ranks-of-blocks ranks, to
show whether the time of a step is linear in them, and with --layers layers on more and more ranks, to show the memory
of each rank between steps. The cost on the host is measured with Blocks around a nearly empty module.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from typing import Any

import torch

from .._tools.gpt import GPT
from .._tools.pictures import BLUE, ORANGE, new_figure, plain
from .._tools.terminal import output_file
from ..global_var import rank, world_size
from ..init import init_distributed
from ..optim import AdamOptimizer
from ..synchronize import synchronize
from ._host import host_cost
from ._launch import GIVE_BACK, answer, launch_each
from ._memory import resident_bytes
from ._options import numbers
from ._training import reset_traffic, sharded, traffic

__all__ = ["add_arguments", "run"]

_WARM_UP = 3  # steps in which the order of blocks is learnt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench scale``."""
    parser.add_argument("--blocks", type=numbers, default="4,8,16,32,64", help="numbers of layers")
    parser.add_argument("--ranks-of-blocks", type=int, default=2, help="ranks for them")
    parser.add_argument("--ranks", type=numbers, default="1,2,4,8", help="numbers of ranks")
    parser.add_argument("--layers", type=int, default=16, help="layers for them")
    parser.add_argument("--dim", type=int, default=256, help="width")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a rank's sequence")
    parser.add_argument(
        "--repeat", type=int, default=5, help="steps of each number, and an eighth of the host's turns"
    )
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")
    parser.add_argument("--plot", type=output_file, help="draw them into this file (needs matplotlib)")
    parser.add_argument("--part", choices=("blocks", "ranks", "host"), help=argparse.SUPPRESS)  # in a rank


def run(arguments: argparse.Namespace) -> None:
    """Starts the ranks, and prints and draws their results; in a rank, measures."""
    if "RANK" in os.environ:
        _in_a_rank(arguments)
        return
    jobs = [
        (arguments.ranks_of_blocks, ["--part", "blocks"]),
        *((number, ["--part", "ranks"]) for number in arguments.ranks),
        (1, ["--part", "host"]),
    ]
    blocks, *ranks, host = launch_each(jobs, GIVE_BACK)
    found = {"blocks": blocks, "ranks": [row for [row] in ranks], "host": host}
    _print(found, arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.plot is not None:
        _plot(found, arguments)


# ---- in a rank


def _in_a_rank(arguments: argparse.Namespace) -> None:
    init_distributed(seed=0)
    if arguments.part == "host":
        found: Any = host_cost(8 * arguments.repeat)
    else:
        numbers = arguments.blocks if arguments.part == "blocks" else [arguments.layers]
        _train(arguments, 1)  # code that is loaded when it is first used is no memory of the model
        found = [_train(arguments, number) for number in numbers]
    if rank() == 0:
        answer(found)
    synchronize()


def _train(arguments: argparse.Namespace, num_layers: int) -> dict[str, Any]:
    """Median seconds and processor seconds of a step, messages and bytes of it, and bytes kept between steps."""
    gc.collect()
    before = resident_bytes()
    gpt = GPT(num_layers, arguments.dim, 8, 256, arguments.seq)
    model = sharded(gpt)
    optimizer = AdamOptimizer(model.parameters())
    batch = torch.randint(0, 256, (1, arguments.seq + 1))
    seconds, used = [], []
    for _ in range(_WARM_UP + arguments.repeat):
        synchronize()
        reset_traffic()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        used.append(time.process_time() - cpu_begin)
    messages, sent = traffic()
    gc.collect()
    return {
        "blocks": num_layers,
        "ranks": world_size(),
        "parameters": sum(parameter.numel() for parameter in gpt.parameters()),
        "seconds": statistics.median(seconds[_WARM_UP:]),
        "cpu_seconds": statistics.median(used[_WARM_UP:]),
        "messages": messages,
        "wire_bytes": sent,
        "kept_bytes": resident_bytes() - before,
    }


# ---- tables and pictures


def _print(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"layers of {arguments.dim}, {arguments.seq} tokens per rank, fp32, level 3, recomputed")
    print(
        f"{'blocks':>7}{'ranks':>7}{'ms/step':>9}{'cpu ms':>8}{'messages':>10}{'MB sent':>9}{'MiB kept':>10}"
    )
    for row in [*found["blocks"], *found["ranks"]]:
        print(
            f"{row['blocks']:>7}{row['ranks']:>7}{row['seconds'] * 1e3:>9.1f}{row['cpu_seconds'] * 1e3:>8.1f}"
            f"{row['messages']:>10}{row['wire_bytes'] / 1e6:>9.1f}{row['kept_bytes'] / 2**20:>10.1f}"
        )
    ours, floor = found["host"]["block"], found["host"]["torch"]
    print(
        f"a Block adds {ours['evaluation'] * 1e6:.0f} us to a call in evaluation, {ours['forward'] * 1e6:.0f} us to a "
        f"forward and {ours['backward'] * 1e6:.0f} us to a backward"
    )
    print(
        f"the least torch takes for a node with a graph inside: {floor['forward'] * 1e6:.0f} us and "
        f"{floor['backward'] * 1e6:.0f} us"
    )


def _plot(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    figure = new_figure(10, 3.8)
    left, right = figure.subplots(1, 2)
    blocks = found["blocks"]
    left.plot([row["blocks"] for row in blocks], [row["seconds"] * 1e3 for row in blocks], "o-", color=BLUE)
    left.set(xlabel=f"blocks, on {arguments.ranks_of_blocks} ranks", ylabel="ms per step", ylim=0)
    left.set_xlim(0)
    left.xaxis.get_major_locator().set_params(integer=True)
    ranks = found["ranks"]
    numbers = [row["ranks"] for row in ranks]
    right.loglog(numbers, [row["kept_bytes"] / 2**20 for row in ranks], "o-", color=BLUE, label="measured")
    states = 16 * ranks[0]["parameters"] * ranks[0]["ranks"] / 2**20
    right.loglog(
        numbers, [states / n for n in numbers], "--", color=ORANGE, label="16 bytes per parameter / ranks"
    )
    right.set(xlabel=f"ranks, {arguments.layers} blocks", ylabel="MiB of a rank between steps")
    right.minorticks_off()
    right.set_xticks(numbers, [str(number) for number in numbers])
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
    right.legend(frameon=False)
    for axis in (left, right):
        plain(axis)
    figure.savefig(arguments.plot, dpi=110)
