"""Agreement of the surviving ranks on their list, without a rank that is needed for it.

[Note: Members]
From the start each rank listens at a port of its own, whose address all ranks know. After a loss each survivor
goes to the lowest rank that answers, which waits until every other rank has come or is known to be lost: it refuses
connections, hangs up, or does not answer. Then it sends all of them the list. A thread answers, so that a rank
that still computes is not taken for lost. Every loss begins an epoch: a process that was stopped and comes too late
gets an error: the others have continued without it.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._watch.lines import listen
from ..errors import CommunicationError

#: Time in which the thread of a living rank answers.
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.02
_LONGEST = 1 << 24

Message = dict[str, Any]


class Address(NamedTuple):
    """Address at which a rank listens."""

    host: str
    port: int


class Meeting(NamedTuple):
    """The result of an agreement.

    Attributes:
        survivors: ranks of the epoch that has ended, in order.
        reports: of the survivors, by rank.
        given: message of the first survivor to all.
    """

    survivors: list[int]
    reports: dict[int, Message]
    given: Message


class Lost(Exception):
    """A rank does not answer."""


class Members:
    """The ranks of the job as they are now, and this process's port for them.

    Args:
        rank: of this process.
        host: an address of this host that all ranks can reach.
        several_hosts: whether there are ranks on others.
        secret: admits the ranks of this job.
    """

    def __init__(self, rank: int, host: str, several_hosts: bool, secret: str) -> None:
        self.rank = rank
        self.epoch = 0
        self.addresses: list[Address] = []
        self.secret = secret
        self._listener, address = listen(host, several_hosts)
        self._several_hosts = several_hosts
        self.own = Address(address, int(self._listener.getsockname()[1]))
        self._arrived: queue.SimpleQueue[tuple[Message, Line]] = queue.SimpleQueue()
        self._waiting: dict[int, tuple[Message, Line]] = {}
        self._newcomers: list[tuple[Message, Line]] = []  # processes that wait for a place
        self._held: list[Line] = []  # of ranks that watch this one: they see its end
        self._is_over = False
        threading.Thread(target=self._serve, name="bmtrain-members", daemon=True).start()
        os.register_at_fork(after_in_child=self._listener.close)  # or a child would seem to be this rank

    def close(self) -> None:
        self._is_over = True
        self._listener.close()

    def open_port(self) -> tuple[socket.socket, str]:
        """Returns another listening socket on this rank's interface, and its address."""
        return listen(self.own.host, self._several_hosts)

    # ---- the thread

    def _serve(self) -> None:
        while not self._is_over:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            line = Line(connection)
            try:
                message = line.receive(_ANSWER_SECONDS)
                if not hmac.compare_digest(str(message.get("secret")), self.secret):
                    raise Lost
                if message["do"] == "join":
                    line.send({"do": "wait"})
                    self._newcomers.append((message, line))
                    continue
                if message["epoch"] < self.epoch:
                    line.send({"do": "expelled"})
                    line.close()
                    continue
                line.send({"do": "wait"})
            except (Lost, OSError, ValueError, KeyError, TypeError):
                line.close()
                continue
            self._arrived.put((message, line))

    # ---- processes that take a place

    def newcomer(self) -> tuple[Message, Line] | None:
        """Returns the first process that waits for a place at this rank."""
        while self._newcomers:
            if not self._newcomers[0][1].is_closed():
                return self._newcomers[0]
            self._newcomers.pop(0)[1].close()
        return None

    def drop_newcomer(self, answer: Message | None = None) -> None:
        """Answers the first process that waits, which waits here no more."""
        line = self._newcomers.pop(0)[1]
        if answer is not None:
            line.send(answer)
        line.close()

    def admit(self, address: Address) -> None:
        """Begins the next epoch, with one more rank."""
        self.addresses.append(address)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch += 1
        for line in self._held:
            line.close()
        self._held.clear()
        for _ in range(self._arrived.qsize()):  # those to a rank that has led no agreement
            message, line = self._arrived.get()
            if message["epoch"] < self.epoch:
                line.close()
            else:
                self._arrived.put((message, line))

    # ---- the agreement

    def agree(
        self,
        report: Message,
        lost: Sequence[int],
        patience: float,
        why_not: Callable[[dict[int, Message]], str],
        give: Callable[[dict[int, Message]], Message],
    ) -> Meeting:
        """Meets the survivors. Collective over them.

        Args:
            report: of this rank, for all others.
            lost: ranks that are known to be lost.
            patience: seconds within which all survivors come.
            why_not: called with all reports on the first survivor; the reason to end, or nothing.
            give: called with all reports on the first survivor; its result is given to all.

        Raises:
            CommunicationError: the survivors cannot continue, or have done so without this process.
        """
        missing, end = set(lost), time.monotonic() + patience
        for leader in range(self.rank):
            if leader not in missing:
                try:
                    return self._follow(leader, report, end)
                except Lost:
                    missing.add(leader)
        return self._lead(report, missing, end, why_not, give)

    def advance(self, survivors: Sequence[int]) -> None:
        """Begins the next epoch, with these ranks in their order."""
        self.addresses = [self.addresses[rank] for rank in survivors]
        self.rank = list(survivors).index(self.rank)
        self._begin_epoch()

    def _connect(self, rank: int, message: Message) -> Line:
        """Connects to a rank and sends a message, which its thread has accepted when this returns."""
        line = Line.to(self.addresses[rank])
        line.send({**message, "epoch": self.epoch, "rank": self.rank, "secret": self.secret})
        if line.receive(_ANSWER_SECONDS)["do"] == "expelled":
            raise CommunicationError(
                f"rank {self.rank} did not answer for too long: the others continue without it; this process ends"
            )
        return line

    def _follow(self, leader: int, report: Message, end: float) -> Meeting:
        line = self._connect(leader, {"do": "report", "report": report})
        try:
            verdict = line.receive(max(end - time.monotonic(), _ANSWER_SECONDS))
        finally:
            line.close()
        if verdict["do"] == "end":
            raise CommunicationError(verdict["why"])
        reports = {int(rank): other for rank, other in verdict["reports"].items()}
        return Meeting(sorted(reports), reports, verdict["given"])

    def _lead(
        self,
        report: Message,
        lost: set[int],
        end: float,
        why_not: Callable[[dict[int, Message]], str],
        give: Callable[[dict[int, Message]], Message],
    ) -> Meeting:
        probes: dict[int, Line] = {}
        try:
            while len(self._waiting) + len(lost) + 1 < len(self.addresses):
                self._look(probes, lost, end)
            reports = {
                self.rank: report,
                **{rank: message["report"] for rank, (message, _) in self._waiting.items()},
            }
            why = why_not(reports)
            given = {} if why else give(reports)
            answer = {"do": "end", "why": why} if why else {"do": "go", "reports": reports, "given": given}
            for _, line in self._waiting.values():
                line.send(answer)
                line.close()
            self._waiting.clear()
        finally:
            for line in probes.values():
                line.close()
        if why:
            raise CommunicationError(why)
        return Meeting(sorted(reports), reports, given)

    def _look(self, probes: dict[int, Line], lost: set[int], end: float) -> None:
        """Waits a moment for ranks to come, and looks for ranks that are lost."""
        for rank in range(len(self.addresses)):
            if rank == self.rank or rank in lost or rank in self._waiting or rank in probes:
                continue
            try:
                probes[rank] = self._connect(rank, {"do": "probe"})
            except Lost:
                lost.add(rank)
        try:
            message, line = self._arrived.get(timeout=_POLL_SECONDS)
            if message["do"] == "probe":
                self._held.append(line)
            elif message["epoch"] == self.epoch:
                self._waiting[message["rank"]] = message, line
                lost.discard(message["rank"])
        except queue.Empty:
            pass
        lines = {**probes, **{rank: line for rank, (_, line) in self._waiting.items()}}
        for rank, line in lines.items():
            if line.is_closed() or (rank not in self._waiting and time.monotonic() > end):
                lost.add(rank)
                self._waiting.pop(rank, None)


class Line:
    """A connection that carries a few messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    @classmethod
    def to(cls, address: Address) -> Line:
        """Connects; `Lost` if no rank listens there."""
        try:
            return cls(socket.create_connection(address, _ANSWER_SECONDS))
        except OSError:
            raise Lost from None

    def own_address(self) -> str:
        """Returns the address of this end."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Message) -> None:
        try:
            self._connection.settimeout(_ANSWER_SECONDS)
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # a rank that is lost shows when its answer is awaited

    def receive(self, seconds: float) -> Message:
        """Returns the next message; `Lost` if there is none within ``seconds``."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            try:
                self._connection.settimeout(max(end - time.monotonic(), 0.001))
                data = self._connection.recv(1 << 16)
            except OSError:
                raise Lost from None
            if not data or len(self._rest) > _LONGEST:
                raise Lost
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def is_closed(self) -> bool:
        """Whether the peer has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if not selector.select(0):
                return False
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        self._connection.close()
