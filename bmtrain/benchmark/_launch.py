"""Running a benchmark's command line again as the ranks of a job, and getting rank 0's answer back."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._tools.started import run_forked

_ANSWER = "BMTRAIN_BENCH_ANSWER"  # names the file of rank 0's answer


def launch(num_ranks: int, environment: Mapping[str, str] | None = None, extra: Sequence[str] = ()) -> Any:
    """Starts ``python -m bmtrain`` with this process's options on ``num_ranks`` ranks.

    Args:
        num_ranks: ranks, all on this host.
        environment: variables that the ranks get in addition to this process's, unless it sets them itself.
        extra: options added after this process's own.

    Returns:
        The argument of rank 0's call of `answer`; None if it made none.

    Raises:
        SystemExit: a rank failed; with its status.
    """
    with tempfile.TemporaryFile("r") as file:  # in no directory: it is gone however this process ends
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        command = ["-m", "bmtrain", *sys.argv[1:], *extra]
        # Ranks of a benchmark train on the same samples, which is what this warning is about.
        deprecated = "ignore::FutureWarning:torch.distributed.c10d_logger"  # of torch's collectives in `comm`
        quiet = {"PYTHONWARNINGS": f"ignore:OptimManager:UserWarning,{deprecated}"}
        if status := run_forked(num_ranks, command, {**quiet, **(environment or {}), _ANSWER: path}):
            raise SystemExit(status)
        return json.loads(file.read() or "null")


def answer(value: Any) -> None:
    """Hands ``value`` to the process that called `launch`; called by rank 0."""
    Path(os.environ[_ANSWER]).write_text(json.dumps(value))
