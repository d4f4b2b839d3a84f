"""``python -m bmtrain ...``: the tools that come with the library."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from . import _blame, convert, cpu_run, doctor, soak
from ._terminal import CommandParser
from .plan import command as plan
from .timeline import command as timeline

__all__ = ["main"]

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
    parser = CommandParser(prog="python -m bmtrain", description=f"{__doc__} COMMAND --help tells more.")
    tools = parser.add_subparsers(dest="tool", metavar="COMMAND", required=True)
    checks = tools.add_parser("doctor", help="check this installation", description=doctor.__doc__)
    doctor.add_arguments(checks)
    checks.set_defaults(run=doctor.run)
    conversion = tools.add_parser("convert", help="convert files of weights", description=convert.__doc__)
    convert.add_arguments(conversion)
    conversion.set_defaults(run=convert.run)
    planner = tools.add_parser("plan", help="predict memory, time and traffic", description=plan.__doc__)
    plan.add_arguments(planner)
    planner.set_defaults(run=plan.run)
    recordings = tools.add_parser(
        "timeline", help="what recorded steps spent their time on", description=timeline.__doc__
    )
    timeline.add_arguments(recordings)
    recordings.set_defaults(run=timeline.run)
    records = tools.add_parser(
        "blame", help="name the rank that a job failed by", description=_blame.run.__doc__
    )
    _blame.add_arguments(records)
    records.set_defaults(run=_blame.run)
    endurance = tools.add_parser(
        "soak", help="train a toy for long and see what adds up", description=soak.__doc__
    )
    soak.add_arguments(endurance)
    endurance.set_defaults(run=soak.run)
    benchmarks = tools.add_parser("bench", help="measure, always against peers in the same run")
    names = benchmarks.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, purpose in _BENCHMARKS.items():
        module = importlib.import_module(f"bmtrain.benchmark.{name}")
        command = names.add_parser(name, help=purpose, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    script = tools.add_parser("run", help="run a GPU training script on the CPU", description=cpu_run.__doc__)
    cpu_run.add_arguments(script)
    script.set_defaults(run=cpu_run.run)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen) or 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    raise SystemExit(status)
