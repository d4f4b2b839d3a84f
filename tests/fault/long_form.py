"""The long form of the fault tests: how soon survivors raise, over every rank, every collective and many repeats.

Run by ``bash tests/fault/run.sh --long``. What it found of an operation goes into the file at once, in place of what
the file says of that operation; ``--operations`` chooses some. A time is from the moment just before SIGKILL (or
SIGSTOP) to the moment at which a survivor has its CommunicationError, on the clock that all processes of a host share.
The exit status is 1 if anything took longer than it may, or did not raise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from harness import Status, rank_outcomes, run_ranks
from harness.ends import after_dead_peers, after_interrupts, broken_promises
from test_faults import COLLECTIVES, caught, stop_for_good

import bmtrain
from bmtrain import _C
from bmtrain._ranks import context as _context
from bmtrain.benchmark import soak

# The time-out counts from the start of an operation, which may be a little before the signal.
_EARLY_SECONDS = 0.1


def strike(op: str, victim: int, number: int, delay: float, folder: str) -> tuple[str, float]:
    """Collectives until one fails; the victim is struck from a thread of its own after ``delay`` seconds."""
    told = Path(folder, "told")
    told.mkdir(exist_ok=True)
    bmtrain.synchronize()
    if bmtrain.rank() == victim:

        def hit() -> None:
            time.sleep(delay)
            Path(folder, "struck").write_text(repr(time.monotonic()))
            if number == signal.SIGSTOP:
                stop_for_good(str(told), bmtrain.world_size() - 1)
            os.kill(os.getpid(), number)

        threading.Thread(target=hit, daemon=True).start()
    message = caught(op, 50_000)
    raised = time.monotonic()
    (told / str(bmtrain.rank())).touch()
    return message, raised


def measure(op: str, number: int, transport: str, world: int, repeats: int, timeout: float) -> dict[str, Any]:
    """All victims x repeats of one collective."""
    delays: list[float] = []
    hangs = wrong = 0
    for victim, repeat in itertools.product(range(world), range(repeats)):
        delay = 0.02 + 0.005 * (repeat % 20)
        with tempfile.TemporaryDirectory() as folder:
            outcomes = rank_outcomes(
                world,
                strike,
                op,
                victim,
                number,
                delay,
                folder,
                init={"timeout": timeout},
                environment={"BMTRAIN_CPU_TRANSPORT": transport},
                fresh=True,
                timeout=timeout + 20,
            )
            struck = float(Path(folder, "struck").read_text())
        for outcome in outcomes:
            if outcome.rank == victim:
                continue
            if outcome.status is not Status.RETURNED:
                hangs += 1
                continue
            message, raised = outcome.value
            delays.append(raised - struck)
            wrong += f"rank {victim}" not in message.split(": ", 1)[1]
    return {
        "time-out, seconds": timeout,
        "struck": world * repeats,
        "did not raise": hangs,
        "named another rank": wrong,
        "seconds": [round(delay, 3) for delay in sorted(delays)],
    }


def summary(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of all operations together."""
    delays = sorted(second for op in found.values() for second in op["seconds"])
    counts = {
        name: sum(op[name] for op in found.values())
        for name in ("struck", "did not raise", "named another rank")
    }
    return {
        "struck, least of an operation": min(op["struck"] for op in found.values()),
        **counts,
        "survivors": len(delays),
        "seconds, least": delays[0],
        "seconds, median": statistics.median(delays),
        "seconds, 99 of 100": delays[int(0.99 * len(delays))],
        "seconds, most": delays[-1],
    }


def broken_by(fault: signal.Signals, found: Mapping[str, Any]) -> list[str]:
    """What one operation's survivors did that they should not, one sentence each."""
    seconds, timeout = found["seconds"], found["time-out, seconds"]
    broken = [f"{found[name]} {name}" for name in ("did not raise", "named another rank") if found[name]]
    if seconds and seconds[-1] > timeout + 2:
        broken.append(f"expected an error {timeout + 2:g} s after the fault, got one after {seconds[-1]:g} s")
    if seconds and fault is signal.SIGKILL and statistics.median(seconds) >= 1:
        broken.append(f"expected a median below 1 s, got {statistics.median(seconds):g} s")
    if seconds and fault is signal.SIGSTOP and seconds[0] < timeout - _EARLY_SECONDS:
        broken.append(f"expected no error before the time-out, got one after {seconds[0]:g} s")
    return broken


