"""How soon a rank ends by itself. The limits are what is promised; a busy machine gets another try."""

from __future__ import annotations

import pytest
from harness.ends import PROMISES, after_interrupts, end_with_dead_peers


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_ctrl_c_is_served_within_a_second(transport: str) -> None:
    limit = PROMISES["Ctrl-C, seconds"]
    assert any(after_interrupts(transport, 1)[0] <= limit for _ in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_script_with_dead_peers_ends(transport: str) -> None:
    """The whole process: interpreter, libraries, connections to ranks that are gone."""
    limit = PROMISES["with dead peers, seconds"]
    assert any(all(whole <= limit for whole, _ in end_with_dead_peers(transport)) for _ in range(2))
