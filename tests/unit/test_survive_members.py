"""Connections between the ranks of a job that survives losses, and their agreement."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from bmtrain._survive.members import Address, Line, Lost, Meeting, Members
from bmtrain.errors import CommunicationError

RANKS = 5


Scenario = Callable[[list[Members]], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Has the function called, with ranks of its own, while the others of the module wait."""
    SCENARIOS[function.__name__] = function
    return function


@contextlib.contextmanager
def new_ranks() -> Iterator[list[Members]]:
    members = [Members(rank, "127.0.0.1", False, "secret") for rank in range(RANKS)]
    for one in members:
        one.addresses = [other.own for other in members]
    yield members
    for one in members:
        one.close()


@contextlib.contextmanager
def stopped(ranks: list[Members], *those: int) -> Iterator[None]:
    """Gives ranks addresses at which the system accepts connections and nobody answers, as of a stopped process."""
    with contextlib.ExitStack() as stack:
        ports = {rank: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for rank in those}
        for one in ranks:
            one.addresses = [
                Address("127.0.0.1", ports[rank].getsockname()[1]) if rank in ports else address
                for rank, address in enumerate(one.addresses)
            ]
        yield


def come(rank: Members, lost: dict[int, bool], patience: float = 100.0) -> Meeting:
    def decide(reports: dict[int, Any]) -> dict[str, Any]:
        return {"given": {"by": rank.rank}} if 2 * len(reports) > RANKS else {"why": "too few"}

    return rank.agree({"is": rank.rank}, lost, patience, decide)


def meeting_of(*ranks: int) -> Meeting:
    return Meeting(list(ranks), {rank: {"is": rank} for rank in ranks}, {"by": ranks[0]})


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_so()


def test_ranks_out_of_reach_delay_no_exit() -> None:
    """Comes before all that probe in other threads."""
    with new_ranks() as ranks, stopped(ranks, 0):
        probe = ranks[1]._probe([0], {})[0]
        threads = [thread for thread in threading.enumerate() if thread.name == "bmtrain-probe"]
        assert [thread.daemon for thread in threads] == [True]
        assert not probe.done()


#: What each rank that comes takes for lost, and whether it has heard that those end.
VIEWS = {
    "all alike": {rank: {3: False, 4: False} for rank in range(3)},
    "some are only slow": {0: {1: False, 3: False, 4: False}, 1: {1: False, 4: False}, 2: {0: False}},
    "none sees another": {0: dict.fromkeys((1, 2, 3, 4), False), 1: {0: False}, 2: {0: False, 1: False}},
    "one has raised": {0: {3: True, 4: False}, 1: {0: False}, 2: {3: True}},
}


def all_that_are_there_meet(views: str, ranks: list[Members]) -> None:
    with stopped(ranks, 3, 4), ThreadPoolExecutor() as pool:
        calls = [pool.submit(come, ranks[rank], lost) for rank, lost in VIEWS[views].items()]
        assert [call.result() for call in calls] == [meeting_of(0, 1, 2)] * 3


SCENARIOS.update(
    {f"all_that_are_there_meet: {views}": partial(all_that_are_there_meet, views) for views in VIEWS}
)


@scenario
def ranks_out_of_reach_cost_no_more_than_one_of_them(ranks: list[Members]) -> None:
    """The others would not wait at the first rank until it has tried one after the other."""
    with stopped(ranks, 3, 4), ThreadPoolExecutor() as pool:
        calls = [pool.submit(come, ranks[rank], {}, 1.0) for rank in range(3)]
        assert [call.result() for call in calls] == [meeting_of(0, 1, 2)] * 3


@scenario
def the_search_for_the_first_rank_takes_nothing_from_the_time_to_come(ranks: list[Members]) -> None:
    """A rank that does not answer is given up after 5 s; the others begin 2 s apart, and wait 6 s for each other."""
    with stopped(ranks, 0, 4), ThreadPoolExecutor() as pool:
        calls = [pool.submit(come, ranks[1], {}, 6.0)]
        time.sleep(2.0)
        calls += [pool.submit(come, ranks[rank], {}, 6.0) for rank in (2, 3)]
        assert [call.result() for call in calls] == [meeting_of(1, 2, 3)] * 3


@scenario
def connections_that_say_nothing_do_not_make_a_rank_look_lost(ranks: list[Members]) -> None:
    silent = [socket.create_connection(ranks[0].own) for _ in range(20)]
    with stopped(ranks, 3, 4), ThreadPoolExecutor() as pool:
        calls = [pool.submit(come, ranks[rank], {0: False, 3: False, 4: False}, 20.0) for rank in range(3)]
        assert [call.result() for call in calls] == [meeting_of(0, 1, 2)] * 3
    for connection in silent:
        connection.close()


