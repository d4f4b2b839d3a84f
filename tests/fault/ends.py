"""How soon a rank ends: at Ctrl-C in an operation that is blocked, and after a script whose other ranks are dead.

For ``bash tests/fault/run.sh --long``. Times are on the clock that all processes of a host share.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from harness import free_port, run_ranks

import bmtrain

__all__ = ["after_dead_peers", "after_interrupts"]

WORLD = 3
VICTIM = 1
SCRIPT = f"""
import os, signal, time
import bmtrain
bmtrain.init_distributed(timeout=300)
bmtrain.synchronize()
if bmtrain.rank() == {VICTIM}:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
print(time.monotonic(), flush=True)
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


def end_with_dead_peers(transport: str) -> list[float]:
    """Seconds from the last line of the script to the end of the process, of each rank that is left."""
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
    ended = [0.0] * WORLD

    def watch(rank: int) -> None:
        ranks[rank].wait(120)
        ended[rank] = time.monotonic()

    watchers = [threading.Thread(target=watch, args=[rank]) for rank in range(WORLD)]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    seconds = []
    for rank, process in enumerate(ranks):
        process.kill()
        output = process.communicate()[0]
        if rank != VICTIM:
            assert process.returncode == 0, f"rank {rank} ended with {process.returncode}"
            seconds.append(ended[rank] - float(output.split()[-1]))
    return seconds


def after_dead_peers(transport: str, repeats: int) -> list[float]:
    """One time for each rank that is left, of all repeats."""
    seconds = [second for _ in range(repeats) for second in end_with_dead_peers(transport)]
    return sorted(round(second, 3) for second in seconds)
