"""What containers deny: each rank trains all the same, or a sentence names the limit. No SIGBUS, no hang."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import Outcome, Status, at_once, rank_outcomes, run_process
from harness.limits import NoSuchLimit, allow_memory, mount_shared_memory, refuse_calls

import bmtrain as bmt
from bmtrain._ranks.comm import describe_cpu_transport
from bmtrain._tools.checkup.findings import Surroundings
from bmtrain._tools.checkup.machine import check_shared_memory

SIZE = 512  # 1 MiB of parameters: enough to be exchanged in place
SHARED = "shared memory between ranks of one host, Gloo between hosts"


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def limit_processors() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


LIMITS: dict[str, Callable[[], None]] = {
    "/dev/shm of 8 MiB": lambda: mount_shared_memory("size=8m"),
    "no /dev/shm": lambda: mount_shared_memory("size=4k", read_only=True),
    "no ptrace": lambda: refuse_calls(["ptrace", "process_vm_readv"]),
    "no pidfd_open": lambda: refuse_calls(["pidfd_open"], errno.ENOSYS),
    "no memfd_create": lambda: refuse_calls(["memfd_create"]),
    "none of these calls": lambda: refuse_calls(["memfd_create", "pidfd_open", "process_vm_readv", "ptrace"]),
    "64 open files": limit_files,
    "one processor": limit_processors,
}
# What `doctor` says of the transport where it is not shared memory.
CHOSEN = {
    "no memfd_create": "Gloo: memory files are not allowed here (Operation not permitted)",
    "none of these calls": "Gloo: memory files are not allowed here (Operation not permitted)",
}
# What `doctor` says of /dev/shm, which the ranks do not use but torch's data loaders do.
FOUND = {"/dev/shm of 8 MiB": "has 8 MiB left", "no /dev/shm": "cannot be written to"}


def steps(width: int) -> float:
    """Two of them; returns the last loss."""
    block = bmt.Block(bmt.nn.Linear(width, width))
    bmt.init_parameters(block)
    optimizer = bmt.optim.AdamOptimizer(block.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss = block(torch.ones(2, width)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def train(name: str) -> tuple[str, str, str, bool]:
    """Under a limit, set before the ranks meet: the transport, what `doctor` says, and whether there is a loss."""
    try:
        LIMITS[name]()
    except NoSuchLimit as reason:
        return "", str(reason), "", False
    bmt.init_distributed(timeout=8)
    loss = steps(SIZE)
    bmt.synchronize()
    transport = bmt.config["comm"].backend
    return transport, describe_cpu_transport(), check_shared_memory(Surroundings()).found, loss > 0


@pytest.mark.parametrize("name", LIMITS)
def test_ranks_train_under_a_limit(name: str) -> None:
    for outcome in rank_outcomes(2, train, name, init=False, fresh=True, timeout=60):
        assert outcome.status is Status.RETURNED, outcome
        transport, said, of_folder, is_finite = outcome.value
        if not transport:
            pytest.skip(f"this limit cannot be set here: {said}")
        assert (transport, said) == ("gloo" if name in CHOSEN else "shm", CHOSEN.get(name, SHARED))
        assert FOUND.get(name, "") in of_folder
        assert is_finite


def train_in_tight_space(megabytes: int, width: int) -> str:
    """Before the ranks meet; afterwards there is room to say what happened."""
    allow_memory(megabytes)
    bmt.init_distributed(timeout=8)
    transport = str(bmt.config["comm"].backend)
    steps(width)
    bmt.synchronize()
    return transport


NAMES = ("memory", "allocate", "address space", "thread")


def gather_in_tight_space(victim: int) -> str:
    """The ranks have met, and have shards; then one of them has no room for whole parameters."""
    assert bmt.config["comm"].backend == "shm"
    block = bmt.Block(bmt.nn.Linear(2048, 2048))
    bmt.init_parameters(block)
    if bmt.rank() == victim:
        allow_memory(8)
    try:
        block(torch.ones(2, 2048)).sum().backward()
        bmt.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


SPACES = [0, 256]  # MiB


@pytest.fixture(scope="module")
def tight() -> dict[int | None, list[Outcome]]:
    """Outcomes of jobs that mostly wait, made at the same time: by what is left before the ranks meet; of a rank that
    has too little afterwards."""
    run = partial(rank_outcomes, 2, fresh=True, timeout=90)
    calls = {space: partial(run, train_in_tight_space, space, 2048, init=False) for space in SPACES}
    gather = partial(run, gather_in_tight_space, 1, init={"timeout": 6})
    return dict(zip([*calls, None], at_once([*calls.values(), gather]), strict=True))


@pytest.mark.parametrize("megabytes", SPACES)
def test_a_tight_address_space_is_told(megabytes: int, tight: dict[int | None, list[Outcome]]) -> None:
    outcomes = tight[megabytes]
    assert all(outcome.status in (Status.RETURNED, Status.RAISED) for outcome in outcomes), outcomes
    if any(outcome.status is Status.RAISED for outcome in outcomes):
        assert any(word in str(outcome) for outcome in outcomes for word in NAMES), outcomes


def test_no_room_for_a_buffer_is_told_with_its_limit(tight: dict[int | None, list[Outcome]]) -> None:
    outcomes = tight[None]
    assert all(outcome.status is Status.RETURNED for outcome in outcomes), outcomes
    assert "CommunicationError: shared memory: cannot map a buffer of" in outcomes[1].value
    assert "ulimit -v" in outcomes[1].value
    assert "rank 1 did not come" in outcomes[0].value


JEMALLOC = sorted(Path("/usr/lib").glob("**/libjemalloc.so.2"))
PRELOADED = """
import torch, bmtrain as bmt
bmt.init_distributed(timeout=30)
block = bmt.Block(bmt.nn.Linear(512, 512))
bmt.init_parameters(block)
optimizer = bmt.optim.AdamOffloadOptimizer(block.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    block(torch.ones(2, 512)).square().mean().backward()
    optimizer.step()
bmt.synchronize()
mapped = "libjemalloc" in open("/proc/self/maps").read()
print(f"trained over {bmt.config['comm'].backend}, jemalloc: {mapped}", flush=True)
"""


@pytest.mark.skipif(not JEMALLOC, reason="needs libjemalloc.so.2 (Debian: libjemalloc2)")
def test_ranks_train_with_jemalloc(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRELOADED)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    environment = {"LD_PRELOAD": str(JEMALLOC[0]), "PYTHONPATH": str(Path(bmt.__file__).parents[1])}
    done = run_process(command, environment=environment, timeout=120)
    assert done.stdout.count("trained over shm, jemalloc: True") == 2, done.stdout


GROUP = Path("/sys/fs/cgroup/memory")


def outgrow(group: str, victim: int) -> str:
    comm = bmt.config["comm"]
    comm.barrier()
    if comm.rank == victim:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        kept = [bytearray(os.urandom(1 << 20)) for _ in range(400)]
        return f"held {len(kept)} MiB"
    try:
        comm.barrier()
    except bmt.errors.CommunicationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_its_control_group_kills_is_named(victim: int) -> None:
    group = GROUP / f"bmtrain-{os.getpid()}-{victim}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no control group of memory (version 1) can be made here: {error}")
    try:
        outcomes: list[Outcome] = rank_outcomes(
            2, outgrow, str(group), victim, init={"timeout": 20}, fresh=True, timeout=60
        )
    finally:
        group.rmdir()
    assert (outcomes[victim].status, outcomes[victim].exitcode) == (Status.DIED, -9)
    assert f"rank {victim} died" in outcomes[1 - victim].value
