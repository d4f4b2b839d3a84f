"""Opening the key-value store through which ranks meet: served by rank 0, by the launcher, or a file."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from torch.distributed import FileStore, Store, TCPStore

from .._base.aside import Aside
from .._base.said import Waiting, say
from .._watch.lines import listen_everywhere
from ..errors import BMTrainError, CommunicationError
from .launch import Launch, Meeting

# How long a host name may stay unknown: cluster name services lag behind the start of the processes.
_NAME_SECONDS = 30.0

# Time without a listener at the launcher's address after which rank 0 serves it.
_LAUNCHER_SECONDS = 1.0

# The stores that this process serves, by port, kept until it ends: init_process_group of the script shares one,
# on whatever rank it is called first, and so does a second init_distributed after one that failed.
_served: dict[int, Store] = {}


def server_of(launch: Launch) -> str:
    """Names the process that serves the rendezvous."""
    return "the launcher" if launch.meeting.served else "rank 0"


def loopback_hint(launch: Launch) -> str:
    """The remedy where ranks of several hosts are to meet at an address that every host takes for itself, or ""."""
    meeting = launch.meeting
    several_hosts = launch.local_size not in (None, launch.world_size)
    if meeting.scheme != "tcp" or not several_hosts or _loopback_of(meeting.host) is None:
        return ""
    return (
        f" ({meeting.host} is every host itself, and this job has ranks on several: set MASTER_ADDR to an address of "
        "rank 0's host that the others reach)"
    )


def settle_server(launch: Launch) -> Launch:
    """The same launch, with rank 0 as the server if the launcher does not serve.

    torchrun declares that its agent serves MASTER_PORT. If a program has changed the variable since, nothing listens
    there, and each rank would wait for the launcher until the time-out.
    """
    meeting = launch.meeting
    if launch.rank != 0 or meeting.scheme != "tcp" or not meeting.served:
        return launch
    end = time.monotonic() + _LAUNCHER_SECONDS
    while time.monotonic() < end:
        try:
            socket.create_connection((meeting.host, meeting.port), _LAUNCHER_SECONDS).close()
            return launch
        except ConnectionRefusedError:
            time.sleep(0.1)
        except (OSError, UnicodeError):
            return launch  # the ordinary attempts report the error
    say(
        f"bmtrain: rank 0 serves the rendezvous at {meeting}: no process does there, although torchrun's variables say "
        "that its agent would (was MASTER_ADDR or MASTER_PORT changed after the start?)"
    )
    return replace(launch, meeting=replace(meeting, served=False))


def open_store(launch: Launch, timeout: float) -> Store:
    """The store of the meeting place, once it can be used."""
    return _Opening(launch, timeout).open()


class _Opening:
    def __init__(self, launch: Launch, timeout: float) -> None:
        self._launch = launch
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._who = f"rank {launch.rank} of {launch.world_size}"

    def open(self) -> Store:
        meeting = self._launch.meeting
        if meeting.scheme == "file":
            return self._open_file(meeting)
        if self._launch.serves:
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
        store = FileStore(meeting.path, self._launch.world_size)  # whose last user removes the file
        store.set_timeout(self._remaining())
        return store

    def _serve(self, meeting: Meeting) -> Store:
        """Serves the store from this process, or shares the one that it serves on this port already.

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
            return _listen_on(meeting.host, meeting.port, self._launch.local_size == self._launch.world_size)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise CommunicationError(
                f"{self._who}: cannot serve the rendezvous at {meeting}: expected port {meeting.port} to be "
                f"free on this host, got {reason!r}: set MASTER_PORT to a free port"
            ) from None

    def _await_server(self, meeting: Meeting, deadline: float) -> None:
        """Returns when a server accepts connections at the address.

        The attempts are made here because the store's own would write a warning for each one that fails.
        """
        start, pause = time.monotonic(), 0.02
        waiting = self._waiting("server")
        while True:
            try:
                wait = min(5.0, max(deadline - time.monotonic(), 0.1))
                socket.create_connection((meeting.host, meeting.port), wait).close()
                return
            except (OSError, UnicodeError) as error:
                now = time.monotonic()
                unknown = isinstance(error, (socket.gaierror, UnicodeError))
                refused_itself = self._launch.serves and not unknown
                if now > deadline or (unknown and now > start + _NAME_SECONDS) or refused_itself:
                    raise CommunicationError(self._unreachable(meeting, error)) from None
                if waiting.is_due():
                    waiting.report(
                        f"{server_of(self._launch)}, which is to serve the rendezvous at {meeting}"
                        f"{loopback_hint(self._launch)}"
                    )
            time.sleep(min(pause, max(deadline - now, 0.0) + 0.01))
            pause = min(pause * 1.5, 0.5)

    def _unreachable(self, meeting: Meeting, error: Exception) -> str:
        reason = first_line(error)
        if isinstance(error, (socket.gaierror, UnicodeError)):
            return (
                f"{self._who}: expected the address of a host in MASTER_ADDR or init_method, got "
                f"{meeting.host!r}, which no name service knows ({reason})"
            )
        if self._launch.serves:
            return (
                f"{self._who} serves port {meeting.port} on {socket.gethostname()}, but {meeting} does not "
                f"lead there ({reason}): MASTER_ADDR must be an address of the host of rank 0"
            )
        return (
            f"{self._who}: no answer at {meeting} after {self._timeout:g} s ({reason}): expected "
            f"{server_of(self._launch)} there; see whether it runs and whether MASTER_ADDR and MASTER_PORT are right"
            f"{loopback_hint(self._launch)}"
        )

    def _connect(self, connect: Callable[[], Store]) -> Store:
        meeting = self._launch.meeting
        waiting = self._waiting("answer")
        try:
            return _within(self._remaining().total_seconds(), connect, waiting, f"an answer from {meeting}")
        except (RuntimeError, ValueError, TimeoutError) as error:
            if not self._launch.serves and _refuses(meeting):
                raise CommunicationError(
                    f"{self._who}: {server_of(self._launch)} ended while this rank connected to the rendezvous that it "
                    f"serves at {meeting}: look for its error ({first_line(error)})"
                ) from None
            raise CommunicationError(
                f"{self._who}: expected the rendezvous store at {meeting}, got something that accepts "
                f"connections but does not answer as one ({first_line(error)}): another program may be "
                "using the port"
            ) from None

    def _remaining(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 1.0))

    def _waiting(self, what: str) -> Waiting:
        return Waiting(f"{what}-{self._launch.meeting.port}-{self._launch.job}")


