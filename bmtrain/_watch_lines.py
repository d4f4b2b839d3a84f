"""What the watchdogs of a job talk through: messages in JSON, one a line, and how a rank knows that nobody answers.

[Note: Who is silent at the time-out]
Nothing tells a rank that is stopped, or out of reach, from one that computes, but that its watchdog does not answer. So
the ranks that will soon be late ask for the others again and again, and by the time-out it is known who has been silent
for too long: nobody has to be waited for then. Who was heard of since has a moment to tell what he is doing; if he does
not, the answer before counts. All times follow from the time-out, so that a verdict is told within two seconds of it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["HubLine", "Lines", "Message", "Patience", "listen"]

_SEND_SECONDS = 0.5
_BACKLOG = 4096  # all ranks of a job connect at about the same time

Message = dict[str, Any]


@dataclass(frozen=True)
class Patience:
    """How long watchdogs wait for each other, in seconds. See [Note: Who is silent at the time-out].

    Attributes:
        calm: an operation that lasts longer makes its rank ask whether all are still there.
        period: the time between two such questions.
        silence: who has not answered one for so long is silent.
    """

    calm: float
    period: float
    silence: float

    @classmethod
    def of(cls, timeout: float) -> Patience:
        """What fits a time-out.

        Example:
            >>> Patience.of(600.0)
            Patience(calm=593.0, period=1.0, silence=4.2)
        """
        alert = min(7.0, 0.8 * timeout)
        return cls(calm=timeout - alert, period=alert / 7, silence=alert * 3 / 5)


def listen(host: str, several_hosts: bool) -> tuple[socket.socket, str]:
    """Open a port on the interface that the launcher named; returns it with the address for the other ranks.

    Args:
        host: name or address of this host.
        several_hosts: whether ranks on other hosts have to reach it.
    """
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        number = str(address[0])
        if not several_hosts:
            return socket.create_server((number, 0), family=family, backlog=_BACKLOG), number
        if not number.startswith("127."):  # else a name that leads here only on this host
            return socket.create_server((number, 0), family=family, backlog=_BACKLOG), host
    return socket.create_server(("", 0), backlog=_BACKLOG), host


class Lines:
    """A connection that carries messages."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._rest = b""

    def send(self, message: Message) -> bool:
        """Whether the other side still takes messages."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """The messages that have come; None when the other side is gone."""
        try:
            data = self.connection.recv(1 << 20)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole]

    def close(self) -> None:
        """Close it on this side."""
        self.connection.close()


class HubLine:
    """A rank's connection to the hub, and what it knows of the hub when that is silent.

    Args:
        lines: the connection; the hub has let this rank in.
        neighbours: the ranks on the hub's host.
        patience: how long the hub may be silent.
    """

    def __init__(self, lines: Lines, neighbours: Sequence[int], patience: Patience) -> None:
        self.lines = lines
        self._neighbours = neighbours
        self._silence = patience.silence
        self._unheard: float | None = None  # since when a question is not answered
        self._probe: socket.socket | None = None

    def send(self, message: Message) -> None:
        """Tell the hub something."""
        self.lines.send(message)

    def ask(self, message: Message) -> None:
        """Tell the hub something that it answers."""
        if self._unheard is None:
            self._unheard = time.monotonic()
        self.lines.send(message)

    def receive(self) -> list[Message] | None:
        """The messages that have come; None when the hub is gone."""
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
        """While the hub is silent, find out whether its host is in reach: that would take a connection."""
        if self._probe is not None or self.unheard_for() < self._silence / 2:
            return
        self._probe = socket.socket(self.lines.connection.family, socket.SOCK_STREAM)
        self._probe.setblocking(False)
        with contextlib.suppress(OSError):
            self._probe.connect_ex(self.lines.connection.getpeername())

    def out_of_reach(self) -> list[int]:
        """The ranks that this silence is about: all on the hub's host, if that does not take a connection either."""
        if self._probe is None:
            return [0]
        try:
            self._probe.getpeername()
        except OSError:
            return list(self._neighbours)
        return [0]

    def close(self) -> None:
        """Close it on this side."""
        self.lines.close()
        self._end_probe()

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None
