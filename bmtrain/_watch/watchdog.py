"""One thread per process that watches over its communication: time-outs, the other ranks' failures, Ctrl-C.

[Note: One watchdog]
The failure that one thread observes is seldom the cause: when a rank dies, its neighbours lose a connection, abort, and
so look dead to the next ones. So no rank raises its own observation. It reports it to the hub (`bmtrain/_watch/hub.py`,
in the process of rank 0), which asks all ranks for their state, decides, and sends all ranks the same sentence; only
then are communicators aborted. If the hub does not answer, or has exited, that is the verdict.

The store of the rendezvous is not used for it, although all ranks know it: its client waits without a limit for a
server that is stopped, and writes a warning when the server ends, as the process of rank 0 may at any time. It only
carries the hub's address and the secret that admits ranks.

The thread sleeps until something happens and looks for time-outs a few times a second. It takes the interpreter's lock
for microseconds, and needs nothing from the script's thread: that one waits with the lock released.
"""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from torch.distributed import Store

from .._base import position
from .._C import Communicator, GuardedCommunicator, Watchdog, end_by_signal
from ..errors import CommunicationError
from . import blame, endings
from .hub import Hub
from .last_resort import LastResort
from .last_words import ALONE_SECONDS, LastWords
from .lines import HubLine, Message, Patience
from .meeting import open_hub, reach_hub
from .report import Reporter
from .suspicion import Suspicion

# The longest time between two checks of time-outs, and the time of a hub that answers for a verdict: longer than it
# gives the ranks.
_TICK_SECONDS = 0.2
_VERDICT_SECONDS = 3.5
# Duration of an operation after which its rank first asks for the state of the others; later it asks less often.
_FIRST_QUESTION_SECONDS = 3.0
# Failures that the rank at fault knows of, and by which it ends.
_SELF_ENDING = ("exception", "interrupted", "terminated", "aborted")
# Time between the loss of a connection and the detection of the peer's exit.
_NOTICE_SECONDS = 1.0
# Time between the announced end of a rank and its exit.
_ENDING_SECONDS = 2.0
# Time from a report to the end by SIGTERM, in which other ranks that print the same report find it printed.
_REPORTED_SECONDS = 0.3
# Ctrl-C: time for an operation with waiting callers to end by itself.
_INTERRUPT_SECONDS = 0.3


