"""The watchdogs of several ranks, all in this process: what they make of each other's failures."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from bmtrain._watch import hub as _watch_hub
from bmtrain._watch.hub import Hub
from bmtrain._watch.lines import HubLine, Lines, Patience, listen
from bmtrain._watch.watchdog import Watch
from bmtrain.errors import CommunicationError

WORLD = 4


def join(store: HashStore, rank: int, world: int = WORLD, timeout: float = 60.0) -> Watch:
    """The first two ranks are on one host, the others on another."""
    hosts = [f"host {rank // 2}" for rank in range(world)]
    return Watch.join(store, rank, timeout=timeout, host="localhost", hosts=hosts)


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    store = HashStore()
    made = [join(store, rank) for rank in range(WORLD)]
    yield made
    for watch in made:
        watch.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "bmtrain-watchdog"]


def await_(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def verdicts(watches: list[Watch]) -> set[str]:
    """What all of these were told."""
    await_(lambda: all(watch.core.verdict for watch in watches))
    return {watch.core.verdict for watch in watches}


def vanish(watch: Watch) -> None:
    """As the kernel does when a process is killed: its connection ends without a word."""
    assert watch._line is not None
    watch._line.lines.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("reporter", [0, 2])
def test_an_exception_on_one_rank_reaches_all(watches: list[Watch], reporter: int) -> None:
    watches[reporter].core.report("exception", "ValueError: no")
    assert verdicts(watches) == {f"rank {reporter} raised ValueError: no"}


def test_the_first_failure_wins(watches: list[Watch]) -> None:
    watches[1].core.report("exception", "KeyError: 'x'")
    first = verdicts(watches)
    watches[3].core.report("exception", "ValueError: later")
    assert verdicts(watches) == first == {"rank 1 raised KeyError: 'x'"}


def test_a_victim_does_not_blame_a_victim(watches: list[Watch]) -> None:
    vanish(watches[2])
    watches[1].core.report("failed", "the connection to rank 3 was lost")
    survivors = [watches[rank] for rank in (0, 1, 3)]
    assert verdicts(survivors) == {"rank 2 died: connections closed without a word"}


def test_a_rank_that_ended_in_good_order_is_no_failure(watches: list[Watch]) -> None:
    watches[3].stop()
    time.sleep(0.3)
    assert not any(watch.core.verdict for watch in watches)
    watches[1].core.report("failed", "the connection to rank 3 was lost")
    assert verdicts(watches[:3]) == {"rank 3 ended while others still wait"}


def test_rank_0_calls_its_host_by_a_name_that_leads_elsewhere_to_another() -> None:
    """``MASTER_ADDR=localhost`` on the first of several hosts: the others take the address they were given."""
    store, hosts = HashStore(), ["one", "two"]
    names = ["localhost", "127.0.0.2"]
    made: list[Watch] = []

    def start(rank: int) -> None:
        made.append(Watch.join(store, rank, timeout=30.0, host=names[rank], hosts=hosts))

    threads = [threading.Thread(target=start, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = max(made, key=lambda watch: watch._rank)
    assert other.host_of_rank_0().removeprefix("::ffff:") == "127.0.0.2"
    for watch in made:
        watch.stop()


def test_the_hub_is_lost(watches: list[Watch]) -> None:
    """Each judges by itself, alike."""
    for watch in watches[1:]:
        vanish(watch)
    for watch in watches[1:]:
        watch.core.report("failed", "the connection to somebody was lost")
    assert verdicts(watches[1:]) == {"rank 0 died: connections closed without a word"}


def test_the_hub_ends_in_good_order(watches: list[Watch]) -> None:
    watches[0].stop()
    await_(lambda: all(watch._hub_absent == "left" for watch in watches[1:]))
    watches[2].core.report("failed", "the connection to rank 1 was lost")
    assert verdicts(watches[2:3]) == {"rank 2: the connection to rank 1 was lost"}
    watches[3].core.report("failed", "the connection to rank 0 was lost")
    assert verdicts(watches[3:]) == {"rank 0 ended while others still wait"}


def test_a_silent_hub_is_blamed(watches: list[Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches[2], "_patience", Patience.of(1.0))
    monkeypatch.setattr(Hub, "handle", lambda *arguments: None)
    watches[2].core.report("failed", "the connection to rank 1 was lost")
    assert verdicts(watches[2:3]) == {"no answer from rank 0: stopped, stuck, or out of reach"}


class Clock:
    """Stands for the module ``time`` of the hub."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Clock, list[str]]]:
    """A hub of three ranks that tells rank 0 alone, its clock, and the verdicts that it has told."""
    clock, told = Clock(), []
    monkeypatch.setattr(_watch_hub, "time", clock)

    def tell(message: dict[str, str]) -> None:
        told.extend(filter(None, [message.get("text", message["do"] == "dismissed" and "dismissed")]))

    with selectors.DefaultSelector() as selector, socket.create_server(("localhost", 0)) as listener:
        yield Hub(selector, listener, 3, "", tell, patience=Patience.of(60.0)), clock, told


