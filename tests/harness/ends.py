"""How soon a rank ends: at Ctrl-C in an operation that is blocked, and after a script whose other ranks are dead.

For ``bash tests/fault/run.sh --long`` (with ``--repeats 0``: this alone). Times are on the clock that all processes of
a host share. A script's end also takes processor time, most of it torch's, and on a machine with more to do than
processors that is most of the time: so it is told as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import bmtrain

from . import free_port, run_ranks

__all__ = ["after_dead_peers", "after_interrupts", "broken_promises"]

WORLD = 3
VICTIM = 1
PROMISES = {"Ctrl-C, seconds": 1.0, "with dead peers, seconds": 10.0}
SCRIPT = f"""
import os, signal, time
import bmtrain
bmtrain.init_distributed(timeout=300)
bmtrain.synchronize()
if bmtrain.rank() == {VICTIM}:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
print(time.monotonic(), time.process_time(), flush=True)
"""


def interrupted() -> float:
    """Seconds from SIGINT to KeyboardInterrupt; 0 on the other ranks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the harness ignores it
    comm, struck = bmtrain.config["comm"], []
    comm.barrier()
    if comm.rank == VICTIM:

        def strike() -> None:
            struck.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.2, strike).start()
    try:
        comm.recv(torch.empty(4), 0 if comm.rank else VICTIM, "never sent").wait()
    except KeyboardInterrupt:
        return time.monotonic() - struck[0]
    except bmtrain.errors.CommunicationError:
        return 0.0
    raise AssertionError("nobody sent anything")


def after_interrupts(transport: str, repeats: int) -> list[float]:
    """One time a repeat."""
    options = {"init": {"timeout": 300}, "environment": {"BMTRAIN_CPU_TRANSPORT": transport}, "fresh": True}
    return sorted(round(run_ranks(WORLD, interrupted, **options)[VICTIM], 3) for _ in range(repeats))


def broken_promises(found: Mapping[str, Sequence[float]]) -> list[str]:
    """What took longer than it may, one sentence each."""
    return [
        f"{name}: expected at most {limit:g}, got {max(found[name]):g}"
        for name, limit in PROMISES.items()
        if max(found[name]) > limit
    ]


def end_with_dead_peers(transport: str) -> list[tuple[float, float]]:
    """From the last line of the script to the end of the process, of each rank that is left: seconds, and
    seconds of processor time."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "BMTRAIN_CPU_TRANSPORT": transport,
        "PYTHONPATH": str(Path(bmtrain.__file__).parents[1]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    ended = [(0.0, 0.0)] * WORLD

    def watch(rank: int) -> None:
        _, status, used = os.wait4(ranks[rank].pid, 0)
        ended[rank] = time.monotonic(), used.ru_utime + used.ru_stime
        ranks[rank].returncode = os.waitstatus_to_exitcode(status)

    watchers = [threading.Thread(target=watch, args=[rank], daemon=True) for rank in range(WORLD)]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join(120)
    seconds = []
    for rank, process in enumerate(ranks):
        if process.returncode is None:
            process.kill()
            raise AssertionError(f"rank {rank} did not end")
        assert process.stdout is not None
        output = process.stdout.read().split()
        if rank != VICTIM:
            assert process.returncode == 0, f"rank {rank} ended with {process.returncode}"
            seconds.append((ended[rank][0] - float(output[-2]), ended[rank][1] - float(output[-1])))
    return seconds


def after_dead_peers(transport: str, repeats: int) -> tuple[list[float], list[float]]:
    """One time for each rank that is left, of all repeats; and its processor time."""
    pairs = [pair for _ in range(repeats) for pair in end_with_dead_peers(transport)]
    whole, processor = zip(*pairs, strict=True)
    return sorted(round(second, 3) for second in whole), sorted(round(second, 3) for second in processor)
