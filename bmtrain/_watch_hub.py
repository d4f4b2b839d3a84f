"""Where the ranks' watchdogs meet: rank 0 collects what they know when something fails, and tells all the verdict.

Messages are JSON, one a line. A rank's connection lives as long as its process, so that its end is noticed at once;
a rank that ends in good order says so first. See `bmtrain/_watchdog.py` for the other side.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _blame

__all__ = ["Hub", "Lines", "listen"]

# How long ranks have to say what they are doing. Who does not answer at a time-out is accused of it, so that they
# have more time then. It counts from the first question that a rank has not answered: the ranks that will soon be late
# have it asked some seconds before, so that a rank that is silent is known at the time-out.
_ANSWER_SECONDS = 1.4
_LATE_ANSWER_SECONDS = 5.0
_ASK_AGAIN_SECONDS = 1.0  # all ranks of a job are late at about the same time; each is answered
_SEND_SECONDS = 0.5

Message = dict[str, Any]


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
            return socket.create_server((number, 0), family=family), number
        if not number.startswith("127."):  # else a name that leads here only on this host
            return socket.create_server((number, 0), family=family), host
    return socket.create_server(("", 0)), host


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


class _Case:
    """One failure, and what the ranks have answered.

    Args:
        failure: what was handed in first.
        prints: of a mismatch, the fingerprints by rank; those of the other ranks are on their way.
    """

    def __init__(self, failure: Message, prints: Mapping[int, Message] | None) -> None:
        self.failure = failure
        self.prints = prints
        self.states: dict[int, Message] = {}
        self.is_suspicion = failure["kind"] == "suspicion"
        self.is_late = failure["kind"] == "late"
        self.opened = time.monotonic()


class Hub:
    """The hub of a job, driven by the thread of rank 0's watchdog.

    Args:
        selector: of that thread; a key's data is what to call when it is readable.
        listener: where the other ranks connect.
        world: number of ranks.
        secret: what a rank must know to be let in.
        local: takes the messages for rank 0.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        world: int,
        secret: str,
        local: Callable[[Message], None],
    ) -> None:
        self._selector = selector
        self._listener = listener
        self._world = world
        self._secret = secret
        self._local = local
        self._ranks: dict[int, Lines] = {}
        self._strangers: set[Lines] = set()
        self._absent: dict[int, str] = {}
        self._leaving: set[int] = set()
        self._unanswered: dict[int, float] = {}  # ranks that were asked, and when they were first
        self._asked = -math.inf  # when everybody was
        self._case: _Case | None = None
        self._verdict: Message | None = None
        self._prints: dict[tuple[str, int], dict[int, Message]] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def deadline(self) -> float | None:
        """When `tick` has to be called, on the monotonic clock."""
        case = self._case
        if case is None or self._verdict is not None:
            return None
        if not case.is_late:
            return case.opened + _ANSWER_SECONDS
        waits = [since for rank, since in self._unanswered.items() if rank not in self._absent]
        return max(waits, default=case.opened) + _LATE_ANSWER_SECONDS

    def tick(self) -> None:
        """Decide, if the time for answers is over."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._conclude()

    def handle(self, rank: int, message: Message) -> None:
        """Act on a message of a rank."""
        if message["do"] == "fail":
            self._open_case(message["failure"], rank)
        elif message["do"] == "worry":
            recently = time.monotonic() < self._asked + _ASK_AGAIN_SECONDS
            self._ask([rank] if recently else range(self._world))
        elif message["do"] == "state":
            self._unanswered.pop(rank, None)
            if self._case is not None and self._verdict is None:
                self._case.states[rank] = message["state"]
                self._conclude_if_complete()
        elif message["do"] == "check":
            self._compare(rank, message["print"])
        elif message["do"] == "bye":
            self._leaving.add(rank)

    def close(self) -> None:
        """Tell everybody that the job goes on without a hub."""
        for line in self._ranks.values():
            line.send({"do": "closing"})
        for line in [*self._ranks.values(), *self._strangers]:
            line.close()
        self._listener.close()

    def fork_close(self) -> None:
        """In a forked child: close its copies, which would hide the parent's end."""
        for line in [*self._ranks.values(), *self._strangers]:
            line.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        line = Lines(connection)
        self._strangers.add(line)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(line))

    def _greet(self, line: Lines) -> None:
        """Let a rank in that knows the secret; nobody else gets an answer."""
        try:
            messages = line.receive()
            hello = messages[0] if messages else None
            known = hello is not None and hmac.compare_digest(str(hello["secret"]), self._secret)
            rank = int(hello["rank"]) if hello is not None and known else -1
        except (ValueError, KeyError, TypeError, UnicodeError):
            messages, known, rank = None, False, -1
        if messages == []:
            return  # half a line
        self._strangers.discard(line)
        self._selector.unregister(line.connection)
        if not known or not 0 < rank < self._world or rank in self._ranks:
            line.close()
            return
        self._ranks[rank] = line
        self._selector.register(line.connection, selectors.EVENT_READ, lambda: self._read(rank))
        line.send({"do": "welcome"})

    def _read(self, rank: int) -> None:
        line = self._ranks[rank]
        try:
            messages = line.receive()
        except ValueError:
            messages = None
        if messages is None:
            self._lose(rank)
            return
        for message in messages:
            self.handle(rank, message)

    def _lose(self, rank: int) -> None:
        line = self._ranks.pop(rank)
        self._selector.unregister(line.connection)
        line.close()
        self._absent[rank] = "left" if rank in self._leaving else "gone"
        if rank not in self._leaving:
            self._send_all({"do": "gone", "rank": rank})
        self._conclude_if_complete()

    def _send(self, rank: int, message: Message) -> None:
        if rank == 0:
            self._local(message)
        elif rank in self._ranks:
            self._ranks[rank].send(message)

    def _send_all(self, message: Message) -> None:
        for rank in [*self._ranks, 0]:  # the others first: rank 0 may be about to end
            self._send(rank, message)

    # A failure, from the first report to the verdict.

    def _open_case(self, failure: Message, rank: int, prints: Mapping[int, Message] | None = None) -> None:
        if self._verdict is not None:
            self._send(rank, self._verdict)
        elif self._case is None or (self._case.is_suspicion and failure["kind"] != "suspicion"):
            self._case = _Case(failure, prints)
            self._ask(range(self._world))

    def _ask(self, ranks: Sequence[int]) -> None:
        """Ask ranks what they are doing, which also tells them that this process is alive."""
        now = time.monotonic()
        if len(ranks) == self._world:
            self._asked = now
        for rank in reversed(ranks):  # rank 0 last: what it answers is acted on at once
            self._unanswered.setdefault(rank, now)
            self._send(rank, {"do": "ask"})

    def _conclude_if_complete(self) -> None:
        case = self._case
        if case is None or self._verdict is not None:
            return
        answered = len({*case.states, *self._absent}) == self._world
        if answered and (case.prints is None or self._absent or len(case.prints) == _expected(case.prints)):
            self._conclude()

    def _conclude(self) -> None:
        case = self._case
        if case is None:
            return
        absent = {
            **{rank: "silent" for rank in range(self._world) if rank not in case.states},
            **self._absent,
        }
        absent = {rank: why for rank, why in absent.items() if rank not in case.states}
        if case.prints is not None:  # more of them may have come since
            case.failure.update(_accusation(case.prints) or {})
        if case.is_suspicion and not _blame.is_stuck(case.failure, case.states):
            self._case = None
            self._send_all({"do": "dismissed"})
            return
        found = _blame.judge(case.failure, case.states, absent)
        self._verdict = {
            "do": "verdict",
            "text": found.text,
            "culprits": found.culprits,
            "table": _blame.table(case.states, absent),
            "absent": absent,
            "failure": case.failure,
        }
        self._send_all(self._verdict)

    # BMTRAIN_CHECK: what the ranks of a group are about to do.

    def _compare(self, rank: int, fingerprint: Message) -> None:
        key = (_channel(fingerprint), int(fingerprint["sequence"]))
        posted = self._prints.setdefault(key, {})
        posted[rank] = fingerprint
        if self._verdict is not None:
            return
        accusation = _accusation(posted)
        if accusation is not None:
            failure = {"rank": rank, "group": fingerprint["group"], "record": None, "time": time.time()}
            self._open_case({**failure, **accusation}, rank, posted)
            self._conclude_if_complete()
        elif len(posted) == _expected(posted):
            del self._prints[key]
            if fingerprint["peer"] is None:
                for other in posted:
                    self._send(other, {"do": "agreed", "group": fingerprint["group"], "sequence": key[1]})


