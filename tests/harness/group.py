"""Groups of ranks: how they are forked, called, watched and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .outcome import Outcome, Status
from .worker import Call, Raised, Returned, Setup, compiled

__all__ = ["TIMEOUT", "Group", "Program", "close_servers", "free_port", "server_for"]

_TESTS = Path(__file__).resolve().parents[1]
TIMEOUT = 120.0  # seconds that a call may take, unless it says otherwise: many times what any takes alone
_GRACE = 3.0  # seconds for the other ranks, once one has failed to initialise
_START_TIMEOUT = 240.0  # of the server: importing torch on a loaded machine
_STOP_TIMEOUT = 15.0  # of ranks that are told to end


class _Server:
    """A process from which ranks are forked.

    Args:
        allocator: variables that the C library reads when it starts.
        preload: modules that the ranks find imported, beside those that all tests use.
    """

    def __init__(self, allocator: Mapping[str, str], preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        here = str(Path(__file__).parent.parent)
        command = f"import sys; sys.path.insert(0, {here!r}); from harness.worker import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", command, str(theirs.fileno()), str(os.getpid()), *preload],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                **limits,
                **allocator,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        theirs.close()
        self._turn = threading.Lock()  # a request and its answer belong together
        self.control = ours
        ours.settimeout(_START_TIMEOUT)
        if not ours.recv(16):
            raise RuntimeError(
                f"the fork server ended with status {self.process.wait()}; its output is above"
            )

    def fork(self, logs: list[str], stacks: list[str]) -> tuple[list[int], list[Connection]]:
        pairs = [socket.socketpair() for _ in logs]
        request = _encode({"do": "fork", "logs": logs, "stacks": stacks})
        pids = self._ask(request, [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        return pids, [Connection(ours.detach()) for ours, _ in pairs]

    def start(self, code: str, environment: Mapping[str, str], streams: Sequence[int]) -> int:
        request = {"do": "run", "code": code, "environment": dict(environment)}
        [pid] = self._ask(_encode(request), streams)
        return int(pid)

    def reap(self, pids: list[int]) -> list[int | None]:
        codes: list[int | None] = self._ask(_encode({"do": "reap", "pids": pids}))
        return codes

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> Any:
        with self._turn:
            socket.send_fds(self.control, [request], list(descriptors))
            answer = self.control.recv(1 << 20)
        if not answer:
            raise RuntimeError(
                f"the fork server ended with status {self.process.wait()}; its output is above"
            )
        return json.loads(answer)

    def close(self) -> None:
        self.control.close()
        self.process.wait(60)


_running: dict[Any, _Server] = {}  # by what the allocator was told, and what is preloaded


def server_for(environment: Mapping[str, str], preload: Sequence[str]) -> _Server:
    """The server of ranks with this environment and these modules; starts it at the first call."""
    allocator = {name: value for name, value in environment.items() if name.startswith("MALLOC_")}
    key = frozenset(allocator.items()), tuple(preload)
    if key not in _running:
        _running[key] = _Server(allocator, preload)
    return _running[key]


def close_servers() -> None:
    """End the fork servers; all groups have been closed, and nobody asks for a port any more."""
    while _running:
        _running.popitem()[1].close()
    while _marks:
        _marks.popleft().close()


def _encode(request: dict[str, Any]) -> bytes:
    return json.dumps(request).encode()


def free_port() -> int:
    """A TCP port nobody listens on, outside the range from which the system gives ports to clients.

    It is this process's until 64 others were asked for: another run of tests on this machine does not get it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket() as probe, contextlib.suppress(OSError):
            mark.bind(f"\0bmtrain-tests-port-{port}")
            probe.bind(("", port))
            _marks.append(mark)
            if len(_marks) > 64:
                _marks.popleft().close()
            return port
        mark.close()


_marks: deque[socket.socket] = deque()


class Program:
    """What ``python -c CODE`` starts, forked instead, without the seconds in which torch is imported.

    Args:
        environment: all variables that it has.
        streams: descriptors of its standard input, output and errors, which stay open here.
    """

    def __init__(self, code: str, environment: Mapping[str, str], streams: Sequence[int]) -> None:
        self._server = server_for(environment, ())
        self.pid = self._server.start(code, environment, streams)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            [self.returncode] = self._server.reap([self.pid])
        return self.returncode

    def wait(self, timeout: float = TIMEOUT) -> int:
        """The exit status; raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["python", "-c"], timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """A signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)
        self.wait()


