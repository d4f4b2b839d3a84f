"""How soon a rank ends by itself. The limits are what is promised; a busy machine gets another try."""

from __future__ import annotations

from functools import partial

import pytest
from harness import at_once
from harness.ends import PROMISES, after_interrupts, end_with_dead_peers

TRANSPORTS = ["shm", "gloo"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_is_served_within_a_second(transport: str) -> None:
    limit = PROMISES["Ctrl-C, seconds"]
    assert any(after_interrupts(transport, 1)[0] <= limit for _ in range(3))


@pytest.fixture(scope="module")
def ends() -> dict[str, list[tuple[float, float]]]:
    """By transport, found at the same time."""
    calls = [partial(end_with_dead_peers, transport) for transport in TRANSPORTS]
    return dict(zip(TRANSPORTS, at_once(calls), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_script_with_dead_peers_ends(transport: str, ends: dict[str, list[tuple[float, float]]]) -> None:
    """The whole process: interpreter, libraries, connections to ranks that are gone."""
    limit = PROMISES["with dead peers, seconds"]
    tries = (ends[transport] if number == 0 else end_with_dead_peers(transport) for number in range(2))
    assert any(all(whole <= limit for whole, _ in found) for found in tries)
