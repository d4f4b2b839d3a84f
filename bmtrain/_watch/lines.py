"""The connections between the watchdogs of a job: messages in JSON, one a line, and detection of a silent peer.

[Note: Silent ranks at the time-out]
A rank that is stopped or unreachable differs from one that computes only in that its watchdog does not answer. So ranks
in an operation that approaches the time-out ask for the others repeatedly, and at the time-out the silent ranks are
known without further waiting. A rank that has answered since has a moment to report its state; if it does not, its last
answer counts. All intervals derive from the time-out, so that a verdict is sent within two seconds of it, or, if the
hub has stopped shortly before, found when it has been silent for as long as any other rank.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SEND_SECONDS = 0.5
_BACKLOG = 4096  # all ranks of a job connect at about the same time

Message = dict[str, Any]


@dataclass(frozen=True)
class Patience:
    """Waiting times of watchdogs for each other, in seconds. See [Note: Silent ranks at the time-out].

    Attributes:
        calm: an operation that lasts longer makes its rank ask whether all ranks are alive.
        period: the time between two such questions.
        silence: a rank without an answer for so long is silent.
    """

    calm: float
    period: float
    silence: float

    @classmethod
    def of(cls, timeout: float) -> Patience:
        """The waiting times for a time-out.

        Example:
            >>> Patience.of(600.0)
            Patience(calm=593.0, period=1.0, silence=4.2)
        """
        alert = min(7.0, 0.8 * timeout)
        return cls(calm=timeout - alert, period=alert / 7, silence=alert * 3 / 5)


def listen(host: str, several_hosts: bool) -> tuple[socket.socket, str]:
    """Opens a port on the interface that the launcher named ``host``; returns it with its address."""
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        number = str(address[0])
        if not several_hosts:
            return socket.create_server((number, 0), family=family, backlog=_BACKLOG), number
        if not ipaddress.ip_address(
            number.partition("%")[0]
        ).is_loopback:  # a loopback address is reachable only from this host
            return socket.create_server((number, 0), family=family, backlog=_BACKLOG), host
    return listen_everywhere(0), host


def listen_everywhere(port: int) -> socket.socket:
    """Listens on every interface, in both versions of IP where the host has them; port 0 is any that is free."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def listen_beside(listener: socket.socket) -> socket.socket:
    """Listens on a second port of the interface of ``listener``."""
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    if address.is_unspecified:
        return listen_everywhere(0)
    return socket.create_server((listener.getsockname()[0], 0), family=listener.family, backlog=_BACKLOG)


class Lines:
    """A connection that carries messages, of which a line may have ``longest`` bytes."""

    def __init__(self, connection: socket.socket, longest: int | None = None) -> None:
        self.longest = longest
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._rest = b""

    def send(self, message: Message) -> bool:
        """Sends a message; returns whether the peer still accepts messages."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Returns the received messages; None when the peer has closed the connection.

        Raises:
            ValueError: the received bytes are no message.
        """
        try:
            data = self.connection.recv(1 << 20)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        if self.longest is not None and max(map(len, (*whole, self._rest))) > self.longest:
            raise ValueError(f"a line of more than {self.longest} bytes")
        try:
            return [json.loads(line) for line in whole]
        except RecursionError:
            raise ValueError("a message that is nested too deeply") from None

    def close(self) -> None:
        """Closes it on this side."""
        self.connection.close()


class HubLine:
    """A rank's connection to the hub, which may be silent; ``neighbours`` are the ranks on the hub's host."""

    def __init__(self, lines: Lines, neighbours: Sequence[int], patience: Patience) -> None:
        self.lines = lines
        self._neighbours = neighbours
        self._silence = patience.silence
        self._unheard: float | None = None  # time of the first unanswered question
        self._probe: socket.socket | None = None

    def send(self, message: Message) -> None:
        """Sends a message to the hub."""
        self.lines.send(message)

    def ask(self, message: Message) -> None:
        """Sends a message that the hub answers."""
        if self._unheard is None:
            self._unheard = time.monotonic()
        self.lines.send(message)

    def receive(self) -> list[Message] | None:
        """Returns the received messages; None when the hub has closed the connection."""
        try:
            messages = self.lines.receive()
        except ValueError:
            return None
        if messages:
            self._unheard = None
            self._end_probe()
        return messages

    def unheard_for(self) -> float:
        """Seconds since the first question that the hub has not answered; 0 if it has answered all."""
        return 0.0 if self._unheard is None else time.monotonic() - self._unheard

    def probe(self) -> None:
        """While the hub is silent, checks whether its host still accepts connections."""
        if self._probe is not None or self.unheard_for() < self._silence / 2:
            return
        self._probe = socket.socket(self.lines.connection.family, socket.SOCK_STREAM)
        self._probe.setblocking(False)
        with contextlib.suppress(OSError):
            self._probe.connect_ex(self.lines.connection.getpeername())

    def out_of_reach(self) -> list[int]:
        """The silent ranks: all on the hub's host if the host accepts no connection either, else rank 0."""
        if self._probe is None:
            return [0]
        try:
            self._probe.getpeername()
        except OSError:
            return list(self._neighbours)
        return [0]

    def close(self) -> None:
        """Closes it on this side."""
        self.lines.close()
        self._end_probe()

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None