def _rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher on one host would set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class Group:
    """`world` ranks that were initialised together. `usable` until something goes wrong on one of them."""

    def __init__(
        self,
        world: int,
        init: dict[str, Any] | None,
        environment: dict[str, str],
        cuda: bool,
        brief: bool = False,
        preload: Sequence[str] = (),
    ) -> None:
        self.world = world
        # Without a name in any folder: a killed run leaves nothing.
        self._files = [tempfile.TemporaryFile() for _ in range(2 * world)]  # noqa: SIM115
        paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files]
        self._logs, self._stacks = paths[:world], paths[world:]
        self._read = [0] * world
        self._codes: list[int | None] = [None] * world
        self._modules: set[str] = set()  # that the ranks have been given
        self._server = server_for(environment, preload)
        self.pids, self._connections = self._server.fork(self._logs, self._stacks)
        self.usable = True
        self.outcomes: list[Outcome] = []
        port = free_port()
        for rank, connection in enumerate(self._connections):
            variables = {**_rank_environment(rank, world, port), **environment}
            if not cuda:
                variables["CUDA_VISIBLE_DEVICES"] = ""
            setup = Setup([path for path in sys.path if path], {**os.environ, **variables}, init, brief)
            connection.send_bytes(pickle.dumps(setup))
        self.outcomes = self._collect(TIMEOUT, _GRACE)

    def call(self, call: Call, timeout: float, grace: float | None) -> list[Outcome]:
        if (
            call.file is not None
            and call.module not in self._modules
            and Path(call.file).is_relative_to(_TESTS)
        ):
            call = dataclasses.replace(call, code=compiled(call.file))
        self._modules.add(call.module)
        message = pickle.dumps(call)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a rank that died between calls is found by _collect
                connection.send_bytes(message)
        return self._collect(timeout, grace)

    def _collect(self, timeout: float, grace: float | None) -> list[Outcome]:
        """Wait for every rank's answer until the limit. Unless all have returned, none is left alive."""
        started = time.monotonic()
        deadline = started + timeout
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        found: dict[int, Outcome] = {}
        while waiting and time.monotonic() < deadline:
            for connection in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                found[rank] = self._receive(rank, time.monotonic() - started)
                if found[rank].status is not Status.RETURNED and grace is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        for rank, stacks in self._dump_stacks(sorted(waiting.values())):
            seconds = time.monotonic() - started
            found[rank] = Outcome(rank, Status.HUNG, detail=stacks, seconds=seconds)
        outcomes = [found[rank] for rank in range(self.world)]
        for outcome in outcomes:
            outcome.output = self._new_output(outcome.rank)
        if any(outcome.status is not Status.RETURNED for outcome in outcomes):
            self.kill()
        return outcomes

    def _receive(self, rank: int, seconds: float) -> Outcome:
        try:
            answer: Returned | Raised = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            return Outcome(rank, Status.DIED, exitcode=self._exitcode(rank), seconds=seconds)
        if isinstance(answer, Returned):
            return Outcome(rank, Status.RETURNED, pickle.loads(answer.value), seconds=answer.seconds)
        return Outcome(
            rank,
            Status.RAISED,
            error=answer.type_name,
            message=answer.message,
            mro=answer.mro,
            detail=answer.traceback,
            seconds=answer.seconds,
        )

    def _exitcode(self, rank: int) -> int | None:
        for _ in range(200):  # its connection closes a moment before the process can be reaped
            if self._reap([rank]):
                break
            time.sleep(0.01)
        return self._codes[rank]

    def _reap(self, ranks: list[int]) -> bool:
        """Ask how these ranks ended; True if all of them have."""
        unknown = [rank for rank in ranks if self._codes[rank] is None]
        if unknown:
            for rank, code in zip(
                unknown, self._server.reap([self.pids[rank] for rank in unknown]), strict=True
            ):
                self._codes[rank] = code
        return all(self._codes[rank] is not None for rank in ranks)

    def _dump_stacks(self, ranks: list[int]) -> Iterator[tuple[int, str]]:
        """Every Python thread's stack of each rank, printed by a signal handler in the rank itself."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        for rank in ranks:
            yield rank, Path(self._stacks[rank]).read_text(errors="replace")

    def _new_output(self, rank: int) -> str:
        with open(self._logs[rank], "rb") as log:
            log.seek(self._read[rank])
            text = log.read()
        self._read[rank] += len(text)
        return text.decode(errors="replace")

    def close(self, brief: bool = False) -> str:
        """Let the ranks end by themselves. Returns what went wrong if one would not, or not with status 0.

        With ``brief`` they leave torch as it is, which takes a tenth of the time.
        """
        self.usable = False
        for connection in self._connections:
            if brief:
                with contextlib.suppress(OSError):
                    connection.send_bytes(b"")
            connection.close()
        deadline = time.monotonic() + _STOP_TIMEOUT
        while not self._reap(list(range(self.world))) and time.monotonic() < deadline:
            time.sleep(0.01)
        hung = [rank for rank, code in enumerate(self._codes) if code is None]
        problems = [
            f"rank {rank} hung at exit; its stacks:\n{stacks}" for rank, stacks in self._dump_stacks(hung)
        ]
        for rank, code in enumerate(self._codes):
            if code:
                problems.append(
                    f"rank {rank} ended with exit status {code} and printed\n{self._new_output(rank)}"
                )
        self.kill()
        return "\n".join(problems)

    def kill(self) -> None:
        """End the ranks and whatever they started (each leads its own process group)."""
        self.usable = False
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for connection in self._connections:
            connection.close()
        for rank in range(self.world):
            self._exitcode(rank)
        for file in self._files:
            file.close()