@scenario
def one_that_does_not_know_the_secret_is_not_let_in(ranks: list[Members]) -> None:
    for message in (
        {"do": "join", "secret": "guess", "address": ranks[1].own},
        {"do": "probe", "epoch": 0, "rank": 1},
        {"do": "report", "report": {}, "epoch": 0, "rank": 1, "secret": "guess"},
        {"do": "report", "report": {}, "rank": 1, "secret": "secret"},
    ):
        line = Line.to(ranks[0].own)
        line.send(message)
        with pytest.raises(Lost):
            line.receive(10.0)
        line.close()
    assert ranks[0].newcomer() is None and ranks[0]._arrived.empty()


@scenario
def ranks_meet_again_in_an_epoch_after_a_try_that_failed(ranks: list[Members]) -> None:
    """What the first one left at a rank that was not to lead then does not make another one look lost."""
    report = Line.to(ranks[1].own)
    report.send({"do": "report", "report": {}, "epoch": 0, "rank": 2, "secret": "secret"})
    assert report.receive(10.0) == {"do": "wait"}
    report.close()
    with stopped(ranks, 0, 4), ThreadPoolExecutor() as pool:
        calls = [pool.submit(come, ranks[1], {0: False, 4: False})]
        calls.append(pool.submit(come, ranks[3], {0: False}))
        wait_until(lambda: 3 in ranks[1]._waiting)
        calls.append(pool.submit(come, ranks[2], {0: False}))
        assert [call.result() for call in calls] == [meeting_of(1, 2, 3)] * 3


@scenario
def a_rank_that_turns_up_leads_those_that_have_met_without_it(ranks: list[Members]) -> None:
    with ThreadPoolExecutor() as pool:
        with stopped(ranks, 0):
            calls = [pool.submit(come, ranks[rank], {0: False}) for rank in (1, 2)]
            wait_until(lambda: len(ranks[1]._waiting) == 1)
            for one in ranks:
                one.addresses[0] = ranks[0].own
            calls.insert(0, pool.submit(come, ranks[0], {}))
            wait_until(lambda: len(ranks[0]._waiting) == 2)
        calls += [pool.submit(come, ranks[rank], {}) for rank in (3, 4)]
        assert [call.result() for call in calls] == [meeting_of(0, 1, 2, 3, 4)] * 5


@scenario
def a_rank_that_waits_at_another_than_the_first_comes_when_that_calls(ranks: list[Members]) -> None:
    with ThreadPoolExecutor() as pool, stopped([ranks[2]], 0):
        calls = [pool.submit(come, ranks[2], {0: False})]
        wait_until(lambda: ranks[1]._arrived.qsize() == 2)  # a probe, and a report
        ranks[2].addresses[0] = ranks[0].own
        calls += [pool.submit(come, ranks[rank], {}) for rank in (0, 1, 3, 4)]
        assert [call.result() for call in calls] == [meeting_of(0, 1, 2, 3, 4)] * 5


@scenario
def a_rank_that_comes_too_late_gets_an_error(ranks: list[Members]) -> None:
    late, others = ranks[0], [1, 2, 3, 4]
    with stopped(ranks[1:], 0), ThreadPoolExecutor() as pool:
        calls = [pool.submit(come, ranks[rank], {0: False}) for rank in others]
        assert [call.result() for call in calls] == [meeting_of(*others)] * 4
    for rank in others:
        ranks[rank].advance(others)
    with pytest.raises(CommunicationError, match="rank 0 did not answer for too long"):
        come(late, {})


@scenario
def a_connection_of_a_past_agreement_is_closed_by_a_rank_that_did_not_lead_it(
    ranks: list[Members],
) -> None:
    leader = Line.to(ranks[1].own)
    leader.send({"do": "probe", "epoch": 0, "rank": 0, "secret": "secret"})
    assert leader.receive(10.0) == {"do": "wait"}
    assert not leader.is_closed()
    end = time.monotonic() + 10
    while not leader.is_closed() and time.monotonic() < end:
        ranks[1].advance([0, 1])
        time.sleep(0.01)
    assert leader.is_closed()
    leader.close()


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, Future[None]]]:
    def run(function: Scenario) -> None:
        with new_ranks() as ranks:
            function(ranks)

    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        yield {name: pool.submit(run, function) for name, function in SCENARIOS.items()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, running: dict[str, Future[None]]) -> None:
    running[name].result()
