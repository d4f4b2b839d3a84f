"""Running a benchmark's command line again as the ranks of jobs, and getting rank 0's answer back."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from .._tools.started import run_forked
from .._tools.template import Template

_ANSWER = "BMTRAIN_BENCH_ANSWER"  # names the file of rank 0's answer
# glibc keeps what is freed for itself; this makes it give that back, so that a peak shows what was in use.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def launch(num_ranks: int, environment: Mapping[str, str] | None = None) -> Any:
    """Starts ``python -m bmtrain`` with this process's options on ``num_ranks`` ranks, as `launch_each` does."""
    [found] = launch_each([(num_ranks, [])], environment)
    return found


def launch_each(
    jobs: Iterable[tuple[int, Sequence[str]]], environment: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Runs one job after the other; torch is imported once for all of them.

    Args:
        jobs: number of ranks, all on this host, and options added after this process's own.
        environment: variables that the ranks get in addition to this process's, unless it sets them itself; one thread
            each by default.

    Returns:
        For each job the argument of rank 0's call of `answer`; None if it made none.

    Raises:
        SystemExit: a rank failed; with its status.
    """
    # Ranks of a benchmark train on the same samples, which is what this warning is about.
    deprecated = "ignore::FutureWarning:torch.distributed.c10d_logger"  # of torch's collectives in `comm`
    quiet = {"PYTHONWARNINGS": f"ignore:OptimManager:UserWarning,{deprecated}"}
    variables = {"OMP_NUM_THREADS": "1", **quiet, **(environment or {})}
    with closing(Template({**variables, **os.environ}, start_new_session=True)) as template:
        for num_ranks, extra in jobs:
            with tempfile.TemporaryFile("r") as file:  # in no directory: it is gone however this process ends
                path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
                command = ["-m", "bmtrain", *sys.argv[1:], *extra]
                if status := run_forked(num_ranks, command, {**variables, _ANSWER: path}, template):
                    raise SystemExit(status)
                yield json.loads(file.read() or "null")


def answer(value: Any) -> None:
    """Hands ``value`` to the process that called `launch_each`; called by rank 0."""
    Path(os.environ[_ANSWER]).write_text(json.dumps(value))