def _refuses(meeting: Meeting) -> bool:
    """Whether the address refuses connections."""
    try:
        socket.create_connection((meeting.host, meeting.port), 1.0).close()
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):
        return False
    return False


_T = TypeVar("_T")


def _within(seconds: float, call: Callable[[], _T], waiting: Waiting, whom: str) -> _T:
    """Runs ``call`` and returns its result; TimeoutError if it takes longer.

    The store's constructor waits without limit for a server that accepts connections and never answers.
    """
    aside = Aside(call, "bmtrain-rendezvous")
    end = time.monotonic() + seconds
    while not aside.wait(max(0.0, min(1.0, end - time.monotonic()))):
        if time.monotonic() >= end:
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        if waiting.is_due():
            waiting.report(whom)
    return aside.result()


def _listen_on(host: str, port: int, one_host: bool) -> socket.socket:
    """Listens on ``host`` if it is an address of this host, or a name of this host alone.

    A name may lead to another interface elsewhere, and to two addresses (of both versions of IP) here; an address
    may be one that only a router in between knows. Then it listens on every interface.
    """
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address((_loopback_of(host) or host) if one_host else host)
        try:
            return socket.create_server(
                (str(address), port), family=socket.AF_INET6 if address.version == 6 else socket.AF_INET
            )
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return listen_everywhere(port)


def _loopback_of(host: str) -> str | None:
    """The address of a name that only resolves to this host itself (``localhost``); None for other names."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return None
    if not all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        return None
    return min(found, key=lambda address: ":" in address)  # every client also tries that of version 4


def _listens_on(port: int) -> bool:
    """Whether this process listens on ``port`` already; False where /proc is not available."""
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
    """The targets of this process's file descriptors."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone by now
            yield os.readlink(f"/proc/self/fd/{name}")


def _use_libuv() -> bool:
    return os.environ.get("USE_LIBUV", "1") == "1"


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its class if the text is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
