"""Opening the key-value store through which ranks meet: served by rank 0, by the launcher, or a file."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from torch.distributed import FileStore, Store, TCPStore

from ._aside import Aside
from ._launch import Launch, Meeting
from .errors import BMTrainError, CommunicationError

__all__ = ["first_line", "open_store"]

# How long a host name may stay unknown: cluster name services lag behind the start of the processes.
_NAME_SECONDS = 30.0

# The stores that this process serves, by port, kept until it ends: init_process_group of the script shares one,
# on whatever rank it is called first, and so does a second init_distributed after one that failed.
_served: dict[int, Store] = {}


def open_store(launch: Launch, timeout: float) -> Store:
    """The store of the meeting place, once it can be used.

    Args:
        launch: this process's place and the meeting's address.
        timeout: seconds.

    Raises:
        CommunicationError: nobody answers at the address, or it cannot be served.
        BMTrainError: the file's folder cannot be written.
    """
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
            return _listen_on(meeting.host, meeting.port)
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
                refused_itself = self._launch.serves and not unknown
                if now > deadline or (unknown and now > start + _NAME_SECONDS) or refused_itself:
                    raise CommunicationError(self._unreachable(meeting, error)) from None
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
                f"connections but does not answer as one ({first_line(error)}): another program may be "
                "using the port"
            ) from None

    def _remaining(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 1.0))


_T = TypeVar("_T")


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """Run ``call`` and return its result; TimeoutError if it takes longer.

    The store's constructor waits without limit for a server that accepts connections and never answers.
    """
    aside = Aside(call, "bmtrain-rendezvous")
    if not aside.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return aside.result()


def _listen_on(host: str, port: int) -> socket.socket:
    """Listen where ``host`` says, if it is an address of this host and not a name.

    A name may lead to another interface elsewhere, and to two addresses (of both versions of IP) here; an address
    may be one that only a router in between knows. Then every interface has to do.
    """
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        try:
            return socket.create_server(
                (host, port), family=socket.AF_INET6 if address.version == 6 else socket.AF_INET
            )
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port))


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


def first_line(error: BaseException) -> str:
    """Of what an error says; its kind if that is nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
