"""The rendezvous of ranks: one key-value store, one count of the ranks present, one verdict for all.

[Note: One verdict]
Every rank writes its start-up options and counts itself in. The last one to arrive publishes the table
of all ranks as the verdict; the first rank that finds an error (a second process with its rank, other
sizes than the rest, ranks still missing at the deadline) publishes that instead. All ranks act on the one
verdict, so that all of them succeed or all of them raise the same sentence.

After `init_distributed` no rank uses the store again: the ranks that are still working do not notice when
the process that serves it ends.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from .._base.said import Waiting
from .._watch.blame import ranks_text
from ..errors import BMTrainError, CommunicationError
from .launch import Launch
from .rendezvous_store import first_line, loopback_hint, open_store, server_of, settle_server

# How long the rank that serves the store stays, after an error, for the others to read it.
_LINGER_SECONDS = 5.0


@dataclass(frozen=True)
class Peer:
    """The properties of a rank that all ranks exchange at the start.

    Attributes:
        rank: its number.
        host: identity of its machine.
        pid: its process, for messages.
        local_rank: its number on the machine; None if its launcher does not set it.
        cpus: the processors it may run on.
        cards: names of the cards it can use, in their order, by which ranks of a host know that one is the same.
        seed: the seed that it was given.
        place: equal for ranks that can share memory.
    """

    rank: int
    host: str
    pid: int
    local_rank: int | None
    cpus: str
    cards: list[str]
    seed: int
    place: str = ""


class Rendezvous:
    """The meeting of the ranks of one job, from opening the store to the verdict.

    ``attempt`` counts the calls of `init_distributed` in this process, the same on every rank.
    """

    def __init__(self, launch: Launch, timeout: float, attempt: int) -> None:
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._who = f"rank {launch.rank} of {launch.world_size}"
        self._launch = launch = settle_server(launch)
        root = open_store(launch, timeout)
        self._refuse_other_job(root)
        self.store: Store = PrefixStore(f"bmtrain/{launch.job}/{attempt}", root)

    def agree(self, me: Peer, settings: dict[str, Any]) -> list[Peer]:
        """Waits for every rank, checks that all were started alike, and returns them in rank order."""
        try:
            fault = self._announce(me, settings)
            if fault is not None:
                self._publish(*fault)
            verdict = self._await_verdict()
        except RuntimeError as error:
            if isinstance(error, BMTrainError):
                raise
            raise self._lost(error) from None
        if verdict["error"] is None:
            if fault is not None:  # the others had agreed before this process came
                raise _ERRORS[fault[0]](fault[1])
            return [Peer(**peer) for peer in verdict["peers"]]
        self._linger()
        raise _ERRORS[verdict["error"]](verdict["message"])

    def close(self) -> None:
        """Lets the store go, and with the last rank its file; called when no rank needs the store any more."""
        del self.store

    def _refuse_other_job(self, root: Store) -> None:
        """Raises if the first rank at the address belongs to another job; this rank would wait there for ever."""
        mine = self._launch.job.rpartition("/")[0] or "-"  # without the number of the restart
        try:
            first = root.compare_set("bmtrain/job", "", mine).decode()
        except RuntimeError as error:
            raise self._lost(error) from None
        if first != mine:
            raise BMTrainError(
                f"{self._who}: expected ranks of job {mine!r} at {self._launch.meeting}, got ranks of job {first!r}: "
                "give each job a MASTER_PORT of its own"
            )

    def _lost(self, error: RuntimeError) -> CommunicationError:
        return CommunicationError(
            f"{self._who}: lost the rendezvous at {self._launch.meeting}: {server_of(self._launch)}, which serves it, "
            f"ended: look for its error ({first_line(error)})"
        )

    # The verdict, see [Note: One verdict].

    def _announce(self, me: Peer, settings: dict[str, Any]) -> tuple[str, str] | None:
        """Counts this rank in; returns kind and message of an error of this rank, if any."""
        store, launch = self.store, self._launch
        store.add("present", 1)
        if store.add(f"claimed/{me.rank}", 1) > 1:
            other = "another job on the same port"
            if launch.meeting.scheme == "file":
                other = "a file left over from an earlier run: remove it"
            return "duplicate", (
                f"rank {me.rank} of {launch.world_size} at {launch.meeting}: expected one process with this "
                f"rank, got a second one on {socket.gethostname()}, pid {me.pid} (or {other})"
            )
        mine = {"rank": me.rank, "settings": {"world size": launch.world_size, **settings}}
        if store.add("first", 1) == 1:
            store.set("settings", json.dumps(mine))
        else:
            store.set_timeout(self._remaining())
            difference = _difference(json.loads(store.get("settings")), mine)
            if difference:
                return "value", difference
        store.set(f"peer/{me.rank}", json.dumps(asdict(me)))
        if store.add("arrived", 1) == launch.world_size:
            keys = [f"peer/{rank}" for rank in range(launch.world_size)]
            self._publish(None, "", [json.loads(store.get(key)) for key in keys])
        return None

    def _publish(self, error: str | None, message: str, peers: list[Any] | None = None) -> None:
        """Makes this the verdict unless there is one."""
        if self.store.add("judged", 1) == 1:
            self.store.set("verdict", json.dumps({"error": error, "message": message, "peers": peers}))

    def _await_verdict(self) -> dict[str, Any]:
        pause = 0.005
        waiting = Waiting(f"ranks-{self._launch.meeting.port}-{self._launch.job}")
        while not self.store.check(["verdict"]):
            if time.monotonic() > self._deadline:
                self._publish("missing", self._missing_message())
                self.store.set_timeout(timedelta(seconds=10))
                break
            if waiting.is_due():
                waiting.report(f"{ranks_text(self._missing())} at {self._launch.meeting}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        verdict: dict[str, Any] = json.loads(self.store.get("verdict"))
        return verdict

    def _missing(self) -> list[int]:
        world = self._launch.world_size
        return [rank for rank in range(world) if not self.store.check([f"peer/{rank}"])]

    def _missing_message(self) -> str:
        world, missing = self._launch.world_size, self._missing()
        return (
            f"rendezvous at {self._launch.meeting}: expected {world} ranks within {self._timeout:g} s, got "
            f"{world - len(missing)}; missing {ranks_text(missing)}: see whether they started, and whether their "
            f"errors came first{loopback_hint(self._launch)}"
        )

    def _linger(self) -> None:
        """Waits, if the store ends with this process, until the others have read the verdict."""
        try:
            read = self.store.add("read", 1)
            end = time.monotonic() + _LINGER_SECONDS
            while self._launch.serves and read < self.store.add("present", 0) and time.monotonic() < end:
                time.sleep(0.02)
                read = self.store.add("read", 0)
        except RuntimeError:
            return  # no rank left to wait for
        if self._launch.meeting.scheme == "file" and self._launch.rank == 0:
            Path(self._launch.meeting.path).unlink(missing_ok=True)

    def _remaining(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 1.0))


_ERRORS: dict[str, type[Exception]] = {
    "value": ValueError,
    "duplicate": BMTrainError,
    "missing": CommunicationError,
}


def _difference(first: dict[str, Any], mine: dict[str, Any]) -> str | None:
    """One sentence about the first setting in which two ranks differ."""
    for name, value in mine["settings"].items():
        expected = first["settings"].get(name)
        if expected != value:
            return (
                f"{name}: expected the same on every rank, got {expected!r} on rank {first['rank']} and "
                f"{value!r} on rank {mine['rank']}"
            )
    return None
