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
from pathlib import Path

from torch.distributed import Store

from . import _C, _blame, _position
from ._last_words import LastWords
from ._watch_hub import Hub, Lines, Message, listen
from .errors import CommunicationError

__all__ = ["Watch", "transport_timeout"]

# The longest time between two looks for time-outs, and how long the hub may take for a verdict: longer than it
# gives the ranks.
_TICK_SECONDS = 0.2
_VERDICT_SECONDS = 3.5
_LATE_VERDICT_SECONDS = 7.0
# The share of a short time-out that an operation has to last before this process asks whether all are still there.
_CALM_SHARE = 0.2
# How long an operation may go on that waits for a rank that is gone, and when to ask again if that was in order.
_GONE_SECONDS = 0.3
_GONE_ALONE_SECONDS = 1.5
_GONE_AGAIN_SECONDS = 2.0
# Ctrl-C: how long an operation that somebody waits for may still take to end by itself.
_INTERRUPT_SECONDS = 0.3


def transport_timeout(timeout: float) -> float:
    """When a transport gives up by itself: after the watchdog, which can say why."""
    return timeout + 10.0


class Watch:
    """The watchdog of this process. Made by `Watch.join`; `stop` ends it.

    Attributes:
        core: what communicators are guarded with.
    """

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        self.core = _C.Watchdog(timeout)
        self._rank = rank
        self._world = world
        self._tick = min(_TICK_SECONDS, timeout / 4)
        # An operation that has taken so long will soon be late.
        self._calm = max(timeout - _LATE_VERDICT_SECONDS, _CALM_SHARE * timeout)
        self._worries = False  # about such an operation
        self._unheard: float | None = None  # since when the hub has not answered that
        self._selector = selectors.DefaultSelector()
        self._hub: Hub | None = None
        self._line: Lines | None = None  # to the hub; None on rank 0, and when the hub is gone
        self._hub_absent = ""
        self._failure: Message | None = None  # handed in, not judged yet
        self._deadline = 0.0
        self._seen: list[Message] | None = None  # what this process was doing when it was asked
        self._judged = threading.Event()
        self._stopping = False
        self._pid = os.getpid()
        self._interrupted = 0.0
        self._gone: dict[int, float] = {}  # ranks whose connection ended without a word, and when
        self._thread = threading.Thread(target=self._run, name="bmtrain-watchdog", daemon=True)
        self._words = LastWords(self._tell)

    @classmethod
    def join(
        cls, store: Store, rank: int, world: int, timeout: float, host: str, several_hosts: bool
    ) -> Watch:
        """Connect with the other ranks' watchdogs and start. Collective over all ranks of the job.

        Args:
            store: where the ranks met; not needed any more when this returns.
            rank: this rank.
            world: number of ranks, at least 2.
            timeout: seconds after which an operation that somebody waits for is given up.
            host: how the other ranks reach the host of rank 0.
            several_hosts: whether there are ranks on other hosts.

        Raises:
            CommunicationError: the watchdog of rank 0 cannot be reached.
        """
        watch = cls(rank, world, timeout)
        try:
            watch._connect(store, timeout, host, several_hosts)
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

    def host_of_rank_0(self) -> str:
        """Where this rank reaches rank 0; on rank 0 itself, this host."""
        return "localhost" if self._line is None else str(self._line.connection.getpeername()[0])

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

    def _connect(self, store: Store, timeout: float, host: str, several_hosts: bool) -> None:
        if self._rank == 0:
            listener, address = listen(host, several_hosts)
            secret = secrets.token_hex(16)
            self._hub = Hub(self._selector, listener, self._world, secret, self._handle)
            store.set("watch", json.dumps([address, listener.getsockname()[1], secret]))
            return
        try:
            address, port, secret = json.loads(store.get("watch"))
            line = Lines(socket.create_connection((address, port), timeout))
            line.connection.settimeout(timeout)
            line.send({"do": "hello", "rank": self._rank, "secret": secret})
            if not line.receive():
                raise ConnectionError("it refused this rank")
            line.connection.settimeout(0.5)
        except (OSError, RuntimeError) as error:
            raise CommunicationError(
                f"rank {self._rank} of {self._world}: cannot reach the watchdog of rank 0, at a port of its own on "
                f"the host of MASTER_ADDR: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from None
        self._line = line
        self._selector.register(line.connection, selectors.EVENT_READ, self._read)

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
        if self._failure is None:
            self._hand_in(self.core.overdue())
            self._hand_in(self._suspicion())
            self._worry()
            if self._interrupted and time.monotonic() > self._interrupted:
                self._interrupted = 0.0
                if self.core.blocked_for(_INTERRUPT_SECONDS):
                    self._hand_in({"kind": "interrupted", "what": "", "group": "", "record": None})
        elif self._rank != 0 and (self._line is None or time.monotonic() > self._deadline):
            self._judge_alone()

    def _worry(self) -> None:
        """Have everybody asked before an operation is late: who does not answer is then known at the time-out."""
        if not self.core.blocked_for(self._calm):
            self._worries = False
        elif not self._worries:
            self._worries = True
            self._unheard = time.monotonic()
            self._send({"do": "worry"})

    def _suspicion(self) -> Message | None:
        """An operation that has waited too long, by now, for a rank that is gone.

        Transports notice mostly by themselves, but not always: Gloo sometimes loses the end of a connection, and
        shared memory has none. A rank that is gone may have ended well after its last operation, while others are
        still in that one: so the hub first asks whether all who are left have come to it. Without a hub it takes
        longer, and a reduction to one rank does not count, in which a rank may be ahead of the others.
        """
        now = time.monotonic()
        alone = self._hub is None and self._line is None
        patience = _GONE_ALONE_SECONDS if alone else _GONE_SECONDS
        gone = {rank for rank, since in self._gone.items() if now - since >= patience}
        for group in self.core.groups() if gone else ():
            for record in group["blocked"]:
                peer = record["peer"]
                awaited = set(group["members"] if peer is None else [group["members"][peer]])
                waited = time.time() - (record["started"] or time.time())
                if awaited & gone and waited >= patience and not (alone and record["op"] == "reduce"):
                    what = f"waits for {_blame.ranks_text(sorted(awaited & gone))}"
                    return {"kind": "suspicion", "what": what, "group": group["group"], "record": record}
        return None

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
        if failure["kind"] == "late":
            self._deadline = (self._unheard or time.monotonic()) + _LATE_VERDICT_SECONDS
        else:
            self._deadline = time.monotonic() + _VERDICT_SECONDS
        self._send({"do": "fail", "failure": self._failure})
        if self._line is None and self._hub is None:
            self._judge_alone()

    def _judge_alone(self) -> None:
        """There is no hub: if it did not end in good order, that is what went wrong."""
        if self._failure is None:
            return
        absent = {} if self._hub_absent == "left" else {0: self._hub_absent or "silent"}
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

    def _read(self) -> None:
        line = self._line
        if line is None:
            return
        try:
            messages = line.receive()
        except ValueError:
            messages = None
        if messages is None:
            self._lose_hub("gone")
            return
        if messages:
            self._unheard = None
        for message in messages:
            self._handle(message)

    def _lose_hub(self, absence: str) -> None:
        if self._line is not None:
            self._selector.unregister(self._line.connection)
            self._line.close()
        self._line, self._hub_absent = None, absence
        if absence == "gone":
            self._gone[0] = time.monotonic()
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
            self._gone[message["rank"]] = time.monotonic()
        elif message["do"] == "dismissed" and self._failure and self._failure["kind"] == "suspicion":
            self._failure = None
            self._gone = dict.fromkeys(self._gone, time.monotonic() + _GONE_AGAIN_SECONDS)

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
        return _blame.write_flight(folder, flight)

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
