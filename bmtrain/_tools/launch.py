"""``bmtrain launch``: start a training script on several ranks of this host.

It uses torch's own launcher, like torchrun, which also starts jobs on several hosts. A failure ends in one line that
names the rank that ended first, after the output of the ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from .launch_surviving import run_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.epilog = "example:\n  bmtrain launch --nproc 2 train.py --lr 0.1"
    parser.add_argument("--nproc", type=int, help="number of ranks (default: one per GPU, or 2 without)")
    parser.add_argument(
        "--survive",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: let the other ranks continue when one is lost, for scripts with init_distributed(survive=1)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        help="with --survive: number of lost ranks whose places new processes take, in scripts with survive.steps",
    )
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def run(options: argparse.Namespace) -> int:
    """Starts the ranks and waits for them.

    Returns:
        0; the exit status of the rank that ended first, or 128 and its signal; 2 if there is no such script, or an
        option makes no sense; 130 if the user ended it.
    """
    if not options.script.is_file():
        print(f"bmtrain launch: expected a Python script, found no file {options.script}", file=sys.stderr)
        return 2
    if options.restarts and not options.survive:
        print("bmtrain launch: --restarts: expected --survive 1 as well", file=sys.stderr)
        return 2
    num_ranks = options.nproc or _num_gpus() or 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // num_ranks, 1)))
    if options.survive:
        return run_ranks(num_ranks, [str(options.script), *options.arguments], options.restarts)
    return _start(num_ranks, [str(options.script), *options.arguments])


def _num_gpus() -> int:
    import torch  # takes seconds

    return torch.cuda.device_count()


def _start(num_ranks: int, program: list[str]) -> int:
    """Starts a script with its arguments; waits for the ranks and returns what `run` does."""
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for logger in logging.root.manager.loggerDict:  # which write pages about what one line says
        if logger.startswith("torch.distributed.elastic"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)
    try:
        # torchrun makes a directory for logs, which it never removes, unless it is given one.
        options = ["--standalone", f"--nproc-per-node={num_ranks}", f"--log-dir={os.devnull}"]
        launcher.run(launcher.parse_args([*options, "--", *program]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        ending = f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
        print(f"bmtrain launch: rank {rank} of {num_ranks} ended first, {ending}", file=sys.stderr)
        return status if status > 0 else 128 - status
    except (SignalException, KeyboardInterrupt) as error:
        name = error.sigval.name if isinstance(error, SignalException) else "SIGINT"
        print(f"bmtrain launch: stopped by {name}", file=sys.stderr)
        return 130
    return 0
