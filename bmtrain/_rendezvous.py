"""How ranks find each other: one key-value store, one count of who is there, one verdict for all.

[Note: One verdict]
Every rank writes what it was started with and counts itself in. The last one to arrive publishes the table
of all ranks as the verdict; whoever finds something wrong first (a second process with its rank, other
sizes than the rest, ranks still missing at the deadline) publishes that instead. All ranks act on the one
verdict, so that all of them succeed or all of them raise the same sentence.

After `init_distributed` nobody uses the store again: the ranks that are still working do not notice when
the process that serves it ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from ._launch import Launch, Meeting
from .errors import BMTrainError, CommunicationError

__all__ = ["Peer", "Rendezvous"]

# How long a host name may stay unknown: cluster name services lag behind the start of the processes.
_NAME_SECONDS = 30.0
# How long the rank that serves the store stays, after an error, for the others to read it.
_LINGER_SECONDS = 5.0


@dataclass(frozen=True)
class Peer:
    """What one rank tells all others at the start.

    Attributes:
        rank: its number.
        host: identity of its machine.
        pid: its process, for messages.
        local_rank: its number on the machine; None if its launcher did not say.
        cpus: the processors it may run on.
        num_gpus: cards it can use.
        seed: the seed that it was given.
    """

    rank: int
    host: str
    pid: int
    local_rank: int | None
    cpus: str
    num_gpus: int
    seed: int


# The stores that this process serves, by port, kept until it ends: init_process_group of the script shares one,
# on whatever rank it is called first, and so does a second init_distributed after one that failed.
_served: dict[int, Store] = {}


class Rendezvous:
    """The meeting of the ranks of one job, from opening the store to the verdict.

    Args:
        launch: this process's place and the meeting's address.
        timeout: seconds for every step.
        attempt: number of this call of `init_distributed` in this process, the same on every rank.

    Raises:
        CommunicationError: nobody answers at the address, or it cannot be served.
    """

    def __init__(self, launch: Launch, timeout: float, attempt: int) -> None:
        self._launch = launch
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._who = f"rank {launch.rank} of {launch.world_size}"
        self._serves = launch.meeting.scheme == "tcp" and launch.rank == 0 and not launch.meeting.served
        root = self._open()
        self._refuse_other_job(root)
        self.store: Store = PrefixStore(f"bmtrain/{launch.job}/{attempt}", root)

    def agree(self, me: Peer, settings: dict[str, Any]) -> list[Peer]:
        """Wait for every rank, check that all were started alike, and return them in rank order.

        Args:
            me: this rank.
            settings: what must be equal on all ranks, by the name a user knows it by.

        Raises:
            ValueError: two ranks differ in a setting.
            BMTrainError: two processes have the same rank.
            CommunicationError: ranks are missing at the deadline, or the store is lost.
        """
        try:
            fault = self._announce(me, settings)
            if fault is not None:
                self._publish(*fault)
            verdict = self._await_verdict()
        except RuntimeError as error:
            if isinstance(error, BMTrainError):
                raise
            raise CommunicationError(
                f"{self._who}: lost the rendezvous at {self._launch.meeting}, probably because the process "
                f"that serves it (rank 0, or the launcher) ended: look for its error ({_first_line(error)})"
            ) from None
        if verdict["error"] is None:
            if fault is not None:  # the others had agreed before this process came
                raise _ERRORS[fault[0]](fault[1])
            return [Peer(**peer) for peer in verdict["peers"]]
        self._linger()
        raise _ERRORS[verdict["error"]](verdict["message"])

    def close(self) -> None:
        """Remove what the meeting leaves behind; called when no rank needs the store any more."""
        if self._launch.meeting.scheme == "file" and self._launch.rank == 0:
            Path(self._launch.meeting.path).unlink(missing_ok=True)

    def _refuse_other_job(self, root: Store) -> None:
        """The first rank at a meeting place says whose it is; another job's would wait there in vain."""
        mine = self._launch.job.rpartition("/")[0] or "-"  # without the number of the restart
        try:
            first = root.compare_set("bmtrain/job", "", mine).decode()
        except RuntimeError as error:
            raise CommunicationError(
                f"{self._who}: lost the rendezvous at {self._launch.meeting} ({_first_line(error)})"
            ) from None
        if first != mine:
            raise BMTrainError(
                f"{self._who}: expected the ranks of job {mine!r} at {self._launch.meeting}, got those of job "
                f"{first!r}: give each job a MASTER_PORT of its own"
            )

    # The verdict, see [Note: One verdict].

    def _announce(self, me: Peer, settings: dict[str, Any]) -> tuple[str, str] | None:
        """Count this rank in; returns kind and message of what is wrong with it, if anything."""
        store, launch = self.store, self._launch
        store.add("present", 1)
        if store.add(f"claimed/{me.rank}", 1) > 1:
            other = "another job on the same port"
            if launch.meeting.scheme == "file":
                other = "a file left over from an earlier run: remove it"
            return "duplicate", (
                f"rank {me.rank} of {launch.world_size} at {launch.meeting}: expected one process with this "
                f"rank, got a second one on {socket.gethostname()}, pid {me.pid} (or {other})"
            )
        mine = {"rank": me.rank, "settings": {"world size": launch.world_size, **settings}}
        if store.add("first", 1) == 1:
            store.set("settings", json.dumps(mine))
        else:
            store.set_timeout(self._remaining())
            difference = _difference(json.loads(store.get("settings")), mine)
            if difference:
                return "value", difference
        store.set(f"peer/{me.rank}", json.dumps(asdict(me)))
        if store.add("arrived", 1) == launch.world_size:
            keys = [f"peer/{rank}" for rank in range(launch.world_size)]
            self._publish(None, "", [json.loads(store.get(key)) for key in keys])
        return None

    def _publish(self, error: str | None, message: str, peers: list[Any] | None = None) -> None:
        """Make this the verdict unless there is one."""
        if self.store.add("judged", 1) == 1:
            self.store.set("verdict", json.dumps({"error": error, "message": message, "peers": peers}))

    def _await_verdict(self) -> dict[str, Any]:
        pause = 0.005
        while not self.store.check(["verdict"]):
            if time.monotonic() > self._deadline:
                self._publish("missing", self._missing_message())
                self.store.set_timeout(timedelta(seconds=10))
                break
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        verdict: dict[str, Any] = json.loads(self.store.get("verdict"))
        return verdict

    def _missing_message(self) -> str:
        world = self._launch.world_size
        missing = [rank for rank in range(world) if not self.store.check([f"peer/{rank}"])]
        return (
            f"rendezvous at {self._launch.meeting}: expected {world} ranks within {self._timeout:g} s, got "
            f"{world - len(missing)}; missing {_ranks(missing)}: see whether they started, and whether their "
            "errors came first"
        )

    def _linger(self) -> None:
        """Stay, if the store ends with this process, until the others have read the verdict."""
        try:
            read = self.store.add("read", 1)
            end = time.monotonic() + _LINGER_SECONDS
            while self._serves and read < self.store.add("present", 0) and time.monotonic() < end:
                time.sleep(0.02)
                read = self.store.add("read", 0)
        except RuntimeError:
            return  # nobody left to wait for
        self.close()

    # The store.

    def _open(self) -> Store:
        meeting = self._launch.meeting
        if meeting.scheme == "file":
            return self._open_file(meeting)
        if self._serves:
            return self._serve(meeting)
        self._await_server(meeting, self._deadline)
        return self._connect(
            lambda: TCPStore(
                meeting.host, meeting.port, None, False, self._remaining(), False, use_libuv=_use_libuv()
            )
        )

    def _open_file(self, meeting: Meeting) -> Store:
        folder = Path(meeting.path).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise BMTrainError(
                f"init_method, {self._who}: expected a file in a folder that can be written, "
                f"got {meeting.path}"
            )
        store = FileStore(meeting.path, -1)
        store.set_timeout(self._remaining())
        return store

    def _serve(self, meeting: Meeting) -> Store:
        """Serve the store from this process, or share the one that it serves on this port already.

        The server is a multi-tenant one: a `torch.distributed.init_process_group` of the script on the same
        MASTER_PORT, before or after ours, shares it instead of finding the port taken.
        """
        descriptor = None
        if meeting.port not in _served and not _listens_on(meeting.port):
            descriptor = self._listen(meeting).detach()
        try:
            self._await_server(meeting, min(self._deadline, time.monotonic() + _NAME_SECONDS))
        except CommunicationError:
            if descriptor is not None:
                os.close(descriptor)
            raise
        store = self._connect(
            lambda: TCPStore(
                meeting.host,
                meeting.port,
                None,
                True,
                self._remaining(),
                False,
                multi_tenant=True,
                master_listen_fd=descriptor,
                use_libuv=_use_libuv(),
            )
        )
        _served.setdefault(meeting.port, store)
        return store

    def _listen(self, meeting: Meeting) -> socket.socket:
        try:
            if socket.has_dualstack_ipv6():
                try:
                    return socket.create_server(
                        ("", meeting.port), family=socket.AF_INET6, dualstack_ipv6=True
                    )
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        raise
            return socket.create_server(("", meeting.port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise CommunicationError(
                f"{self._who}: cannot serve the rendezvous at {meeting}: expected port {meeting.port} to be "
                f"free on this host, got {reason!r}: set MASTER_PORT to a free port"
            ) from None

    def _await_server(self, meeting: Meeting, deadline: float) -> None:
        """Return when something accepts connections at the address.

        The attempts are made here because the store's own would write a warning for each one that fails.
        """
        start, pause = time.monotonic(), 0.02
        while True:
            try:
                wait = min(5.0, max(deadline - time.monotonic(), 0.1))
                socket.create_connection((meeting.host, meeting.port), wait).close()
                return
            except (OSError, UnicodeError) as error:
                now = time.monotonic()
                unknown = isinstance(error, (socket.gaierror, UnicodeError))
                refused_itself = self._serves and not unknown
                if now > deadline or (unknown and now > start + _NAME_SECONDS) or refused_itself:
                    raise CommunicationError(self._unreachable(meeting, error)) from None
            time.sleep(min(pause, max(deadline - now, 0.0) + 0.01))
            pause = min(pause * 1.5, 0.5)

    def _unreachable(self, meeting: Meeting, error: Exception) -> str:
        reason = _first_line(error)
        if isinstance(error, (socket.gaierror, UnicodeError)):
            return (
                f"{self._who}: expected the address of a host in MASTER_ADDR or init_method, got "
                f"{meeting.host!r}, which no name service knows ({reason})"
            )
        if self._serves:
            return (
                f"{self._who} serves port {meeting.port} on {socket.gethostname()}, but {meeting} does not "
                f"lead there ({reason}): MASTER_ADDR must be an address of the host of rank 0"
            )
        server = "the launcher" if meeting.served else "rank 0"
        return (
            f"{self._who}: nobody answers at {meeting} after {self._timeout:g} s ({reason}): expected "
            f"{server} there; see whether it runs and whether MASTER_ADDR and MASTER_PORT are right"
        )

    def _connect(self, connect: Callable[[], Store]) -> Store:
        meeting = self._launch.meeting
        try:
            return _within(self._remaining().total_seconds(), connect)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise CommunicationError(
                f"{self._who}: expected the rendezvous store at {meeting}, got something that accepts "
                f"connections but does not answer as one ({_first_line(error)}): another program may be "
                "using the port"
            ) from None

    def _remaining(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 1.0))


_ERRORS: dict[str, type[Exception]] = {
    "value": ValueError,
    "duplicate": BMTrainError,
    "missing": CommunicationError,
}

_T = TypeVar("_T")


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """Run ``call`` and return its result; TimeoutError if it takes longer.

    The store's constructor waits without limit for a server that accepts connections and never answers. It
    runs in a daemon thread, which then stays behind, asleep.
    """
    result: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=run, name="bmtrain-rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return result[0]


def _listens_on(port: int) -> bool:
    """Whether this very process listens on ``port`` already; False where /proc does not tell."""
    listening = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            next(lines)
            for line in lines:
                # slot, local address:port, remote one, state (0A: listening), queues, timer, retransmits, uid,
                # timeout, inode, ...; numbers but the last are hexadecimal
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    listening.add(f"socket:[{fields[9]}]")
    return not listening.isdisjoint(_open_files()) if listening else False


def _open_files() -> Iterator[str]:
    """What this process's file descriptors refer to."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone by now
            yield os.readlink(f"/proc/self/fd/{name}")


def _use_libuv() -> bool:
    return os.environ.get("USE_LIBUV", "1") == "1"


def _difference(first: dict[str, Any], mine: dict[str, Any]) -> str | None:
    """One sentence about the first setting in which two ranks differ."""
    for name, value in mine["settings"].items():
        expected = first["settings"].get(name)
        if expected != value:
            return (
                f"{name}: expected the same on every rank, got {expected!r} on rank {first['rank']} and "
                f"{value!r} on rank {mine['rank']}"
            )
    return None


def _ranks(ranks: list[int]) -> str:
    """For example ``rank 3`` or ``ranks 1, 4-7``.

    >>> _ranks([3]), _ranks([1, 4, 5, 6, 7])
    ('rank 3', 'ranks 1, 4-7')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