LATE = {"kind": "late", "what": "timed out after 60 s", "rank": 1, "group": "", "record": None}
STATE = {"do": "state", "state": {"position": "", "groups": []}}
SILENT = "no answer from rank 2: stopped, stuck, or out of reach (timed out after 60 s)"


def test_who_is_silent_before_the_time_out_is_named_at_it(hub: tuple[Hub, Clock, list[str]]) -> None:
    judge, clock, told = hub
    for _ in range(7):
        judge.handle(1, {"do": "inquire"})
        for rank in (0, 1):
            judge.handle(rank, STATE)
        clock.now += 1
    judge.handle(1, {"do": "fail", "failure": dict(LATE)})
    for rank in (0, 1):
        judge.tick()
        assert told == []  # the others have time to say what they are in now
        judge.handle(rank, STATE)
    judge.tick()
    assert told == [SILENT]


@pytest.mark.parametrize(("ago", "verdict"), [(7, "rank 1: timed out after 60 s"), (8, SILENT)])
def test_who_answered_before_the_time_out_is_not_silent(
    hub: tuple[Hub, Clock, list[str]], ago: int, verdict: str
) -> None:
    """What it said since the first question counts, a second after the time-out; not what it said before."""
    judge, clock, told = hub
    judge.handle(1, {"do": "inquire"})
    for rank in (0, 1, 2):
        judge.handle(rank, STATE)
    clock.now += ago
    judge.handle(1, {"do": "fail", "failure": dict(LATE)})
    for rank in (0, 1):
        judge.handle(rank, STATE)
    judge.tick()
    assert told == []
    clock.now += 1
    judge.tick()
    assert told == [verdict]


def test_who_never_answered_is_silent(hub: tuple[Hub, Clock, list[str]]) -> None:
    judge, clock, told = hub
    judge.handle(1, {"do": "fail", "failure": dict(LATE)})
    for rank in (0, 1):
        judge.handle(rank, STATE)
    clock.now += 1
    judge.tick()
    assert told == [SILENT]


@pytest.mark.parametrize("timeout", [2.0, 3.0, 9.0, 600.0])
def test_silence_is_known_at_any_time_out(timeout: float) -> None:
    """With two looks (five a second) to spare: one until the first question, one until the time-out is seen."""
    patience = Patience.of(timeout)
    assert patience.calm + patience.silence + 2 * 0.2 <= timeout
    assert patience.silence >= 2 * patience.period  # one answer may come late


def blocked(sequence: int, posted: int) -> dict[str, object]:
    """A rank that waits in a collective of all three, and has come to the ones before."""
    record = {
        "id": sequence,
        "sequence": sequence,
        "peer": None,
        "text": f"barrier #{sequence}",
        "started": 1.0,
    }
    group = {"group": "zero", "name": "zero", "members": [0, 1, 2], "posted": posted, "blocked": [record]}
    return {"do": "state", "state": {"position": "", "groups": [{**group, "last": None}]}}


