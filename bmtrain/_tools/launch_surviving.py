"""``bmtrain launch --survive``: ranks of which some may be lost while the others continue.

torch's launcher ends all ranks of a host when one of them fails, so the ranks are plain child processes here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_POLL_SECONDS = 0.1
#: From SIGTERM to SIGKILL.
_ENDING_SECONDS = 30.0


def run_ranks(num_ranks: int, command: Sequence[str]) -> int:
    """Runs a script's ranks to their end.

    Returns:
        0 if a rank has ended well and all others did, or were lost by a signal; else the status of the first rank that
        failed, 128 and its signal; 130 if the user ended it.
    """
    ranks = [subprocess.Popen([sys.executable, "-u", *command], env=env) for env in _environments(num_ranks)]
    ended: dict[int, int] = {}
    wanted: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: wanted.append(n))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while len(ended) < num_ranks and not wanted:
            _note_ends(ranks, ended)
            if 0 in ended.values():
                _end_stopped(ranks, ended)
            time.sleep(_POLL_SECONDS)
    finally:
        _end(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)
    if wanted:
        print(f"bmtrain launch: stopped by {signal.Signals(wanted[0]).name}", file=sys.stderr)
        return 130
    failures = [status for status in ended.values() if status]
    if 0 in ended.values() and all(status < 0 for status in failures):
        return 0
    return failures[0] if failures[0] > 0 else 128 - failures[0]


def _environments(num_ranks: int) -> list[dict[str, str]]:
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


def _note_ends(ranks: Sequence[subprocess.Popen[bytes]], ended: dict[int, int]) -> None:
    for rank, process in enumerate(ranks):
        status = process.poll()
        if status is None or rank in ended:
            continue
        ended[rank] = status
        if status:
            how = (
                f"was ended by {signal.Signals(-status).name}"
                if status < 0
                else f"ended with status {status}"
            )
            print(f"bmtrain launch: rank {rank} of {len(ranks)} {how}", file=sys.stderr, flush=True)


def _end_stopped(ranks: Sequence[subprocess.Popen[bytes]], ended: dict[int, int]) -> None:
    """Ends stopped processes that others have continued without."""
    for rank, process in enumerate(ranks):
        if rank not in ended and _is_stopped(process.pid):
            process.kill()


def _is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:
        return False


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
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