class Watch:
    """The watchdog of this process. Made by `Watch.join`; `stop` ends it.

    Attributes:
        core: guards communicators.
        suspicion: the exited ranks.
        saved: how to continue from what was saved last; empty if nothing was.
        may_survive: returns the error of operations if the job may continue after a verdict, else nothing.
    """

    def __init__(self, rank: int, timeout: float, hosts: Sequence[str]) -> None:
        self.core = Watchdog(timeout)
        self._timeout = timeout
        self._rank = rank
        self._world = len(hosts)
        self._hosts = hosts
        self._tick = min(_TICK_SECONDS, timeout / 4)
        self._patience = Patience.of(timeout)
        self._wonder = _FIRST_QUESTION_SECONDS
        self._next_question = 0.0  # earliest time of the next question to all ranks
        self._selector = selectors.DefaultSelector()
        self._hub: Hub | None = None
        self._line: HubLine | None = None  # to the hub; None on rank 0, and after the hub has exited
        self._hub_absent = ""
        self._failure: Message | None = None  # reported, without a verdict yet
        self._deadline = 0.0
        self._seen: list[Message] | None = None  # this process's operations at the time of the question
        self._accepted = False  # a verdict
        self._reported = ""  # the verdict, if it ends the job
        self._judged = threading.Event()  # there is one, and everything is aborted
        self._stopping = False
        self._pid = os.getpid()
        self._interrupted = 0.0
        self._terminated = 0.0  # when a pending SIGTERM takes effect
        self._culprits: Sequence[int] = ()
        self._process_of_rank_0 = ""
        self._reporter = Reporter(rank, self._world, "")
        self._resort = LastResort(f"rank {rank} of {self._world}", timeout, self._patience.silence)
        self.suspicion = Suspicion()
        self.saved = ""
        self.may_survive: Callable[[Message], str] = lambda _: ""
        self._thread = threading.Thread(target=self._run, name="bmtrain-watchdog", daemon=True)
        self._words = LastWords(self._tell, self._is_victim, lambda *words: self._reporter.raised(*words))

    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        *,
        timeout: float,
        host: str,
        hosts: Sequence[str],
        may_survive: Callable[[Message], str] | None = None,
    ) -> Watch:
        """Connects with the other ranks' watchdogs and starts. Collective over all ranks of the job.

        Args:
            store: the store of the rendezvous; not needed any more when this returns.
            host: the address of rank 0's host.
            hosts: each rank's name of its host; at least two ranks.
            may_survive: the attribute.
        """
        watch = cls(rank, timeout, hosts)
        watch.may_survive = may_survive or watch.may_survive
        try:
            watch._connect(store, timeout, host)
        except BaseException:
            watch._close()
            raise
        watch._start()
        return watch

    def guard(self, inner: Communicator, key: str, members: tuple[int, ...]) -> Communicator:
        """Puts a communicator of ``members`` (ranks of the job) under this watch; no other group has its ``key``."""
        check = os.environ.get("BMTRAIN_CHECK", "") not in ("", "0")
        return GuardedCommunicator(inner, self.core, key, list(members), check)

    def why_unconnected(self, seconds: float) -> str:
        """The reason why ranks cannot connect after this time, the same on all ranks; empty while they still may."""
        if self.suspicion.ranks():
            self._tell("failed", "the connection to a rank was lost")
        elif seconds > self._timeout:
            self._tell("late", f"timed out after {self._timeout:g} s")
        return self.core.verdict

    def why_connecting_failed(self) -> str:
        """Names a rank that has exited, if any, after a connection was refused or lost; detected within moments."""
        # The hub leaves last: to the others its end would look like the cause.
        end = time.monotonic() + _NOTICE_SECONDS * (1 if self._hub is None else 2)
        while not (self.core.verdict or self.suspicion.ranks() or self._hub_absent):
            if time.monotonic() > end:
                return ""
            time.sleep(0.02)
        self._tell("failed", "the connection to a rank was lost")
        return self.core.verdict

    def host_of_rank_0(self) -> str:
        """The address at which this rank reaches rank 0; not for rank 0 itself."""
        assert self._line is not None
        return str(self._line.lines.connection.getpeername()[0])

    def own_host(self) -> str:
        """The address from which this rank reaches rank 0; not for rank 0 itself."""
        assert self._line is not None
        return str(self._line.lines.connection.getsockname()[0])

    def listen(self) -> tuple[socket.socket, str]:
        """Listens, on rank 0, on the interface of the hub; returns the socket and an address that leads to it here."""
        assert self._hub is not None
        return self._hub.listen_beside()

    def note_saved(self, resume: str) -> None:
        """Records how to continue from the checkpoint just saved; reports of a failure show it."""
        self.saved = resume
        if self._hub is not None:
            self._hub.resume = resume

    def stop(self) -> None:
        """Ends in good order: the other ranks continue without this one."""
        if self._stopping or os.getpid() != self._pid:
            return
        self._stopping = True
        atexit.unregister(self.stop)
        self._words.restore()
        self.core.attend(False)
        self._words.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._close()

    # Connecting.

    def _connect(self, store: Store, timeout: float, host: str) -> None:
        if self._rank == 0:
            listener, secret = open_hub(store, host, self._hosts)
            self._hub = Hub(
                self._selector,
                listener,
                self._world,
                secret,
                self._handle,
                patience=self._patience,
                on_lines=self._resort.set_lines,
            )
        else:
            lines, secret, self._process_of_rank_0 = reach_hub(store, self._rank, host, self._hosts, timeout)
            neighbours = [rank for rank, name in enumerate(self._hosts) if name == self._hosts[0]]
            self._line = HubLine(lines, neighbours, self._patience)
            self._selector.register(lines.connection, selectors.EVENT_READ, self._read)
            self._resort.set_lines([lines.connection.fileno()])
        self._reporter = Reporter(self._rank, self._world, secret)

    def _start(self) -> None:
        self._selector.register(self.core.wake_fd, selectors.EVENT_READ, self._take)
        self._selector.register(self._words.signals, selectors.EVENT_READ, self._signalled)
        self._words.set()
        atexit.register(self.stop)
        _watches.add(self)
        self.core.attend(True)
        self._thread.start()

    def _close(self) -> None:
        self._resort.set_lines([])
        self._resort.release()
        if self._line is not None:
            if not self._accepted:
                self._line.send({"do": "bye"})
            self._line.close()
        if self._hub is not None:
            self._hub.close()
            self._hub = None  # it holds this object
        self._selector.close()
        self._words.close()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(self._pause()):
                    key.data()
                self._resort.beat()
                if self._hub is not None:
                    self._hub.tick()
                if not self._judged.is_set() and not self._stopping:
                    self._look()
                elif self.core.heard:
                    self._resort.release()
                if self._terminated and time.monotonic() > self._terminated:
                    end_by_signal(signal.SIGTERM)
        finally:
            self.core.attend(False)  # threads that wait for a verdict continue with their own errors

    def _pause(self) -> float:
        times = [time.monotonic() + self._tick]
        if self._hub is not None and self._hub.deadline is not None:
            times.append(self._hub.deadline)
        return max(0.0, min(times) - time.monotonic())

    def _look(self) -> None:
        """Checks conditions that arrive without a message: time-outs, Ctrl-C, a hub that does not answer."""
        if self._line is not None:
            self._line.probe()
        if self._failure is None:
            self._report_failure(self.core.overdue())
            alone = self._hub is None and self._line is None
            self._report_failure(self.suspicion.find(self.core.groups, alone))
            self._inquire()
            if self._interrupted and time.monotonic() > self._interrupted:
                self._interrupted = 0.0
                if self.core.blocked_for(_INTERRUPT_SECONDS):
                    self._report_failure({"kind": "interrupted", "what": "", "group": "", "record": None})
        elif self._hub is None and self._is_hub_overdue():
            self._conclude_without_hub()

    def _inquire(self) -> None:
        """Asks repeatedly, before an operation times out, whether all ranks are alive, and early on about deadlocks."""
        now = time.monotonic()
        if now < self._next_question:
            return
        if self.core.blocked_for(self._patience.calm):
            self._next_question = now + self._patience.period
            self._ask({"do": "inquire"})
        elif self.core.blocked_for(self._wonder):
            self._next_question = now + self._wonder / 2
            self._wonder *= 1.5
            self._ask({"do": "inquire"})
        elif not self.core.blocked_for(_FIRST_QUESTION_SECONDS):
            self._wonder = _FIRST_QUESTION_SECONDS

    def _is_hub_overdue(self) -> bool:
        """Whether the hub is silent: a live hub answers at once, if not with a verdict."""
        if self._line is None or time.monotonic() > self._deadline:
            return True
        return self._line.unheard_for() >= self._patience.silence

    def _take(self) -> None:
        """Takes a failure or fingerprints from the core."""
        self._report_failure(self.core.take_failure())
        for fingerprint in self.core.take_fingerprints():
            members = next((g for g in self.core.groups() if g["group"] == fingerprint["group"]), None)
            if members is not None:
                fingerprint["name"] = members["name"]
                self._send({"do": "check", "print": fingerprint})

    def _report_failure(self, failure: Message | None) -> None:
        if failure is None or self._failure is not None or self._judged.is_set():
            return
        self._failure = {**failure, "rank": self._rank, "time": time.time()}
        self._deadline = time.monotonic() + self._patience.silence + _VERDICT_SECONDS
        self._ask({"do": "fail", "failure": self._failure})
        if self._hub is None and self._is_hub_overdue():
            self._conclude_without_hub()

    def _conclude_without_hub(self) -> None:
        """Concludes without a hub: if the hub did not end in order, that is the failure."""
        if self._failure is None:
            return
        if self._line is not None:
            absent = dict.fromkeys(self._line.out_of_reach(), "silent")
        else:
            others_fault = self._hub_absent.startswith("left") and 0 not in (
                blame.named(self._failure["what"]) or {0}
            )
            if self._hub_absent == "left":
                self._hub_absent = f"left {endings.ending(self._process_of_rank_0, _ENDING_SECONDS)}".strip()
            absent = {} if others_fault else {0: self._hub_absent}
        states = {self._rank: self._state()}
        self._words.delay = ALONE_SECONDS
        self._accept(blame.verdict(self._failure, states, absent))

    def _send(self, message: Message) -> None:
        if self._hub is not None:
            self._hub.handle(self._rank, message)
        elif self._line is not None:
            self._line.send(message)

    def _ask(self, message: Message) -> None:
        """Sends a message that the hub answers."""
        if self._line is None:
            self._send(message)
        else:
            self._line.ask(message)

    def _read(self) -> None:
        messages = None if self._line is None else self._line.receive()
        if messages is None:
            self._lose_hub("gone")
            return
        for message in messages:
            self._handle(message)

    def _lose_hub(self, absence: str) -> None:
        self._resort.set_lines([])
        if self._line is not None:
            self._selector.unregister(self._line.lines.connection)
            self._line.close()
        how = endings.ending(self._process_of_rank_0)  # lost as soon as its parent has collected it
        self._line, self._hub_absent = None, f"{absence} {how}".strip()
        if absence == "gone":
            self.suspicion.add(0)
        self.core.end_checks()  # there is no hub that compares fingerprints

    def _handle(self, message: Message) -> None:
        if message["do"] == "ask":
            self._send({"do": "state", "state": self._state()})
        elif message["do"] == "verdict":
            self._accept(message)
        elif message["do"] == "notice":
            self._reporter.notice(message)
        elif message["do"] == "agreed":
            self.core.release(message["group"], message["sequence"])
        elif message["do"] == "closing":
            self._lose_hub("left")
        elif message["do"] == "gone":
            self.suspicion.add(message["rank"])
        elif message["do"] == "dismissed":
            self._failure = None
            self.suspicion.dismiss()

    def _state(self) -> Message:
        self._seen = self.core.groups(whole=True)
        groups = [{name: group[name] for name in group if name != "records"} for group in self._seen]
        return {"position": self._words.raised_at or position.of_main_thread(), "groups": groups}

    # The verdict.

    def _accept(self, verdict: Message) -> None:
        if self._accepted:
            return
        self._accepted = True
        self._culprits = verdict["culprits"]
        if text := self.may_survive(verdict):
            self.core.condemn(text, survivable=True)
            self._judged.set()
            return
        if self._seen is None:
            self._state()
        self._reported = verdict["text"]
        self._reporter.report(verdict, self._words.raised_at or position.of_main_thread(), self._seen or [])
        if self._rank in verdict["culprits"] and verdict["failure"]["kind"] not in _SELF_ENDING:
            self._resort.accuse(verdict["text"])
        self.core.condemn(verdict["text"])
        self._judged.set()
        self._terminated = min(self._terminated, time.monotonic() + _REPORTED_SECONDS)

    # The interpreter's hooks.

    def _tell(self, kind: str, what: str) -> None:
        if not self._judged.is_set() and not self._stopping:
            self.core.report(kind, what)
            self._judged.wait(self._patience.silence + _VERDICT_SECONDS + 0.5)

    def _is_victim(self, error: BaseException, what: str) -> bool:
        """Whether an exception only repeats a reported verdict: the same exception, or one that it caused."""
        self._resort.release()
        verdict = self._reported
        if not isinstance(error, CommunicationError):
            return f" raised {what}" in verdict
        context = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if not verdict or verdict not in str(error) or not isinstance(context, CommunicationError | None):
            return False
        return self._terminated > 0 or list(self._culprits)[:1] != [self._rank]

    def _signalled(self) -> None:
        """Handles a signal, or the wake-up by `stop`."""
        interrupted, terminated = self._words.take()
        if interrupted:
            self._interrupted = time.monotonic() + _INTERRUPT_SECONDS
        if terminated and not self._terminated:
            # A launcher that has lost a rank ends the others: they first report the lost rank.
            patience = _REPORTED_SECONDS if self._judged.is_set() else _VERDICT_SECONDS
            self._terminated = time.monotonic() + patience
            self._report_failure({"kind": "terminated", "what": "SIGTERM", "group": "", "record": None})

    def _after_fork(self) -> None:
        """In a child: closes its copies of the connections, so that they do not outlive this process."""
        if self._stopping:
            return
        self._words.after_fork()
        if self._line is not None:
            self._line.close()
        if self._hub is not None:
            self._hub.fork_close()


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _close_in_child() -> None:
    for watch in list(_watches):
        watch._after_fork()


os.register_at_fork(after_in_child=_close_in_child)
