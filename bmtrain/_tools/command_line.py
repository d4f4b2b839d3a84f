"""Names and purposes of the commands, and their help without torch or a compiled core."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .terminal import CommandParser, columns, fold

#: Name of a command -> its module, with add_arguments and run, and what it is for.
COMMANDS = {
    "doctor": ("_tools.doctor", "check this installation"),
    "plan": ("plan.command", "predict memory, time and traffic of a run"),
    "launch": ("_tools.launch", "start a training script on several ranks of this host"),
    "parity": ("_tools.parity", "compare a training script in several layouts with one process"),
    "timeline": ("_tools.timeline", "show what recorded steps spent their time on"),
    "blame": ("_tools.blame", "find the rank that made a job fail"),
    "convert": ("convert", "convert files of weights"),
    "run": ("cpu_run", "run a GPU training script on the CPU"),
    "soak": ("benchmark.soak", "run a long stress test and check for leaks and drift"),
}
#: Name of a benchmark -> what it measures. Each is a module of bmtrain.benchmark with add_arguments and run.
BENCHMARKS = {
    "plan": "planner and timeline against runs on this machine",
    "adam": "one optimizer step against torch's and against moving the same bytes",
    "comm": "exchanges between CPU ranks against torch.distributed over Gloo",
    "disk": "a step with state on a drive against a raw program on the same file",
    "gpu": "kernels and a training step on one GPU, against its copy bandwidth and torch",
    "muon": "a Muon step over shards against torch.optim.Muon over whole matrices",
    "offload": "the part of the offloaded optimizer step that training does not hide",
    "scale": "a step against the number of blocks and of ranks, and the host's cost of a Block",
    "step": "one training step against DDP, FSDP2 and no communication",
    "virtual": "virtual shards against the same batch in one piece and in micro-batches",
}
_TORCH = "torch==2.13.0"


def make_parser(arguments: Sequence[str]) -> CommandParser:
    """The parser of this command line; only the module of the command that it names is imported."""
    parser = CommandParser(
        prog="bmtrain",
        description="The tools that come with bmtrain. (python -m bmtrain does the same as bmtrain.)",
        epilog="bmtrain COMMAND --help describes each of them.",
    )
    chosen = [argument for argument in arguments if not argument.startswith("-")][:2]
    tools = parser.add_subparsers(dest="tool", metavar="COMMAND", title="commands")
    for name, (module, purpose) in COMMANDS.items():
        _add(tools, name, module, purpose, chosen[:1] == [name])
    benchmarks = tools.add_parser("bench", help="benchmarks against PyTorch, FSDP2 and Gloo")
    names = benchmarks.add_subparsers(
        dest="benchmark", metavar="BENCHMARK", title="benchmarks", required=True
    )
    for name, purpose in BENCHMARKS.items():
        _add(names, name, f"benchmark.{name}", purpose, chosen == ["bench", name])
    return parser


def _add(commands: Any, name: str, module: str, purpose: str, is_chosen: bool) -> None:
    """A command that is described by its module's docstring, without the name that its usage shows already."""
    if not is_chosen:
        commands.add_parser(name, help=purpose)
        return
    loaded = importlib.import_module(f"bmtrain.{module}")
    text = re.sub(
        r"^``(?:python -m )?bmtrain [^`]*``: (\w)", lambda found: found[1].upper(), loaded.__doc__ or ""
    )
    parser = commands.add_parser(name, help=purpose, description=text)
    loaded.add_arguments(parser)
    parser.set_defaults(run=loaded.run)


def _own_arguments() -> list[str] | None:
    """The command line, where this process was started as `bmtrain` or `python -m bmtrain`; else None."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module to run, which imports the package
        original = sys.orig_argv
        is_command = "-m" in original and original[original.index("-m") + 1 :][:1] == ["bmtrain"]
    else:
        is_command = bool(sys.argv) and Path(sys.argv[0]) == Path(sys.executable).parent / "bmtrain"
    return sys.argv[1:] if is_command else None


def answer_early() -> None:
    """Ends a process that only requests help or names no command before torch is imported, which takes a second."""
    arguments = _own_arguments()
    if arguments is None:
        return
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    if named in COMMANDS or (named == "bench" and len(arguments) > 1 and arguments[1] in BENCHMARKS):
        return
    parser = make_parser(arguments)
    parser.parse_args(arguments)  # shows help, or reports the error
    parser.print_help(sys.stderr)
    raise SystemExit(2)


def report_broken(error: ImportError) -> None:
    """Ends a command that cannot load torch or the core, in a few lines; `doctor` also lists installed packages."""
    arguments = _own_arguments()
    if arguments is None:
        return
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    if command != "doctor":
        print(f"bmtrain {command}: {error} (bmtrain doctor looks closer)", file=sys.stderr)
        raise SystemExit(1)
    problems = 0
    for name, found, remedy in _look(error):
        problems += bool(remedy)
        print(fold(f"{'PROBLEM' if remedy else 'ok':<8}{name:<15}{found}", 23, columns()))
        if remedy:
            print(fold(f"{'':<8}{'remedy:':<15}{remedy}", 23, columns()))
    print(
        f"{problems} problem{'' if problems == 1 else 's'}; everything else is checked once these are solved"
    )
    raise SystemExit(1)


def _look(error: ImportError) -> list[tuple[str, str, str]]:
    """Checks of an installation without imports: name, finding, remedy (empty: no problem)."""
    rows = [("Python", f"{platform.python_version()} at {sys.executable}", "")]
    try:
        rows.append(("torch", importlib.metadata.version("torch"), ""))
    except importlib.metadata.PackageNotFoundError:
        rows.append(("torch", "not installed", f"{sys.executable} -m pip install {_TORCH}"))
    compiler = os.environ.get("CXX", "c++").split()[0]
    missing = "" if shutil.which(compiler) else "install one (Debian, Ubuntu: apt-get install g++)"
    rows.append(("compiler", shutil.which(compiler) or f"there is no {compiler}", missing))
    package = str(Path(__file__).parents[1])
    cores = sorted(os.path.relpath(path, package) for path in Path(package).rglob("_C.*.so"))
    if (error.name or "").partition(".")[0] == "torch":
        rows.append(
            ("core", ", ".join(cores) or "not built", "" if cores else "pip install . in the source tree")
        )
        return rows
    sentence = re.search(r"\. (?=Rebuild|Install)|: ", str(error))
    end = sentence.span() if sentence else (None, None)
    what, remedy = str(error)[: end[0]], str(error)[end[1] :] if sentence else ""
    there = f" (there is {', '.join(cores)})" if cores else ""
    return [*rows, ("core", what + there, remedy or "pip install . in the source tree")]
