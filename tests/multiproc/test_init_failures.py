"""How `init_distributed` fails: the same clear sentence on every rank, and nothing stays behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import Status, at_once, free_port, rank_outcomes, run_ranks

import bmtrain
from bmtrain._base import said
from bmtrain._ranks import comm, context, shm_meeting
from bmtrain._ranks.rendezvous import Rendezvous

SHORT = 6  # seconds: with ranks that start apart, and a pause, all still meet


def attempt(**arguments: Any) -> str:
    """Call init_distributed; the error as text, or an empty one."""
    try:
        bmtrain.init_distributed(**{"timeout": 20, **arguments})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"backend": "mpi"}, "ValueError: backend: expected 'nccl', 'gloo' or None, got 'mpi'"),
    ({"backend": "nccl"}, "ValueError: backend: 'nccl' needs a usable CUDA device, got none: use 'gloo'"),
    ({"timeout": 0}, "ValueError: timeout: expected a positive, finite number of seconds, got 0"),
    ({"timeout": "9"}, "TypeError: timeout: expected seconds or a timedelta, got '9' (str)"),
    ({"seed": 1.5}, "TypeError: seed: expected an integer, got 1.5 (float)"),
    ({"seed": 2**64}, "ValueError: seed: expected a number of 64 bits, got 18446744073709551616"),
    ({"init_method": None}, "TypeError: init_method: expected an integer, got None (NoneType)"),
    ({"tp_size": "2"}, "TypeError: tp_size: expected an integer, got '2' (str)"),
    ({"zero_level": 1}, "ValueError: zero_level: expected 2 or 3, got 1"),
    ({"loss_scale_factor": 0}, "ValueError: loss_scale_factor: expected a positive, finite number, got 0"),
    ({"loss_scale_steps": 0}, "ValueError: loss_scale_steps: expected at least 1, got 0"),
    ({"num_micro_batches": 0}, "ValueError: num_micro_batches: expected at least 1, got 0"),
    ({"num_stages": 2}, "TypeError: init_distributed() got an unexpected keyword argument 'num_stages'"),
    (
        {"pipe_size": 2, "tp_size": 2},
        "ValueError: world_size 2 must be divisible by pipe_size * tp_size = 2 * 2 = 4 (remainder 2): start "
        "another number of ranks, or change pipe_size or tp_size",
    ),
]


def fail_then_succeed(bad: list[dict[str, Any]]) -> list[str]:
    """Every bad call fails, changes nothing, and does not keep a good one from working."""
    variables = dict(os.environ)
    found = [attempt(**arguments) for arguments in bad]
    assert dict(os.environ) == variables
    assert not bmtrain.init.is_initialized()
    assert attempt() == ""
    bmtrain.synchronize()
    context.uninstall()
    return found


def test_bad_arguments() -> None:
    bad, messages = [arguments for arguments, _ in BAD_ARGUMENTS], [text for _, text in BAD_ARGUMENTS]
    assert run_ranks(2, fail_then_succeed, bad, init=False) == [messages, messages]


def started_as(variables: list[dict[str, str]], arguments: list[dict[str, Any]]) -> str:
    """Each rank with variables and arguments of its own."""
    rank = int(os.environ["RANK"])
    os.environ.update(variables[rank])  # undone by the harness before its next call
    return attempt(**arguments[rank])


def start(
    *variables: dict[str, str], arguments: list[dict[str, Any]] | None = None, timeout: float | None = None
) -> list[str]:
    """The ranks' errors. They are all there is to read: no warning of the store, no stack of C++.

    With a time-out of all ranks these are fresh, so that jobs can be started at once.
    """
    fresh = timeout is not None
    options = arguments or [{"timeout": timeout} if fresh else {}] * len(variables)
    port = str(free_port())
    variables = tuple({"MASTER_PORT": port, **changes} for changes in variables)
    outcomes = rank_outcomes(len(variables), started_as, list(variables), options, init=False, fresh=fresh)
    assert {outcome.status for outcome in outcomes} == {Status.RETURNED}, outcomes
    assert [outcome.output for outcome in outcomes] == [""] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def world_of(size: int) -> dict[str, str]:
    return {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}


def start_three_of_five() -> list[str]:
    here = world_of(5)
    return start(here, here, {**here, "RANK": "3", "LOCAL_RANK": "3"}, timeout=SHORT)


def start_two_jobs() -> list[str]:
    """On the same port."""
    return start(*({"TORCHELASTIC_RUN_ID": name} for name in ("red", "blue")), timeout=SHORT)


def start_on_a_taken_port() -> list[str]:
    """The port, and the errors. A thread of a rank stays behind that waits for the other program's answer."""
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        return [port, *start({"MASTER_PORT": port}, {"MASTER_PORT": port}, timeout=SHORT)]


