"""Ranks that a command waits for, and that end with it: forked from one process, which imports torch for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .launch_surviving import end_all, note_ends, rank_environments
from .template import Process, Template

_POLL_SECONDS = 0.05
_stopping = threading.Event()


def run_forked(
    num_ranks: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    shared: Template | None = None,
    **options: Any,
) -> int:
    """Runs ranks to their end; the first that fails ends the others.

    Args:
        num_ranks: ranks, all on this host.
        command: a script, or ``-m`` and a module, with its arguments.
        environment: variables of the ranks that this process does not set.
        shared: template of several jobs, which the caller closes; default: a new one with this environment.
        options: of `subprocess.Popen`, for a new template.

    Returns:
        0; the exit status of the rank that failed first, or 128 and its signal; 130 if `end_started` ended them.
    """
    # As of torchrun: OMP_NUM_THREADS=1 is a default and not a choice (`init`), and Ctrl-C is for this process alone.
    common = {"TORCHELASTIC_RUN_ID": "none", **environment}
    places = [{**common, **one} for one in rank_environments(num_ranks)]
    template = shared or Template(places[0], start_new_session=True, **options)
    ranks: list[Process] = []
    ended: dict[int, int] = {}
    try:
        ranks.extend(template.start(command, place) for place in places)
        while len(ended) < num_ranks and not any(ended.values()) and not _stopping.is_set():
            note_ends(ranks, ended, num_ranks)
            time.sleep(_POLL_SECONDS)
    finally:
        if shared is None:
            template.close()
        end_all(ranks)
    status = 130 if _stopping.is_set() else next(filter(None, ended.values()), 0)
    return status if status >= 0 else 128 - status


def end_started() -> None:
    """Ends the ranks that threads wait for in `run_forked`."""
    _stopping.set()
