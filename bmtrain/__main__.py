"""The tools that come with the library: ``python -m bmtrain COMMAND``."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from . import _flights, convert, cpu_run, doctor, soak
from ._terminal import CommandParser
from .plan import command as plan
from .timeline import command as timeline

__all__ = ["main"]

# Name of a command -> its module, with add_arguments and run, and what it is for.
_COMMANDS = {
    "doctor": (doctor, "check this installation"),
    "plan": (plan, "predict memory, time and traffic of a run"),
    "timeline": (timeline, "show what recorded steps spent their time on"),
    "blame": (_flights, "name the rank by which a job failed"),
    "convert": (convert, "convert files of weights"),
    "run": (cpu_run, "run a GPU training script on the CPU"),
    "soak": (soak, "train a toy for long and see what adds up"),
}
# Name of a benchmark -> what it measures. Each is a module of bmtrain.benchmark with add_arguments and run.
_BENCHMARKS = {
    "plan": "planner and timeline against runs on this machine",
    "adam": "one optimizer step against torch's and against moving the same bytes",
    "comm": "exchanges between CPU ranks against torch.distributed over Gloo",
    "gpu": "kernels and a training step on one GPU, against its copy bandwidth and torch",
    "offload": "what a training loop notices of the offloaded optimizer step",
    "scale": "a step against the number of blocks and of ranks, and the host's cost of a Block",
    "step": "one training step against DDP, FSDP2 and no communication",
    "virtual": "virtual shards against the same batch in one piece and in micro-batches",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tool.

    Args:
        arguments: the command line without the program; by default that of the process.

    Returns:
        The exit status.
    """
    parser = CommandParser(
        prog="python -m bmtrain",
        description="The tools that come with bmtrain.",
        epilog="python -m bmtrain COMMAND --help says more about each.",
    )
    tools = parser.add_subparsers(dest="tool", metavar="COMMAND", title="commands")
    for name, (module, purpose) in _COMMANDS.items():
        _add(tools, name, module, purpose)
    benchmarks = tools.add_parser("bench", help="measure, always against peers in the same run")
    names = benchmarks.add_subparsers(
        dest="benchmark", metavar="BENCHMARK", title="benchmarks", required=True
    )
    for name, purpose in _BENCHMARKS.items():
        _add(names, name, importlib.import_module(f"bmtrain.benchmark.{name}"), purpose)
    chosen = parser.parse_args(arguments)
    if chosen.tool is None:
        parser.print_help(sys.stderr)
        return 2
    return chosen.run(chosen) or 0


def _add(commands: Any, name: str, module: ModuleType, purpose: str) -> None:
    """A command that is described by its module's docstring, without the name that its usage shows already."""
    text = re.sub(r"^``python -m bmtrain [^`]*``: (\w)", lambda found: found[1].upper(), module.__doc__ or "")
    parser = commands.add_parser(name, help=purpose, description=text)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    raise SystemExit(status)