def with_little_patience() -> str:
    said._FIRST_SECONDS = 0.5
    os.environ.update(world_of(3))
    return attempt(timeout=SHORT)


@pytest.fixture(scope="module")
def waiting() -> dict[Any, Any]:
    """What jobs end with that wait until their time-out, made at the same time, by function."""
    calls: list[Callable[[], Any]] = [start_three_of_five, start_two_jobs, start_on_a_taken_port]
    patience = partial(rank_outcomes, 2, with_little_patience, init=False, fresh=True)
    return dict(zip([*calls, with_little_patience], at_once([*calls, patience]), strict=True))


def test_a_missing_rank_is_named_on_every_rank(waiting: dict[Any, Any]) -> None:
    messages = waiting[start_three_of_five]
    assert len(set(messages)) == 1
    pattern = r"CommunicationError: rendezvous at 127.0.0.1:\d+: expected 5 ranks within 6 s, got 3; "
    assert re.match(pattern + "missing ranks 2, 4: see whether they started", messages[0])


def test_rank_0_is_missing() -> None:
    [message] = start({**world_of(2), "RANK": "1"}, arguments=[{"timeout": 1}])
    pattern = (
        r"CommunicationError: rank 1 of 2: no answer at 127.0.0.1:\d+ after 1 s \(.*refused\): expected "
    )
    assert re.match(pattern + "rank 0 there; see whether it runs", message)


def test_a_second_process_with_a_rank() -> None:
    messages = start(world_of(3), world_of(3), {**world_of(3), "RANK": "1", "LOCAL_RANK": "1"})
    assert len(set(messages)) == 1
    pattern = (
        r"BMTrainError: rank 1 of 3 at 127.0.0.1:\d+: expected one process with this rank, got a second one"
    )
    assert re.match(pattern, messages[0])


@pytest.mark.parametrize(
    ("variables", "arguments", "setting", "values"),
    [
        ([{}, world_of(3)], [{}, {}], "world size", (2, 3)),
        ([{}, {}], [{"tp_size": 2}, {"tp_size": 1}], "tp_size", (2, 1)),
        ([{}, {}], [{"pipe_size": 1}, {}], "pipe_enabled", (True, False)),
    ],
)
def test_ranks_that_were_started_differently(
    variables: list[dict[str, str]], arguments: list[dict[str, Any]], setting: str, values: tuple[Any, Any]
) -> None:
    messages = start(*variables, arguments=arguments)
    assert len(set(messages)) == 1
    either = [
        f"ValueError: {setting}: expected the same on every rank, got {values[a]!r} on rank {a} and "
        f"{values[1 - a]!r} on rank {1 - a}"
        for a in (0, 1)
    ]
    assert messages[0] in either


def of_another_version() -> str:
    from bmtrain import init

    if os.environ["RANK"] == "1":
        init.__version__ = "0.0.1"
    return attempt()


def test_a_rank_of_another_version() -> None:
    first, second = run_ranks(2, of_another_version, init=False, fresh=True)
    assert first == second
    assert first.startswith("ValueError: bmtrain version: expected the same on every rank, got ")
    assert "'0.0.1' on rank 1" in first


def test_a_rank_of_another_job_on_the_same_port(waiting: dict[Any, Any]) -> None:
    """It is refused by itself, whichever comes first; the other job goes on waiting for its own ranks."""
    refused = [message for message in waiting[start_two_jobs] if message.startswith("BMTrainError")]
    assert len(refused) == 1
    assert "give each job a MASTER_PORT of its own" in refused[0]
    assert "red" in refused[0]
    assert "blue" in refused[0]


def test_a_host_that_nobody_knows() -> None:
    where = {"MASTER_ADDR": "no-such-host.invalid"}
    for rank, message in enumerate(start(where, where, arguments=[{"timeout": 1}] * 2)):
        assert message.startswith(
            f"CommunicationError: rank {rank} of 2: expected the address of a host in MASTER_ADDR or "
            "init_method, got 'no-such-host.invalid', which no name service knows"
        )


def test_a_port_that_another_program_has(waiting: dict[Any, Any]) -> None:
    port, server, client = waiting[start_on_a_taken_port]
    assert server == (
        f"CommunicationError: rank 0 of 2: cannot serve the rendezvous at 127.0.0.1:{port}: expected port "
        f"{port} to be free on this host, got 'Address already in use': set MASTER_PORT to a free port"
    )
    assert client.startswith(
        f"CommunicationError: rank 1 of 2: expected the rendezvous store at 127.0.0.1:{port}, got something "
        "that accepts connections but does not answer as one"
    )


