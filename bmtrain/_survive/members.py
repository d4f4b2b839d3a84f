"""Agreement of the surviving ranks on their list, without a rank that is needed for it.

[Note: Members]
From the start each rank listens at a port of its own, whose address all ranks know. After a loss each survivor
goes to the lowest rank that answers, which waits until every other rank has come or is known to be lost: it refuses
connections, hangs up, or does not answer. Then it sends all of them the list. A thread answers, so that a rank
that still computes is not taken for lost. The verdict does not decide: each rank has its own view of which others were
silent, and a rank that was only slow comes too. A leader that hears of a lower rank sends all back to look again.
Every loss begins an epoch: a process that was stopped and comes too late gets an error: the others have continued
without it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from .._watch.lines import listen
from ..errors import CommunicationError

#: Time in which the thread of a living rank answers; of one that did not answer the watchdog.
_ANSWER_SECONDS = 5.0
_DOUBTED_SECONDS = 3.0
#: Time between two signs of life of the rank at which others wait.
_SIGN_SECONDS = 1.0
#: Time after which a rank that waits looks whether another one calls it.
_CALL_SECONDS = 0.2
_THREADS = 32
_POLL_SECONDS = 0.02
_LONGEST = 1 << 24

Message = dict[str, Any]
Probe = Future["Line | None"]


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


class _LookAgain(Exception):
    """A rank is there that is to lead the agreement."""


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
        threading.Thread(target=self._serve, name="bmtrain-members", daemon=True).start()
        os.register_at_fork(after_in_child=self._listener.close)  # or a child would seem to be this rank

    def close(self) -> None:
        self._listener.close()

    def open_port(self) -> tuple[socket.socket, str]:
        """Returns another listening socket on this rank's interface, and its address."""
        return listen(self.own.host, self._several_hosts)

    # ---- the thread

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(_POLL_SECONDS)  # too many open files, or a connection that has ended already
                continue
            # By itself: one that says nothing must not make this rank look lost to the others.
            threading.Thread(
                target=self._greet, args=(Line(connection),), name="bmtrain-members", daemon=True
            ).start()

    def _greet(self, line: Line) -> None:
        try:
            message = line.receive(_ANSWER_SECONDS)
            if not hmac.compare_digest(str(message.get("secret")), self.secret):
                raise Lost
            if message["do"] != "join" and message["epoch"] < self.epoch:
                line.send({"do": "expelled"})
                raise Lost
        except (Lost, ValueError, KeyError, TypeError, AttributeError):
            line.close()
            return
        line.send({"do": "wait"})
        if message["do"] == "join":
            self._newcomers.append((message, line))
        else:
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
        lost: Mapping[int, bool],
        patience: float,
        decide: Callable[[dict[int, Message]], Message],
    ) -> Meeting:
        """Meets the survivors. Collective over them.

        Args:
            report: of this rank, for all others.
            lost: ranks that are lost by the verdict; whether they end by themselves: others may be slow.
            patience: seconds within which all survivors come to the one that leads.
            decide: called with all reports on the first survivor; returns ``why`` to end, or what all are ``given``.

        Raises:
            CommunicationError: the survivors cannot continue, or have done so without this process.
        """
        patience = max(patience, _ANSWER_SECONDS)
        while True:
            missing = {rank for rank, ends in lost.items() if ends}
            probes = self._probe(set(range(self.rank)) - missing, lost)
            try:
                for leader, probe in sorted(probes.items()):
                    try:
                        if probe.result() is not None:
                            return self._follow(leader, report, patience)
                    except Lost:
                        pass
                    missing.add(leader)
                return self._lead(report, missing, lost, patience, decide)
            except _LookAgain:
                continue
            finally:
                _close(probes.values())

    def advance(self, survivors: Sequence[int]) -> None:
        """Begins the next epoch, with these ranks in their order."""
        self.addresses = [self.addresses[rank] for rank in survivors]
        self.rank = list(survivors).index(self.rank)
        self._begin_epoch()

    def _connect(self, rank: int, message: Message, seconds: float = _ANSWER_SECONDS) -> Line:
        """Connects to a rank and sends a message, which its thread has accepted when this returns."""
        line = Line.to(self.addresses[rank], seconds)
        line.send({**message, "epoch": self.epoch, "rank": self.rank, "secret": self.secret})
        if line.receive(seconds)["do"] == "expelled":
            raise CommunicationError(
                f"rank {self.rank} did not answer for too long: the others continue without it; this process ends"
            )
        return line

    def _probe(self, ranks: Iterable[int], doubted: Mapping[int, bool]) -> dict[int, Probe]:
        """Connects to ranks, to all at once: one that is out of reach takes as long as all of its host."""

        def connect(rank: int) -> Line | None:  # without an exception, which would keep the frames of callers
            seconds = _DOUBTED_SECONDS if rank in doubted else _ANSWER_SECONDS
            with contextlib.suppress(Lost):
                return self._connect(rank, {"do": "probe"}, seconds)
            return None

        def run() -> None:
            for rank, probe in waiting:
                if probe.set_running_or_notify_cancel():
                    try:
                        probe.set_result(connect(rank))
                    except BaseException as error:  # raised where the result is asked for
                        probe.set_exception(error)

        probes: dict[int, Probe] = {rank: Future() for rank in ranks}
        waiting = iter(list(probes.items()))
        for _ in range(min(_THREADS, len(probes))):  # daemons, so that a rank out of reach delays no exit
            threading.Thread(target=run, name="bmtrain-probe", daemon=True).start()
        return probes

    def _follow(self, leader: int, report: Message, patience: float) -> Meeting:
        line = self._connect(leader, {"do": "report", "report": report})
        verdict: Message = {"do": "wait"}
        try:
            while verdict["do"] == "wait":
                verdict = self._await(line, leader, time.monotonic() + patience)
        finally:
            line.close()
        return _meeting(verdict)

    def _await(self, line: Line, leader: int, end: float) -> Message:
        """Returns the next message of the leader, unless a lower rank is found to lead."""
        while True:
            for _ in range(self._arrived.qsize()):
                arrived = self._arrived.get()
                if arrived[0]["do"] == "probe":
                    self._hold(arrived[1], arrived[0]["rank"] < leader)
                else:
                    self._arrived.put(arrived)
            try:
                return line.receive(_CALL_SECONDS)
            except Lost:
                if line.is_closed() or time.monotonic() > end:
                    raise

    def _hold(self, line: Line, leads: bool) -> None:
        """Keeps the connection of a probe; ``leads``: of a rank that leads instead of the known one."""
        self._held.append(line)
        if leads and not line.is_closed():
            raise _LookAgain

    def _lead(
        self,
        report: Message,
        missing: set[int],
        doubted: Mapping[int, bool],
        patience: float,
        decide: Callable[[dict[int, Message]], Message],
    ) -> Meeting:
        world, lost = len(self.addresses), {*range(self.rank), *missing}
        end = time.monotonic() + patience  # from here: others have looked for lower ranks as long as this one
        probes = self._probe(set(range(self.rank + 1, world)) - lost, doubted)
        answer: Message = {}
        try:
            sign = time.monotonic() + _SIGN_SECONDS
            while len(self._waiting) + len(lost) + 1 < world:
                self._look(probes, lost, end)
                if time.monotonic() > sign:
                    sign = time.monotonic() + _SIGN_SECONDS
                    for _, line in self._waiting.values():
                        line.send({"do": "wait"})
            reports = {rank: message["report"] for rank, (message, _) in self._waiting.items()}
            reports[self.rank] = report
            answer = {"do": "go", "reports": reports, **decide(reports)}
        except _LookAgain:
            answer = {"do": "again"}
        finally:
            _close(probes.values())
            for _, line in self._waiting.values():
                if answer:
                    line.send(answer)
                line.close()
            self._waiting.clear()
        return _meeting(answer)

    def _look(self, probes: dict[int, Probe], lost: set[int], end: float) -> None:
        """Waits a moment for ranks to come, and looks for ranks that are lost."""
        try:
            message, line = self._arrived.get(timeout=_POLL_SECONDS)
            if message["do"] == "probe":
                self._hold(line, message["rank"] < self.rank)
            elif message["epoch"] == self.epoch:
                self._waiting[message["rank"]] = message, line
                lost.discard(message["rank"])
        except queue.Empty:
            pass
        for rank, probe in probes.items():
            if rank in self._waiting and self._waiting[rank][1].is_closed():  # it may come again
                self._waiting.pop(rank)[1].close()
            if rank not in self._waiting and (time.monotonic() > end or _is_lost(probe)):
                lost.add(rank)


def _meeting(answer: Message) -> Meeting:
    """The result of an agreement, or an error, from the answer of the rank that led it."""
    if answer["do"] == "again":
        raise _LookAgain
    if "why" in answer:
        raise CommunicationError(answer["why"])
    reports = {int(rank): report for rank, report in answer["reports"].items()}
    return Meeting(sorted(reports), reports, answer["given"])


def _is_lost(probe: Probe) -> bool:
    """Whether the process of a rank does not answer, or has ended since."""
    return probe.done() and ((line := probe.result()) is None or line.is_closed())


def _close(probes: Iterable[Probe]) -> None:
    """Closes connections, those under way as soon as they are made."""

    def close(probe: Probe) -> None:
        if not (probe.cancelled() or probe.exception()) and (line := probe.result()) is not None:
            line.close()

    for probe in probes:
        probe.cancel()
        probe.add_done_callback(close)


class Line:
    """A connection that carries a few messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    @classmethod
    def to(cls, address: Address, seconds: float = _ANSWER_SECONDS) -> Line:
        """Connects within ``seconds``; `Lost` if no rank listens there."""
        try:
            return cls(socket.create_connection(address, seconds))
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