def _text_of(result: dict[str, Any]) -> str:
    """JSON with each list of numbers on a line of its own."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[[\d.,\s]+\]", lambda found: re.sub(r"\s+", "", found[0]), text) + "\n"


def steps_of_the_toy(steps: int = 50) -> tuple[float, float]:
    """What `python -m bmtrain soak` trains: operations that a step posts, and seconds of its fastest step."""
    model, manager = soak.toy(bmtrain.optim.AdamOptimizer)
    context = _context.current()
    assert context is not None
    assert context.watch is not None
    seconds = []
    for _ in range(steps):
        before = sum(group["posted"] for group in context.watch.core.groups())
        start = time.perf_counter()
        manager.zero_grad()
        manager.backward(model(torch.zeros(soak.BATCH, soak.SEQ + 1, dtype=torch.int64)))
        manager.step()
        seconds.append(time.perf_counter() - start)
        posted = sum(group["posted"] for group in context.watch.core.groups()) - before
    return posted, min(seconds)


def cost_of_recording(rounds: int = 20_000) -> dict[str, float]:
    """Microseconds that the guard adds to one operation, and to a step of a toy, which is short."""
    x = torch.ones(4)

    def once(comm: _C.Communicator) -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            comm.all_reduce(x, _C.ReduceOp.SUM, "block 1").wait()
        return (time.perf_counter() - start) / rounds * 1e6

    plain = _C.SingleCommunicator("plain")
    guarded = _C.GuardedCommunicator(plain, _C.Watchdog(600.0), "plain/0", [0], False)
    pairs = [(once(plain), once(guarded)) for _ in range(5)]
    unguarded, recorded = min(p for p, _ in pairs), min(g for _, g in pairs)
    [(operations, seconds), _] = run_ranks(2, steps_of_the_toy, fresh=True)
    return {
        "plain, us": unguarded,
        "guarded, us": recorded,
        "operations of a toy's step": operations,
        "its fastest step, us": seconds * 1e6,
        "share of it": (recorded - unguarded) * operations / (seconds * 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=4, help="ranks")
    parser.add_argument("--repeats", type=int, default=50, help="kills for each rank and collective")
    parser.add_argument("--stops", type=int, default=0, help="stops for each rank and collective")
    parser.add_argument(
        "--ends", type=int, default=20, help="interrupts, and scripts that end with dead peers"
    )
    parser.add_argument("--transports", default="shm,gloo", help="what connects the ranks")
    parser.add_argument("--operations", default=",".join(COLLECTIVES), help="what they are struck in")
    parser.add_argument("--timeout", type=float, default=5.0, help="of the library, in seconds")
    parser.add_argument(
        "--recording", action=argparse.BooleanOptionalAction, default=True, help="what recording costs"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/faults.json"))
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
    broken: list[str] = []
    if options.recording:
        result["recording"] = cost_of_recording()
        print(f"recording: {result['recording']}")
        if result["recording"]["share of it"] > 0.01:
            broken.append("recording: expected less than 1 % of a step")
    for transport in options.transports.split(",") if options.ends else ():
        whole, processor = after_dead_peers(transport, options.ends)
        ends = {
            "Ctrl-C, seconds": after_interrupts(transport, options.ends),
            "with dead peers, seconds": whole,
            "with dead peers, seconds of a processor": processor,
        }
        result[f"ends, {transport}"] = ends
        options.out.write_text(_text_of(result))
        for name, seconds in ends.items():
            print(f"{transport}, {name}: median {statistics.median(seconds):.3f}, most {max(seconds):.3f}")
        broken += [f"{transport}, {sentence}" for sentence in broken_promises(ends)]
    faults = {signal.SIGKILL: options.repeats, signal.SIGSTOP: options.stops}
    for transport, (fault, repeats) in itertools.product(options.transports.split(","), faults.items()):
        for op in options.operations.split(",") if repeats else ():
            entry = result.setdefault(f"{fault.name}, {transport}", {}).setdefault("operations", {})
            entry[op] = measure(op, fault, transport, options.world, repeats, options.timeout)
            result[f"{fault.name}, {transport}"]["all"] = summary(entry)
            options.out.write_text(_text_of(result))
            told = {name: value for name, value in entry[op].items() if name != "seconds"}
            print(
                f"{fault.name}, {transport}, {op}: {told}, median {statistics.median(entry[op]['seconds']):.3f} s"
            )
            broken += [f"{fault.name}, {transport}, {op}: {what}" for what in broken_by(fault, entry[op])]
    print(json.dumps({name: found["all"] for name, found in result.items() if "SIG" in name}, indent=1))
    if broken:
        raise SystemExit("\n".join(["run.sh: not as promised:", *broken]))
