"""Strangers on the ports of a job: it goes on, nothing of what they say is believed, no connection stays open."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Program, free_port, run_ranks

import bmtrain
from bmtrain._ranks.context import context
from bmtrain._ranks.groups import _meeting

# Rank 0 reads how many steps to make; what it prints depends on both ranks.
SCRIPT = """
import sys, torch, bmtrain as bmt
bmt.init_distributed(timeout=60)
block = bmt.Block(bmt.nn.Linear(8, 8))
bmt.init_parameters(block)
optimizer = bmt.optim.AdamOptimizer(block.parameters(), lr=0.1)
print("ready", flush=True)
while bmt.store.broadcast_object(sys.stdin.readline().strip() if bmt.rank() == 0 else None) == "step":
    optimizer.zero_grad()
    loss = block(torch.ones(2, 8)).square().sum()
    loss.backward()
    optimizer.step()
    if bmt.rank() == 0:
        print("stepped", loss.isfinite().item(), flush=True)
"""


class Rank:
    """A program, and what it reads and writes."""

    def __init__(self, script: str, environment: dict[str, str]) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self.program = Program(script, environment, (theirs_in, theirs_out, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self.input, self.output = os.fdopen(ours_in, "w"), os.fdopen(ours_out)

    def end(self) -> tuple[str, int]:
        """What it still prints, and its exit status."""
        self.input.close()
        with self.output:
            return self.output.read(), self.program.wait(60)


class Job:
    """Two ranks on this host."""

    def __init__(self, transport: str) -> None:
        self.port = free_port()
        self.ranks = [self.start(rank, SCRIPT, transport) for rank in range(2)]
        assert [self.line(rank) for rank in range(2)] == ["ready", "ready"]

    def start(self, rank: int, script: str, transport: str) -> Rank:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "BMTRAIN_CPU_TRANSPORT": transport,
        }
        return Rank(script, environment)

    def line(self, rank: int) -> str:
        output = self.ranks[rank].output
        line = output.readline().strip()
        while line.startswith("bmtrain: waiting for"):  # a rank that starts on a busy machine
            line = output.readline().strip()
        return line

    def step(self) -> str:
        self.tell("step")
        return self.line(0)

    def tell(self, word: str) -> None:
        self.ranks[0].input.write(word + "\n")
        self.ranks[0].input.flush()

    def addresses(self) -> set[tuple[str, int]]:
        return {address for rank in self.ranks for address in listening(rank.program.pid)}

    def end(self) -> tuple[list[str], list[int]]:
        """What else was printed, and the exit codes."""
        try:
            self.tell("end")
            outputs, statuses = zip(*(rank.end() for rank in self.ranks), strict=True)
            return list(outputs), list(statuses)
        finally:
            for rank in self.ranks:
                rank.program.kill()


def listening(process: int | str) -> Iterator[tuple[str, int]]:
    """The addresses and ports of TCP on which a process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{process}/fd/{name}"))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                words = bytes.fromhex(address)  # numbers of 32 bits, as this host has them in memory
                swapped = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                yield socket.inet_ntop(family, swapped), int(port, 16)


@pytest.fixture(scope="module", params=["shm", "gloo"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    running = Job(request.param)
    yield running
    outputs, codes = running.end()
    assert (outputs, codes) == (["", ""], [0, 0])


def test_ports_are_those_of_the_address_in_use(job: Job) -> None:
    found = job.addresses()
    assert ("127.0.0.1", job.port) in found
    assert {address for address, _ in found} <= {"127.0.0.1", *_addresses_of_the_name()}


def _addresses_of_the_name() -> set[str]:
    """Gloo listens on the interface that the host's name leads to."""
    with contextlib.suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), 0)}
    return set()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def _says(kind: str, struck: Path) -> bytes:
    bomb = pickle.dumps(_Bomb(struck))
    return {
        "nothing": b"",
        "bytes": bytes(range(256)) * 64,
        "a pickle": bomb,
        "a pickle with its length": len(bomb).to_bytes(8, "little") + bomb,
        "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "a wrong secret": json.dumps({"do": "hello", "rank": 1, "secret": "0" * 32}).encode() + b"\n",
        "a list": b"[1, 2]\n",
        "a deep list": b"[" * 30_000 + b"]" * 30_000 + b"\n",
        "half a message": b'{"do": "hel',
        "a line without an end": b"x" * (1 << 20),
    }[kind]


