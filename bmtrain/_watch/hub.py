"""The hub of the watchdogs: rank 0 collects their reports when something fails, and sends all ranks the verdict.

Messages are JSON, one per line. A rank's connection lives as long as its process, so that its end is detected at once;
a rank that ends in order announces it first. See `bmtrain/_watch/watchdog.py` for the other side.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import blame, endings
from .deadlocks import Rounds
from .lines import Lines, Message, Patience, listen_beside

# Time for ranks to report their state. Less at a time-out: silent ranks are known before it.
_ANSWER_SECONDS = 1.4
_LATE_ANSWER_SECONDS = 1.0
# Time between the announced end of a rank and its exit.
_ENDING_SECONDS = 2.0
_PAUSE_SECONDS = 0.1
# Connections at the start that have not said who they are, beyond one for each rank; and the longest that a rank says.
_STRANGERS = 64
_HELLO_BYTES = 1 << 16


class _Case:
    """One failure, and the ranks' answers to it.

    A mismatch has the fingerprints of some ranks in ``prints``; fingerprints of the other ranks are in flight.
    """

    def __init__(self, failure: Message, prints: Mapping[int, Message] | None) -> None:
        self.failure = failure
        self.prints = prints
        self.states: dict[int, Message] = {}
        self.suspicions = [failure] if failure["kind"] == "suspicion" else []  # of several ranks
        self.is_late = failure["kind"] == "late"
        self.opened = time.monotonic()

    def is_complete(self, absent: Mapping[int, str], world: int) -> bool:
        """Whether all answers that can come have come."""
        if len({*self.states, *absent}) < world:
            return False
        return self.prints is None or bool(absent) or len(self.prints) == _expected(self.prints)

    def is_nothing(self) -> bool:
        """Whether all suspicions proved wrong; otherwise sets the failure to the first that is right."""
        for suspicion in self.suspicions:
            if blame.is_stuck(suspicion, self.states):
                self.failure = suspicion
                return False
        return bool(self.suspicions)


class Hub:
    """The hub of a job, driven by the thread of rank 0's watchdog.

    Args:
        selector: of that thread; a key's data is the function to call when it is readable.
        local: takes the messages for rank 0.
        on_lines: receives the file descriptors of the ranks' connections, before one is closed and after one is made.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        world: int,
        secret: str,
        local: Callable[[Message], None],
        *,
        patience: Patience,
        on_lines: Callable[[list[int]], None] = lambda _: None,
    ) -> None:
        self._selector = selector
        self._listener = listener
        self._world = world
        self._secret = secret
        self._local = local
        self._ranks: dict[int, Lines] = {}
        self._strangers: dict[Lines, None] = {}  # connections that have not said hello, the oldest first
        self._absent: dict[int, str] = {}
        self._processes: dict[int, str] = {}
        self._on_lines = on_lines
        self.resume = ""  # how to continue from what this run has saved
        self._again = 0.0  # when to check whether a rank that announced its end has exited
        self._rounds = Rounds(world)
        self._leaving: set[int] = set()
        self._patience = patience
        self._unanswered: dict[int, float] = {}  # ranks that were asked, and the time of the first question
        self._states: dict[int, Message] = {}  # the last answer of each
        self._heard: dict[int, float] = {}  # the time of that answer
        self._next_round = 0.0  # earliest time of the next question to all
        self._case: _Case | None = None
        self._verdict: Message | None = None
        self._prints: dict[tuple[str, int], dict[int, Message]] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def deadline(self) -> float | None:
        """When `tick` must be called, on the monotonic clock."""
        case = self._case
        if case is None or self._verdict is not None:
            return None
        return self._again or case.opened + (_LATE_ANSWER_SECONDS if case.is_late else _ANSWER_SECONDS)

    def tick(self) -> None:
        """Concludes the case if the time for answers is over."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._conclude()

    def handle(self, rank: int, message: Message) -> None:
        """Acts on a message of a rank."""
        if message["do"] == "fail":
            self._open_case(message["failure"], rank)
        elif message["do"] == "inquire":
            recently = time.monotonic() < self._next_round
            self._ask([rank] if recently else range(self._world))
        elif message["do"] == "state":
            self._unanswered.pop(rank, None)
            self._states[rank], self._heard[rank] = message["state"], time.monotonic()
            if self._case is None and self._verdict is None:
                self._check_deadlock(rank, message["state"])
            if self._case is not None and self._verdict is None:
                self._case.states[rank] = message["state"]
                self._conclude_if_complete()
        elif message["do"] == "check":
            self._compare(rank, message["print"])
        elif message["do"] == "bye":
            self._leaving.add(rank)

    def listen_beside(self) -> tuple[socket.socket, str]:
        """Listens on a second port of the hub's interface; returns the socket and an address that leads to it here."""
        listener = listen_beside(self._listener)
        address = str(listener.getsockname()[0])
        return listener, "localhost" if address in ("0.0.0.0", "::") else address

    def close(self) -> None:
        """Announces to all ranks that the job continues without a hub."""
        self._on_lines([])
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
        if len(self._processes) == self._world - 1:  # all ranks are in, or were
            connection.close()
            return
        if len(self._strangers) == self._world + _STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        line = Lines(connection, _HELLO_BYTES)
        self._strangers[line] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(line))

    def _greet(self, line: Lines) -> None:
        """Accepts a rank that knows the secret; other connections get no answer."""
        try:
            messages = line.receive()
            hello = messages[0] if messages else None
            known = hello is not None and hmac.compare_digest(str(hello["secret"]), self._secret)
            rank = int(hello["rank"]) if hello is not None and known else -1
        except (ValueError, KeyError, TypeError, UnicodeError):
            messages, known, rank = None, False, -1
        if messages == []:
            return  # half a line
        if not known or not 0 < rank < self._world or rank in self._ranks:
            self._turn_away(line)
            return
        del self._strangers[line]
        self._selector.unregister(line.connection)
        line.longest = None
        self._ranks[rank] = line
        self._processes[rank] = str((hello or {}).get("process", ""))
        self._publish_lines()
        self._selector.register(line.connection, selectors.EVENT_READ, lambda: self._read(rank))
        line.send({"do": "welcome", "process": endings.own_process()})

    def _turn_away(self, stranger: Lines) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger.connection)
        stranger.close()

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
        self._publish_lines()
        self._selector.unregister(line.connection)
        line.close()
        how = endings.ending(self._processes[rank])  # lost as soon as its parent has collected it
        self._absent[rank] = f"{'left' if rank in self._leaving else 'gone'} {how}".strip()
        if rank not in self._leaving:
            self._send_all({"do": "gone", "rank": rank})
        self._conclude_if_complete()

    def _publish_lines(self) -> None:
        self._on_lines([line.connection.fileno() for line in self._ranks.values()])

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
        case = self._case
        is_suspicion = failure["kind"] == "suspicion"
        if self._verdict is not None:
            self._send(rank, self._verdict)
        elif case is None or (case.suspicions and not is_suspicion):
            self._case = _Case(failure, prints)
            self._ask(range(self._world))
        elif is_suspicion and case.suspicions:
            case.suspicions.append(failure)
            case.states.pop(rank, None)  # it may describe the time before this operation
            self._ask([rank])
        else:
            self._send(rank, {"do": "noted"})

    def _ask(self, ranks: Sequence[int]) -> None:
        """Asks ranks for their state, which also shows them that this process is alive."""
        now = time.monotonic()
        if len(ranks) == self._world:
            self._next_round = now + self._patience.period / 2
            self._rounds.begin()
        for rank in reversed(ranks):  # rank 0 last: its answer is handled at once
            self._unanswered.setdefault(rank, now)
            self._send(rank, {"do": "ask"})

    def _conclude_if_complete(self) -> None:
        case = self._case
        if case is None or self._verdict is not None:
            return
        if case.is_complete({**self._absent, **(self._silent() if case.is_late else {})}, self._world):
            self._conclude()

    def _silent(self) -> dict[int, str]:
        """The ranks that have not answered for too long."""
        limit = time.monotonic() - self._patience.silence
        return {rank: "silent" for rank, since in self._unanswered.items() if since <= limit}

    def _conclude(self) -> None:
        case = self._case
        if case is None or self._awaits_an_ending(case):
            return
        if case.is_nothing():
            self._case = None
            for suspicion in case.suspicions:
                self._send(suspicion["rank"], {"do": "dismissed"})
            return
        if case.is_late:  # a rank heard from since the first question is alive, if slow
            silent, first = {**self._silent(), **self._absent}, case.opened - 7 * self._patience.period
            alive = (rank for rank, heard in self._heard.items() if heard >= first and rank not in silent)
            case.states = {**{rank: self._states[rank] for rank in alive}, **case.states}
        missing = {rank: "silent" for rank in range(self._world) if rank not in case.states}
        absent = {rank: self._absent.get(rank, why) for rank, why in missing.items()}
        if case.prints is not None:  # more of them may have come since
            case.failure.update(_accusation(case.prints) or {})
        verdict = blame.verdict(case.failure, case.states, absent)
        self._verdict = {"do": "verdict", **verdict, "resume": self.resume}
        self._send_all(self._verdict)

    def _check_deadlock(self, rank: int, state: Message) -> None:
        """Reports a deadlock long before the time-out; the job is only aborted if it is certain."""
        found = self._rounds.add(rank, state)
        if found is None:
            return
        text, certain, number = found
        if certain:
            failure = {"rank": rank, "group": "", "record": None, "time": time.time()}
            self._open_case(
                {**failure, "kind": "mismatch", "what": text.text, "culprits": list(text.culprits)}, rank
            )
            return
        told = f"{text.text}. Unless that changes, the job ends at the time-out"
        table = [*blame.table(self._states, {}), *blame.remedies(text.text)]
        self._send_all({"do": "notice", "text": told, "table": table, "number": number})

    def _awaits_an_ending(self, case: _Case) -> bool:
        """Whether a rank that announced its end is about to exit: its exit code is known in a moment."""
        leaving = [rank for rank, why in self._absent.items() if why == "left"]
        for rank in leaving:
            self._absent[rank] = f"left {endings.ending(self._processes[rank])}".strip()
        now = time.monotonic()
        awaits = now < case.opened + _ENDING_SECONDS and any(
            self._absent[rank] == "left" and endings.is_running(self._processes[rank]) for rank in leaving
        )
        self._again = now + _PAUSE_SECONDS if awaits else 0.0
        return awaits

    # BMTRAIN_CHECK: the next operation of each rank of a group.

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
    """The number of ranks that take part in an operation with these fingerprints."""
    first = next(iter(posted.values()))
    return 2 if first["peer"] is not None else int(first["size"])


def _accusation(posted: Mapping[int, Message]) -> Message | None:
    """The mismatch of these fingerprints of one operation, as part of a failure; None if they agree."""
    found = blame.mismatch(_comparable(posted), next(iter(posted.values()))["name"])
    if found is None:
        return None
    return {"kind": "mismatch", "what": found.text, "culprits": list(found.culprits)}


def _channel(fingerprint: Mapping[str, Any]) -> str:
    """The scope of operation numbers: a group's collectives, or the messages from one of its ranks to another."""
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