def suspicion(rank: int, sequence: int) -> dict[str, object]:
    record = {"id": sequence, "sequence": sequence, "peer": None, "text": f"barrier #{sequence}"}
    failure = {"kind": "suspicion", "what": "waits for rank 2", "group": "zero", "record": record}
    return {"do": "fail", "failure": {**failure, "rank": rank}}


def test_one_rank_in_order_does_not_dismiss_what_another_suspects(hub: tuple[Hub, Clock, list[str]]) -> None:
    """Rank 0 waits for rank 1, which is in the operation before, with a rank that is gone."""
    judge, _, told = hub
    judge._absent[2] = "gone"
    judge.handle(0, suspicion(0, 8))
    judge.handle(0, blocked(8, 9))
    judge.handle(1, suspicion(1, 7))
    judge.handle(1, blocked(7, 8))
    assert told[-1] == "rank 2 died: connections closed without a word"


def test_what_is_in_order_is_dismissed(hub: tuple[Hub, Clock, list[str]]) -> None:
    judge, _, told = hub
    judge._absent[2] = "gone"
    judge.handle(0, suspicion(0, 8))
    judge.handle(0, blocked(8, 9))
    judge.handle(1, blocked(7, 8))
    assert told[-1] == "dismissed"


def test_a_hub_that_was_silent_before_the_time_out_is_blamed_at_it(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "handle", lambda *arguments: None)
    watch = watches[2]
    assert watch._line is not None
    watch._line._unheard = time.monotonic() - 7.0  # it was asked then
    watch._report_failure(dict(LATE))
    assert verdicts([watch]) == {
        "no answer from rank 0: stopped, stuck, or out of reach (timed out after 60 s)"
    }


def test_a_silent_hub_whose_host_takes_no_connection_is_out_of_reach_with_its_host() -> None:
    listener = socket.create_server(("localhost", 0))
    lines = Lines(socket.create_connection(listener.getsockname()))
    line = HubLine(lines, [0, 1], Patience.of(60.0))
    try:
        for takes, expected in ((True, [0]), (False, [0, 1])):
            if not takes:
                listener.close()
            line._end_probe()
            line._unheard = time.monotonic() - 60.0
            line.probe()
            assert line.unheard_for() >= 60.0
            assert line.out_of_reach() == expected
    finally:
        line.close()
        listener.close()


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    store = HashStore()
    first = join(store, 0, 2)
    try:
        address, port, _ = json.loads(store.get("watch"))
        for line in (b'{"rank": 1, "secret": "guess"}\n', b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[]\n"):
            with socket.create_connection((address, port), 10) as stranger:
                stranger.sendall(line)
                assert stranger.recv(100) == b""  # closed without an answer
        store.set("watch", json.dumps([address, port, "guess"]))
        with pytest.raises(CommunicationError, match="before its watchdog let this rank in"):
            join(store, 1, 2, 10.0)
        assert not first.core.verdict
    finally:
        first.stop()


def test_messages_are_put_together() -> None:
    left, right = socket.socketpair()
    lines = Lines.__new__(Lines)
    lines.connection, lines._rest, lines.longest = right, b"", None
    left.sendall(b'{"do": "a"}\n{"do"')
    assert lines.receive() == [{"do": "a"}]
    left.sendall(b': "b"}\n')
    assert lines.receive() == [{"do": "b"}]
    left.close()
    assert lines.receive() is None
    lines.close()


EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "several_hosts", "interface"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("127.0.0.1", True, EVERYWHERE),  # leads here on this host only
        ("localhost", True, EVERYWHERE),
        ("no.such.host.invalid", True, EVERYWHERE),
    ],
)
def test_the_hub_is_served_where_the_launcher_says(host: str, several_hosts: bool, interface: str) -> None:
    listener, _ = listen(host, several_hosts)
    with listener:
        assert listener.getsockname()[0] == interface


def test_the_hub_is_not_served_on_all_interfaces_of_a_host_with_an_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but 127.0.0.1")
        own = probe.getsockname()[0]
    listener, told = listen(own, True)
    with listener:
        assert listener.getsockname()[0] == told == own
