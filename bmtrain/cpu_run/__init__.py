"""Runs an unmodified GPU training script on CPU ranks.

Every use of ``cuda`` is redirected to the CPU, in this process alone: devices, ``.cuda()``, streams, events, memory
statistics, autocast, pinned memory, nccl process groups. At the end rank 0 lists the redirected calls. It works under
a launcher too:

  torchrun --nproc_per_node 2 -m bmtrain run --cpu script.py --lr 0.1
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from .redirect import Redirection

__all__ = ["Redirection", "add_arguments", "run"]

# What the script leaves behind lives until the interpreter ends, as it does under `python script.py`. Dropped at once,
# a process group joins its threads under the GIL; one that still has to drop a tensor waits for the GIL for ever.
_globals: dict[str, Any] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("--cpu", action="store_true", required=True, help="redirect cuda to the CPU")
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def run(options: argparse.Namespace) -> int:
    """Runs the script as ``__main__``, with its own arguments and folder.

    Returns:
        0, or 2 if there is no such script; an exception or a `SystemExit` of the script passes through, after the
        report.
    """
    if not options.script.is_file():
        print(f"bmtrain run: expected a Python script, found no file {options.script}", file=sys.stderr)
        return 2
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that is there stays untouched
    if os.environ.get("BMTRAIN_BACKEND") == "nccl":
        os.environ["BMTRAIN_BACKEND"] = "gloo"
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)
    redirection = Redirection()
    try:
        with redirection:
            _globals.update(runpy.run_path(str(options.script), run_name="__main__"))
    finally:
        sys.argv, sys.path[:] = argv, path
        if os.environ.get("RANK", "0") == "0":
            print(redirection.report(str(options.script)), file=sys.stderr, flush=True)
    return 0
