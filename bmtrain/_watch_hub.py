"""Where the ranks' watchdogs meet: rank 0 collects what they know when something fails, and tells all the verdict.

Messages are JSON, one a line. A rank's connection lives as long as its process, so that its end is noticed at once;
a rank that ends in good order says so first. See `bmtrain/_watchdog.py` for the other side.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _blame
from ._watch_lines import Lines, Message, Patience

__all__ = ["Hub"]

# How long ranks have to say what they are doing. At a time-out less: who is silent is known before it.
_ANSWER_SECONDS = 1.4
_LATE_ANSWER_SECONDS = 1.0


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
        self.suspicions = [failure] if failure["kind"] == "suspicion" else []  # of several ranks
        self.is_late = failure["kind"] == "late"
        self.opened = time.monotonic()

    def is_complete(self, absent: Mapping[int, str], world: int) -> bool:
        """Whether there is nothing to wait for."""
        if len({*self.states, *absent}) < world:
            return False
        return self.prints is None or bool(absent) or len(self.prints) == _expected(self.prints)

    def is_nothing(self) -> bool:
        """Whether all that was suspected is in order; else the failure is what is not."""
        for suspicion in self.suspicions:
            if _blame.is_stuck(suspicion, self.states):
                self.failure = suspicion
                return False
        return bool(self.suspicions)


class Hub:
    """The hub of a job, driven by the thread of rank 0's watchdog.

    Args:
        selector: of that thread; a key's data is what to call when it is readable.
        listener: where the other ranks connect.
        world: number of ranks.
        secret: what a rank must know to be let in.
        local: takes the messages for rank 0.
        patience: how long a rank may be silent.
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
        self._patience = patience
        self._unanswered: dict[int, float] = {}  # ranks that were asked, and when they were first
        self._states: dict[int, Message] = {}  # what each has answered last
        self._next_round = 0.0  # in which everybody is asked; not before this
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
        return case.opened + (_LATE_ANSWER_SECONDS if case.is_late else _ANSWER_SECONDS)

    def tick(self) -> None:
        """Decide, if the time for answers is over."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._conclude()

    def handle(self, rank: int, message: Message) -> None:
        """Act on a message of a rank."""
        if message["do"] == "fail":
            self._open_case(message["failure"], rank)
        elif message["do"] == "inquire":
            recently = time.monotonic() < self._next_round
            self._ask([rank] if recently else range(self._world))
        elif message["do"] == "state":
            self._unanswered.pop(rank, None)
            self._states[rank] = message["state"]
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
        case = self._case
        is_suspicion = failure["kind"] == "suspicion"
        if self._verdict is not None:
            self._send(rank, self._verdict)
        elif case is None or (case.suspicions and not is_suspicion):
            self._case = _Case(failure, prints)
            self._ask(range(self._world))
        elif is_suspicion and case.suspicions:
            case.suspicions.append(failure)
            case.states.pop(rank, None)  # it may have been told before this operation
            self._ask([rank])
        else:
            self._send(rank, {"do": "noted"})

    def _ask(self, ranks: Sequence[int]) -> None:
        """Ask ranks what they are doing, which also tells them that this process is alive."""
        now = time.monotonic()
        if len(ranks) == self._world:
            self._next_round = now + self._patience.period / 2
        for rank in reversed(ranks):  # rank 0 last: what it answers is acted on at once
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
        if case is None:
            return
        if case.is_nothing():
            self._case = None
            for suspicion in case.suspicions:
                self._send(suspicion["rank"], {"do": "dismissed"})
            return
        if case.is_late:  # who was heard of since they were first asked is there, if slow
            silent = {**self._silent(), **self._absent}
            late = {rank: state for rank, state in self._states.items() if rank not in silent}
            case.states = {**late, **case.states}
        missing = {rank: "silent" for rank in range(self._world) if rank not in case.states}
        absent = {rank: self._absent.get(rank, why) for rank, why in missing.items()}
        if case.prints is not None:  # more of them may have come since
            case.failure.update(_accusation(case.prints) or {})
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