def test_a_file_where_none_can_be(tmp_path: Any) -> None:
    url = f"file://{tmp_path}/missing/meeting"
    for rank, message in enumerate(start({}, {}, arguments=[{"init_method": url}] * 2)):
        assert message == (
            f"BMTrainError: init_method, rank {rank} of 2: expected a file in a folder that can be written, "
            f"got {tmp_path}/missing/meeting"
        )


def wait_for_a_server_that_dies() -> str:
    def end_when_the_other_waits(meeting: Rendezvous) -> Any:
        while meeting._missing() != [2]:
            time.sleep(0.01)
        os._exit(9)

    if os.environ["RANK"] == "0":
        Rendezvous._await_verdict = end_when_the_other_waits  # type: ignore[method-assign]
    os.environ.update(world_of(3))
    return attempt()


def test_the_server_dies_while_others_wait() -> None:
    first, second = rank_outcomes(2, wait_for_a_server_that_dies, init=False, fresh=True)
    assert (first.status, first.exitcode) == (Status.DIED, 9)
    assert second.value.startswith("CommunicationError: rank 1 of 3: lost the rendezvous at 127.0.0.1")


def killed_while_connecting(transport: str, victim: int, folder: str) -> str:
    """A rank is killed where the others already wait for it."""
    function = "connect_gloo" if transport == "gloo" else "_meet"
    real, rank = getattr(comm, function), os.environ["RANK"]

    def arrive(*arguments: Any) -> Any:
        Path(folder, rank).touch()
        if rank == str(victim):
            while len(os.listdir(folder)) < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(comm, function, arrive)
    return attempt(timeout=300)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_rank_is_killed_while_the_ranks_connect(transport: str, victim: int, tmp_path: Path) -> None:
    """Long before the time-out; rank 0 has the store and the watchdogs' hub as well."""
    variables = {"BMTRAIN_CPU_TRANSPORT": transport}
    options: dict[str, Any] = {"init": False, "environment": variables, "fresh": True}
    outcomes = rank_outcomes(3, killed_while_connecting, transport, victim, str(tmp_path), **options)
    assert outcomes[victim].status is Status.DIED
    for rank in {0, 1, 2} - {victim}:
        words = f"cannot connect the ranks: rank {victim} " + ("(died|ended)" if victim == 0 else "died")
        assert re.search(words, outcomes[rank].value), outcomes[rank]


def told_by_a_server_that_ends(connections: int) -> str:
    """Rank 1, whose server accepts so many connections and ends."""
    server = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))

    def end() -> None:
        accepted = [server.accept()[0] for _ in range(connections)]
        for one in [server, *accepted]:
            one.close()

    threading.Thread(target=end, daemon=True).start()
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    return attempt(timeout=4)


def test_rank_0_ends_while_others_connect_to_it() -> None:
    """It is told that it ended, and not that another program has the port."""
    [message] = run_ranks(1, told_by_a_server_that_ends, 2, init=False, fresh=True)
    assert message.startswith("CommunicationError: rank 1 of 2: rank 0 ended while this rank connected"), (
        message
    )


def with_a_moved_port(moved: str) -> str:
    """As in a program that sets MASTER_PORT although torchrun has said that its agent serves the old one."""
    os.environ.update(MASTER_PORT=moved, TORCHELASTIC_USE_AGENT_STORE="True")
    return attempt()


def test_a_port_that_was_moved_after_torchrun_had_set_it() -> None:
    """Rank 0 serves where the launcher does not, and says so."""
    outcomes = rank_outcomes(2, with_a_moved_port, str(free_port()), init=False, fresh=True)
    assert [outcome.value for outcome in outcomes] == ["", ""], outcomes
    assert "rank 0 serves the rendezvous at 127.0.0.1:" in outcomes[0].output
    assert "was MASTER_ADDR or MASTER_PORT changed" in outcomes[0].output


def test_a_long_wait_says_for_whom(waiting: dict[Any, Any]) -> None:
    for outcome in waiting[with_little_patience]:
        assert "missing rank 2" in outcome.value
        assert "bmtrain: waiting for rank 2 at 127.0.0.1:" in outcome.output


def with_few_descriptors() -> str:
    if os.environ["RANK"] == "1":
        meet = shm_meeting._meet

        def meet_and_run_out(*arguments: Any) -> Any:
            peers = meet(*arguments)
            highest = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
            return peers

        shm_meeting._meet = meet_and_run_out
    return attempt()


def test_too_many_open_files() -> None:
    """All ranks name it and the rank, not that somebody hung up."""
    variables = {"BMTRAIN_CPU_TRANSPORT": "shm"}
    for message in run_ranks(3, with_few_descriptors, init=False, environment=variables, fresh=True):
        assert message.startswith("CommunicationError")
        assert "rank 1: [Errno 24] Too many open files" in message