KINDS = [
    "nothing",
    "bytes",
    "a pickle",
    "a pickle with its length",
    "HTTP",
    "a wrong secret",
    "a list",
    "a deep list",
    "half a message",
    "a line without an end",
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_strangers_say_disturbs_nobody(job: Job, kind: str, tmp_path: Path) -> None:
    """Held open during the steps, and closed after."""
    struck = tmp_path / "struck"
    with contextlib.ExitStack() as held:
        for address in job.addresses():
            stranger = held.enter_context(socket.create_connection(address, 5))
            with contextlib.suppress(OSError):  # closed by the job
                stranger.sendall(_says(kind, struck))
        assert job.step() == "stepped True"
    assert job.step() == "stepped True"
    assert not struck.exists()


def test_a_scan_disturbs_nobody(job: Job) -> None:
    for _ in range(50):
        for address in job.addresses():
            socket.create_connection(address, 5).close()
    assert job.step() == "stepped True"


def test_the_watchdog_keeps_no_connection_of_a_stranger(job: Job) -> None:
    """Rank 0's is one of its ports beside the rendezvous; who is not let in sees the end."""
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(address, 5))
            for address in set(listening(job.ranks[0].program.pid)) - {("127.0.0.1", job.port)}
        ]
        ended, _, _ = select.select(strangers, [], [], 60)
        assert b"" in [stranger.recv(1) for stranger in ended]


def test_another_job_on_the_port_is_told_so(job: Job) -> None:
    other = job.start(0, "import bmtrain; bmtrain.init_distributed(timeout=10)", "auto")
    output, status = other.end()
    assert status != 0
    assert f"expected port {job.port} to be free on this host" in output
    late = job.start(1, "import bmtrain; bmtrain.init_distributed(timeout=3)", "auto")
    output, status = late.end()
    assert status != 0
    assert "bmtrain" in output.splitlines()[-1], output
    assert job.step() == "stepped True"


def meet_again() -> list[tuple[str, int]]:
    """What is open while parts of a group connect, beside what was."""
    before = set(listening("self"))
    with _meeting(context("test")):
        time.sleep(0.01)
        return sorted(set(listening("self")) - before)


def test_a_later_meeting_is_held_on_the_same_address() -> None:
    rank_0, rank_1 = run_ranks(2, meet_again)
    assert [address for address, _ in rank_0] == ["127.0.0.1"]
    assert rank_1 == []


def late_garbage(words: list[bytes]) -> int:
    """At the start: strangers come before the ranks do."""
    from bmtrain._watch import meeting

    real, served = meeting.open_hub, []

    def open_hub(*arguments: object) -> object:
        found = real(*arguments)
        address = found[0].getsockname()
        for word in words:
            served.append(socket.create_connection(address[:2], 5))
            served[-1].sendall(word)
        return found

    from bmtrain._watch import watchdog

    watchdog.open_hub = open_hub
    bmtrain.init_distributed(timeout=30)
    bmtrain.synchronize()
    return len(served)


def test_strangers_before_the_ranks_are_turned_away(tmp_path: Path) -> None:
    words = [_says(kind, tmp_path / "struck") for kind in KINDS if "without" not in kind]
    words += [b"half"] * 100
    assert run_ranks(2, late_garbage, words, init=False, fresh=True)[0] == len(words)
    assert not (tmp_path / "struck").exists()