def _expected(posted: Mapping[int, Message]) -> int:
    """How many ranks come to an operation of which these are there."""
    first = next(iter(posted.values()))
    return 2 if first["peer"] is not None else int(first["size"])


def _accusation(posted: Mapping[int, Message]) -> Message | None:
    """What is wrong with these fingerprints of one operation, as part of a failure; None if they agree."""
    found = _blame.mismatch(_comparable(posted), next(iter(posted.values()))["name"])
    if found is None:
        return None
    return {"kind": "mismatch", "what": found.text, "culprits": list(found.culprits)}


def _channel(fingerprint: Mapping[str, Any]) -> str:
    """What numbers operations: a group's collectives, or the messages from one rank of it to another."""
    if fingerprint["peer"] is None:
        return str(fingerprint["group"])
    ends = [fingerprint["rank"], fingerprint["peer"]]
    source, target = ends if fingerprint["op"] == "send" else ends[::-1]
    return f"{fingerprint['group']} {source}>{target}"


def _comparable(posted: Mapping[int, Message]) -> dict[int, Message]:
    """A send and its recv are one operation."""
    return {
        rank: {**fingerprint, "op": "message", "label": ""}
        if fingerprint["peer"] is not None
        else fingerprint
        for rank, fingerprint in posted.items()
    }
