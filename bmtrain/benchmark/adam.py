"""Time of an Adam step, against other libraries and against moving the same bytes.

A step touches 28 bytes per element. In 16 bits: the gradient (2), fp32 weight, first and second moment (4 each, read
and written), and the 16-bit parameter (2); in fp32: gradient (4), weight and moments. Two ceilings run along: one
pass that has the loads and stores of a 16-bit step and computes nothing, over the memory of the 16-bit offloaded step
(its placement changes the time by a few percent), and a copy of as many bytes. With bf16 moments a step touches 20;
with 8-bit moments 16, with a ceiling of their own. All candidates take turns, so that a busy machine disturbs them
alike; the table shows the median and the fastest turn, and the median share of the ceiling that a candidate reaches
in the same turn. A turn is one step that brings its memory into the caches as far as it fits, and then steps over
2^24 elements in all, whose mean counts.

With ``--formula sgd`` (with momentum) or ``lion`` a step touches 20 bytes, and the ceiling is the copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .._C import cpu_isa
from .._tools.table import print_table
from .._tools.terminal import columns, fold, output_file
from ._bars import Bar, Chart, picture
from ._options import numbers
from ._steps import FORMULAS, Formula, Size
from ._training import in_turn

__all__ = ["Size", "add_arguments", "measure", "run"]

_ELEMENTS_OF_A_TURN = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``bench adam``."""
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default="20,24,26,100x16",
        help="elements as powers of two, 100x16 for 100 tensors of 2^16",
    )
    parser.add_argument("--threads", type=numbers, default="1,2", help="numbers of threads")
    parser.add_argument("--repeat", type=int, default=9, help="turns of each candidate")
    parser.add_argument("--formula", choices=FORMULAS, default="adam", help="what the step computes")
    parser.add_argument("--json", type=output_file, help="write the results to this file as well")
    parser.add_argument("--plot", type=output_file, help="draw them into this SVG file")


def _sizes(text: str) -> list[Size]:
    try:
        return [Size.read(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected sizes such as 20,100x16, got {text!r}") from None


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints a table, and writes JSON and a picture if asked to."""
    results = []
    formula = FORMULAS[arguments.formula]
    print(f"kernels: {cpu_isa()}, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})")
    before = torch.get_num_threads()
    try:
        for size in arguments.sizes:
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                seconds = measure(size, arguments.repeat, formula)
                _print_table(formula, size, threads, seconds)
                results.append({"size": str(size), "threads": threads, "seconds": seconds})
    finally:
        torch.set_num_threads(before)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bytes": formula.num_bytes, "results": results}, indent=2))
    if arguments.plot is not None:
        arguments.plot.write_text(picture([_chart(formula, result) for result in results], "GB/s"))


def measure(size: Size, repeat: int, formula: Formula = FORMULAS["adam"]) -> dict[str, list[float]]:
    """Returns the seconds of a step of each candidate, in each of its turns.

    Args:
        size: number of updated elements.
        repeat: number of turns, after one that does not count.
        formula: of the step.
    """
    steps = max(_ELEMENTS_OF_A_TURN // size.numel, 1)

    def turn(step: Callable[[], Any], _: int) -> float:
        step()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps

    return in_turn(formula.candidates(size), turn, repeat)


# ---- reports


def _print_table(formula: Formula, size: Size, threads: int, times: dict[str, list[float]]) -> None:
    seconds = {name: statistics.median(values) for name, values in times.items()}
    print(f"\n{size} elements, {threads} thread{'s' * (threads != 1)}")
    rows = []
    for name, median in seconds.items():
        fastest, speed = min(times[name]), size.numel * formula.num_bytes / median / 1e9
        share = _speed(times, name, formula.own_ceilings.get(name, formula.ceiling))
        rows.append([name, f"{median * 1e3:.3f}", f"{fastest * 1e3:.3f}", f"{speed:.1f}", f"{share:.2f}"])
    print_table(["", "ms", "fastest", "GB/s", "of ceiling"], rows)
    for title in ("16-bit", "fp32"):
        peers = [name for name in seconds if name.startswith(title) and name not in formula.ours]
        for best in sorted(peers, key=lambda name: seconds[name])[:1]:
            ours = f"{title}: {formula.name}Offload"
            print(
                fold(
                    f"{ours} is {_speed(times, ours, best):.2f} x as fast as {best.removeprefix(title + ': ')}",
                    4,
                    columns(),
                )
            )


def _speed(times: dict[str, list[float]], name: str, other: str) -> float:
    """The speed of a candidate relative to another: the median over turns, of which some are slow for all."""
    return statistics.median(theirs / own for own, theirs in zip(times[name], times[other], strict=True))


def _chart(formula: Formula, result: dict[str, Any]) -> Chart:
    moved = Size.read(result["size"].replace(" ", "").replace("2^", "")).numel * formula.num_bytes
    bars = [
        Bar(name, moved / statistics.median(seconds) / 1e9, name in formula.ours)
        for name, seconds in result["seconds"].items()
    ]
    return Chart(f"{result['size']} elements, {result['threads']} threads", bars)
