"""One thread per process that watches over its communication: time-outs, the other ranks' failures, Ctrl-C.

[Note: One watchdog]
What one thread sees of a failure is seldom its cause: when a rank dies, its neighbours lose a connection, abort, and
so look dead to the next ones. So nobody raises what he saw. It is handed to the hub (`bmtrain/_watch_hub.py`, in the
process of rank 0), which asks all ranks what they are doing, decides, and tells everybody the same sentence; only then
are communicators aborted. If the hub does not answer, or is gone, that is the finding.

The store of the rendezvous is not used for it, although all ranks know it: its client waits without a limit for a
server that is stopped, and writes a warning when the server ends, as the process of rank 0 may at any time. It only
carries the hub's address and the secret with which ranks are let in.

The thread sleeps until something happens and looks for time-outs a few times a second. It takes the interpreter's lock
for microseconds, and needs nothing from the script's thread: that one waits with the lock released.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import Store

from . import _C, _blame, _flights, _position
from ._last_words import LastWords
from ._suspicion import Suspicion
from ._watch_hub import Hub
from ._watch_lines import HubLine, Lines, Message, Patience, listen
from .errors import CommunicationError

__all__ = ["Watch", "transport_timeout"]

# The longest time between two looks for time-outs, and how long the hub may take for a verdict: longer than it
# gives the ranks.
_TICK_SECONDS = 0.2
_VERDICT_SECONDS = 3.5
_LATE_VERDICT_SECONDS = 1.6
# Ctrl-C: how long an operation that somebody waits for may still take to end by itself.
_INTERRUPT_SECONDS = 0.3


def transport_timeout(timeout: float) -> float:
    """When a transport gives up by itself: after the watchdog, which can say why."""
    return timeout + 10.0


class Watch:
    """The watchdog of this process. Made by `Watch.join`; `stop` ends it.

    Attributes:
        core: what communicators are guarded with.
        suspicion: which ranks are gone.
    """

    def __init__(self, rank: int, timeout: float, hosts: Sequence[str]) -> None:
        self.core = _C.Watchdog(timeout)
        self._timeout = timeout
        self._rank = rank
        self._world = len(hosts)
        self._hosts = hosts
        self._tick = min(_TICK_SECONDS, timeout / 4)
        self._patience = Patience.of(timeout)
        self._next_question = 0.0  # whether all are still there; not before this
        self._selector = selectors.DefaultSelector()
        self._hub: Hub | None = None
        self._line: HubLine | None = None  # to the hub; None on rank 0, and when the hub is gone
        self._hub_absent = ""
        self._failure: Message | None = None  # handed in, not judged yet
        self._deadline = 0.0
        self._seen: list[Message] | None = None  # what this process was doing when it was asked
        self._judged = threading.Event()
        self._stopping = False
        self._pid = os.getpid()
        self._interrupted = 0.0
        self.suspicion = Suspicion()
        self._thread = threading.Thread(target=self._run, name="bmtrain-watchdog", daemon=True)
        self._words = LastWords(self._tell)

    @classmethod
    def join(cls, store: Store, rank: int, *, timeout: float, host: str, hosts: Sequence[str]) -> Watch:
        """Connect with the other ranks' watchdogs and start. Collective over all ranks of the job.

        Args:
            store: where the ranks met; not needed any more when this returns.
            rank: this rank.
            timeout: seconds after which an operation that somebody waits for is given up.
            host: how the other ranks reach the host of rank 0.
            hosts: what each rank calls its host; at least two ranks.

        Raises:
            CommunicationError: the watchdog of rank 0 cannot be reached.
        """
        watch = cls(rank, timeout, hosts)
        try:
            watch._connect(store, timeout, host)
        except BaseException:
            watch._close()
            raise
        watch._start()
        return watch

    def guard(self, inner: _C.Communicator, key: str, members: tuple[int, ...]) -> _C.Communicator:
        """Put a communicator under this watch.

        Args:
            inner: the communicator.
            key: a name that no other group of the job has.
            members: its ranks in the job, in group order.
        """
        check = os.environ.get("BMTRAIN_CHECK", "") not in ("", "0")
        return _C.GuardedCommunicator(inner, self.core, key, list(members), check)

    def why_unconnected(self, seconds: float) -> str:
        """Why ranks that have tried to connect for so long never will, which all are told; empty while they may."""
        if self.suspicion.ranks():
            self._tell("failed", "the connection to a rank was lost")
        elif seconds > self._timeout:
            self._tell("late", f"timed out after {self._timeout:g} s")
        return self.core.verdict

    def host_of_rank_0(self) -> str:
        """Where this rank reaches rank 0; on rank 0 itself, this host."""
        return "localhost" if self._line is None else str(self._line.lines.connection.getpeername()[0])

    def stop(self) -> None:
        """End in good order: the other ranks go on without this one."""
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
            listener, address = listen(host, len(set(self._hosts)) > 1)
            secret = secrets.token_hex(16)
            self._hub = Hub(
                self._selector, listener, self._world, secret, self._handle, patience=self._patience
            )
            store.set("watch", json.dumps([address, listener.getsockname()[1], secret]))
            return
        try:
            address, port, secret = json.loads(store.get("watch"))
            lines = Lines(socket.create_connection((address, port), timeout))
            lines.connection.settimeout(timeout)
            lines.send({"do": "hello", "rank": self._rank, "secret": secret})
            if not lines.receive():
                raise ConnectionError("it refused this rank")
            lines.connection.settimeout(0.5)
        except (OSError, RuntimeError) as error:
            raise CommunicationError(
                f"rank {self._rank} of {self._world}: cannot reach the watchdog of rank 0, at a port of its own on "
                f"the host of MASTER_ADDR: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from None
        neighbours = [rank for rank, name in enumerate(self._hosts) if name == self._hosts[0]]
        self._line = HubLine(lines, neighbours, self._patience)
        self._selector.register(lines.connection, selectors.EVENT_READ, self._read)

    def _start(self) -> None:
        self._selector.register(self.core.wake_fd, selectors.EVENT_READ, self._take)
        self._selector.register(self._words.signals, selectors.EVENT_READ, self._signalled)
        self._words.set()
        atexit.register(self.stop)
        _watches.add(self)
        self.core.attend(True)
        self._thread.start()

    def _close(self) -> None:
        if self._line is not None:
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
                if self._hub is not None:
                    self._hub.tick()
                if not self._judged.is_set() and not self._stopping:
                    self._look()
        finally:
            self.core.attend(False)  # whoever waits for a verdict goes on with what he saw

    def _pause(self) -> float:
        times = [time.monotonic() + self._tick]
        if self._hub is not None and self._hub.deadline is not None:
            times.append(self._hub.deadline)
        return max(0.0, min(times) - time.monotonic())

    def _look(self) -> None:
        """What happens without a message: time-outs, Ctrl-C, a hub that does not answer."""
        if self._line is not None:
            self._line.probe()
        if self._failure is None:
            self._hand_in(self.core.overdue())
            alone = self._hub is None and self._line is None
            self._hand_in(self.suspicion.find(self.core.groups, alone))
            self._inquire()
            if self._interrupted and time.monotonic() > self._interrupted:
                self._interrupted = 0.0
                if self.core.blocked_for(_INTERRUPT_SECONDS):
                    self._hand_in({"kind": "interrupted", "what": "", "group": "", "record": None})
        elif self._hub is None and self._is_hub_overdue():
            self._judge_alone()

    def _inquire(self) -> None:
        """Ask again and again, before an operation is late, whether all are there."""
        now = time.monotonic()
        if now >= self._next_question and self.core.blocked_for(self._patience.calm):
            self._next_question = now + self._patience.period
            self._ask({"do": "inquire"})

    def _is_hub_overdue(self) -> bool:
        """Whether there is nobody to wait for: a hub that is there answers at once, if not with a verdict."""
        if self._line is None or time.monotonic() > self._deadline:
            return True
        return self._line.unheard_for() >= min(self._patience.silence, _LATE_VERDICT_SECONDS)

    def _take(self) -> None:
        """Something from the core: a failure, or fingerprints."""
        self._hand_in(self.core.take_failure())
        for fingerprint in self.core.take_fingerprints():
            members = next((g for g in self.core.groups() if g["group"] == fingerprint["group"]), None)
            if members is not None:
                fingerprint["name"] = members["name"]
                self._send({"do": "check", "print": fingerprint})

    def _hand_in(self, failure: Message | None) -> None:
        if failure is None or self._failure is not None or self._judged.is_set():
            return
        self._failure = {**failure, "rank": self._rank, "time": time.time()}
        late = failure["kind"] == "late"
        self._deadline = time.monotonic() + (_LATE_VERDICT_SECONDS if late else _VERDICT_SECONDS)
        self._ask({"do": "fail", "failure": self._failure})
        if self._hub is None and self._is_hub_overdue():
            self._judge_alone()

    def _judge_alone(self) -> None:
        """There is no hub: if it did not end in good order, that is what went wrong."""
        if self._failure is None:
            return
        if self._line is not None:
            absent = dict.fromkeys(self._line.out_of_reach(), "silent")
        else:
            absent = {} if self._hub_absent == "left" else {0: self._hub_absent}
        states = {self._rank: self._state()}
        found = _blame.judge(self._failure, states, absent)
        self._accept(
            {
                "text": found.text,
                "culprits": found.culprits,
                "table": _blame.table(states, absent),
                "absent": absent,
                "failure": self._failure,
            }
        )

    def _send(self, message: Message) -> None:
        if self._hub is not None:
            self._hub.handle(self._rank, message)
        elif self._line is not None:
            self._line.send(message)

    def _ask(self, message: Message) -> None:
        """Send what the hub answers."""
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
        if self._line is not None:
            self._selector.unregister(self._line.lines.connection)
            self._line.close()
        self._line, self._hub_absent = None, absence
        if absence == "gone":
            self.suspicion.add(0)
        self.core.end_checks()  # nobody compares fingerprints any more

    def _handle(self, message: Message) -> None:
        if message["do"] == "ask":
            self._send({"do": "state", "state": self._state()})
        elif message["do"] == "verdict":
            self._accept(message)
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
        return {"position": self._words.raised_at or _position.of_main_thread(), "groups": groups}

    # The verdict.

    def _accept(self, verdict: Message) -> None:
        if self._judged.is_set():
            return
        self._judged.set()
        lines = [f"bmtrain: rank {self._rank} of {self._world} gives up: {verdict['text']}"]
        lines += [f"    {line}" for line in verdict["table"]]
        folder = os.environ.get("BMTRAIN_FLIGHT_DIR")
        if folder:
            lines.append(f"    flight record: {self._write_flight(Path(folder), verdict)}")
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()
        self.core.condemn(verdict["text"])

    def _write_flight(self, folder: Path, verdict: Message) -> str:
        """Write what this rank's last operations were; says where, or why not."""
        if self._seen is None:
            self._state()
        flight = {
            "rank": self._rank,
            "world_size": self._world,
            "host": socket.gethostname(),
            "pid": self._pid,
            "verdict": verdict["text"],
            "failure": verdict["failure"],
            "absent": verdict["absent"],
            "position": self._words.raised_at or _position.of_main_thread(),
            "groups": self._seen,
        }
        return _flights.write_flight(folder, flight)

    # The interpreter's hooks.

    def _tell(self, kind: str, what: str) -> None:
        if not self._judged.is_set() and not self._stopping:
            self.core.report(kind, what)
            self._judged.wait(_VERDICT_SECONDS + 0.5)

    def _signalled(self) -> None:
        """A signal came, or `stop` did."""
        if self._words.interrupted():
            self._interrupted = time.monotonic() + _INTERRUPT_SECONDS

    def _after_fork(self) -> None:
        """In a child: its copies of the connections must not outlive this process, nor its signals reach it."""
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
