"""Connections between the ranks of a job that survives losses."""

from __future__ import annotations

import time

from bmtrain._survive.members import Line, Members


def test_a_connection_of_a_past_agreement_is_closed_by_a_rank_that_did_not_lead_it() -> None:
    rank = Members(1, "127.0.0.1", False, "secret")
    rank.addresses = [rank.own, rank.own]
    leader = Line.to(rank.own)
    leader.send({"do": "probe", "epoch": 0, "rank": 0, "secret": "secret"})
    assert leader.receive(10.0) == {"do": "wait"}
    assert not leader.is_closed()
    end = time.monotonic() + 10
    while not leader.is_closed() and time.monotonic() < end:
        rank.advance([0, 1])
        time.sleep(0.01)
    assert leader.is_closed()
    leader.close()
    rank.close()
