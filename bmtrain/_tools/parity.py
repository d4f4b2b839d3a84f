"""``bmtrain parity``: run a training script in several layouts, and compare them with one process.

Losses, gradients, norms and weights of the first steps are compared; the report names the first tensor that differs.
The script must make the same batches in all layouts:
`bmtrain.data.loader(dataset, total // bmtrain.config["dp_size"])`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from .started import run_forked
from .template import Template

#: Arguments of init_distributed that a layout may have.
_NAMES = ("sp_size", "ep_size", "tp_size", "pipe_size", "num_micro_batches")


@dataclass(frozen=True)
class Layout:
    """A number of ranks, and the arguments of `init_distributed` that divide them.

    >>> Layout.parse("4:sp_size=2")
    Layout(text='4:sp_size=2', ranks=4, options={'sp_size': 2})
    """

    text: str
    ranks: int
    options: dict[str, int]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Raises argparse.ArgumentTypeError for a text that describes no layout."""
        number, _, rest = text.partition(":")
        pairs = [pair.partition("=")[::2] for pair in rest.split(",")] if rest else []
        if not all(
            part.isdecimal() and int(part) > 0 for part in (number, *(size for _, size in pairs))
        ) or any(name not in _NAMES for name, _ in pairs):
            raise argparse.ArgumentTypeError(
                f"expected RANKS or RANKS:NAME=SIZE,... with names of {', '.join(_NAMES)}, got {text!r}"
            )
        return cls(text, int(number), {name: int(size) for name, size in pairs})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.epilog = "example:\n  bmtrain parity --steps 3 --layouts 2 2:sp_size=2 -- train.py --lr 0.1"
    parser.add_argument(
        "--layouts",
        type=Layout.parse,
        nargs="+",
        default=[Layout("2", 2, {})],
        metavar="LAYOUT",
        help=f"RANKS or RANKS:NAME=SIZE,... to compare; names are {', '.join(_NAMES)} (default: 2)",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps that are compared")
    parser.add_argument(
        "--allowed",
        type=float,
        default=1e-5,
        metavar="X",
        help="difference that is allowed, relative to a tensor's largest value (default: 1e-5)",
    )
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def run(options: argparse.Namespace) -> int:
    """Runs and compares the layouts.

    Returns:
        0 if all are as one process, 1 if a tensor differs or a run failed, 2 if there is no such script.
    """
    if not options.script.is_file():
        print(f"bmtrain parity: expected a Python script, found no file {options.script}", file=sys.stderr)
        return 2
    failed = False
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    template = Template(environment, start_new_session=True, stdout=DEVNULL)
    with tempfile.TemporaryDirectory() as folder, closing(template):
        wanted = _record(Layout("1", 1, {}), options, Path(folder) / "one", template)
        if not wanted:
            if wanted is not None:
                print(
                    "bmtrain parity: expected a script with steps of an OptimManager, found none",
                    file=sys.stderr,
                )
            return 1
        for number, layout in enumerate(options.layouts):
            found = _record(layout, options, Path(folder) / str(number), template)
            wrong = "the run failed" if found is None else compare(wanted, found, options.allowed)
            failed = failed or bool(wrong)
            print(f"layout {layout.text}: {wrong or f'{len(wanted)} tensors as in one process'}", flush=True)
    return int(failed)


def _record(
    layout: Layout, options: argparse.Namespace, path: Path, template: Template
) -> list[tuple[str, Any]] | None:
    """Runs the script in one layout; returns its tensors in the order of their making, or None if it failed."""
    import torch

    settings = {"steps": options.steps, "path": str(path), "options": layout.options}
    command = ["-m", "bmtrain._tools.parity_rank", repr(settings), str(options.script), *options.arguments]
    status = run_forked(layout.ranks, command, {"OMP_NUM_THREADS": "1"}, template)
    if status or not path.exists():
        print(f"bmtrain parity: the script failed in layout {layout.text}", file=sys.stderr)
        return None
    recorded: list[tuple[str, Any]] = torch.load(path)
    return recorded


def compare(wanted: list[tuple[str, Any]], found: list[tuple[str, Any]], allowed: float) -> str:
    """Describes the first tensor that differs by more than ``allowed`` of its largest value; empty if none does.

    A gradient that is zero except for rounding (of a bias that attention cancels) is measured by the largest gradient
    of its step.
    """
    if [name for name, _ in wanted] != [name for name, _ in found]:
        names = next((pair for pair in zip(wanted, found, strict=False) if pair[0][0] != pair[1][0]), None)
        expected, got = (len(wanted), len(found)) if names is None else (names[0][0], names[1][0])
        return f"other tensors: expected {expected}, got {got}"
    largest: dict[str, float] = {}
    for name, value in wanted:
        kind = name.partition(" of ")[0]
        largest[kind] = max(largest.get(kind, 0.0), value.abs().max().item() if value.numel() else 0.0)
    for (name, value), (_, other) in zip(wanted, found, strict=True):
        if value.shape != other.shape:
            return f"{name}: expected shape {tuple(value.shape)}, got {tuple(other.shape)}"
        scale = value.abs().max().item() if value.numel() else 0.0
        scale = (
            scale if scale > 1e-4 * largest[name.partition(" of ")[0]] else largest[name.partition(" of ")[0]]
        )
        difference = (value.double() - other.double()).abs().max().item() if value.numel() else 0.0
        if not difference <= allowed * scale:
            return f"{name} differs by {difference / scale if scale else difference:.2g} of its largest value"
    return ""
