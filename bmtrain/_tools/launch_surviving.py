"""``bmtrain launch --survive``: ranks of which some may be lost while the others continue.

torch's launcher ends all ranks of a host when one of them fails, so the ranks are plain child processes here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .template import Process, Template

_POLL_SECONDS = 0.1
#: From SIGTERM to SIGKILL.
_ENDING_SECONDS = 30.0
#: Exit status of a process that found no rank of the job any more (`_survive/joining.py`).
_NOT_NEEDED = 75


def run_ranks(num_ranks: int, command: Sequence[str], num_restarts: int = 0) -> int:
    """Runs a script's ranks to their end, and up to ``num_restarts`` processes that take the places of lost ones.

    Returns:
        0 if a rank has ended well and all others did, or were lost by a signal; else the status of the first rank that
        failed, 128 and its signal; 130 if the user ended it.
    """
    with tempfile.TemporaryDirectory(prefix="bmtrain-launch-") as folder:
        return _run(num_ranks, command, num_restarts, os.path.join(folder, "members"))


def _run(num_ranks: int, command: Sequence[str], num_restarts: int, members: str) -> int:
    environments = [{**env, "BMTRAIN_MEMBERS": members} for env in rank_environments(num_ranks)]
    ranks: list[Process] = [
        subprocess.Popen([sys.executable, "-u", *command], env=env) for env in environments
    ]
    template = Template(environments[0]) if num_restarts else None
    ended: dict[int, int] = {}
    wanted: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: wanted.append(n))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while len(ended) < len(ranks) and not wanted:
            for rank in note_ends(ranks, ended, num_ranks):
                if template and num_restarts and ended[rank] < 0 and len(ended) < len(ranks):
                    num_restarts -= 1
                    ranks.append(template.start(command, {"BMTRAIN_JOIN": "1"}))
            if 0 in ended.values():
                _end_stopped(ranks, ended)
            time.sleep(_POLL_SECONDS)
    finally:
        if template is not None:
            template.close()
        end_all(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)
    if wanted:
        print(f"bmtrain launch: stopped by {signal.Signals(wanted[0]).name}", file=sys.stderr)
        return 130
    failures = [status for status in ended.values() if status not in (0, _NOT_NEEDED)]
    if not failures or (0 in ended.values() and all(status < 0 for status in failures)):
        return 0
    return failures[0] if failures[0] > 0 else 128 - failures[0]


def rank_environments(num_ranks: int) -> list[dict[str, str]]:
    """Returns the environment of each rank of a job on this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(num_ranks)
    ]


def note_ends(ranks: Sequence[Process], ended: dict[int, int], num_ranks: int) -> list[int]:
    """Notes and reports the processes that have ended, and returns them."""
    found = []
    for rank, process in enumerate(ranks):
        status = process.poll()
        if status is None or rank in ended:
            continue
        ended[rank] = status
        found.append(rank)
        if status and status != _NOT_NEEDED:
            how = (
                f"was ended by {signal.Signals(-status).name}"
                if status < 0
                else f"ended with status {status}"
            )
            who = f"rank {rank} of {num_ranks}" if rank < num_ranks else f"replacement {rank - num_ranks + 1}"
            print(f"bmtrain launch: {who} {how}", file=sys.stderr, flush=True)
    return found


def _end_stopped(ranks: Sequence[Process], ended: dict[int, int]) -> None:
    """Ends stopped processes that others have continued without."""
    for rank, process in enumerate(ranks):
        if rank not in ended and _is_stopped(process.pid):
            process.kill()


def _is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:
        return False


def end_all(ranks: Sequence[Process]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    end = time.monotonic() + _ENDING_SECONDS
    for process in ranks:
        try:
            process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
