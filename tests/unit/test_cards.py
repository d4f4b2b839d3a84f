"""Which card is a rank's, however the launcher shares them out; and a card that the core has no kernels for."""

from __future__ import annotations

import importlib
import types

import pytest
import torch

from bmtrain._base import build
from bmtrain._ranks import cards as _cards
from bmtrain._ranks.cards import check_card, choose_cards
from bmtrain._ranks.rendezvous import Peer
from bmtrain.errors import BMTrainError
from bmtrain.optim.places import residence

init = importlib.import_module("bmtrain.init")

FOUR = ["A", "B", "C", "D"]


def peers(*cards: list[str], hosts: int = 1) -> list[Peer]:
    per_host = len(cards) // hosts
    return [Peer(rank, f"host{rank // per_host}", 1, None, "0", seen, 0) for rank, seen in enumerate(cards)]


@pytest.mark.parametrize(
    ("ranks", "local_ranks", "expected"),
    [
        (peers(FOUR, FOUR, FOUR, FOUR), [0, 1, 2, 3], [0, 1, 2, 3]),
        # Another job has the first cards of the host.
        (peers(FOUR, FOUR), [2, 3], [2, 3]),
        (peers(FOUR, FOUR, ["E", "F"], ["E", "F"], hosts=2), [0, 1, 0, 1], [0, 1, 0, 1]),
        # Each rank sees its own card alone; cards of different hosts are not told apart by name.
        (peers(["A"], ["B"], ["C"]), [0, 1, 2], [0, 0, 0]),
        (peers(["A"], ["B"], ["A"], ["B"], hosts=2), [0, 1, 0, 1], [0, 0, 0, 0]),
        # Two ranks for each socket's two cards.
        (peers(["A", "B"], ["C", "D"], ["A", "B"], ["C", "D"]), [0, 1, 2, 3], [0, 0, 1, 1]),
        # A container of its own for each rank, which knows its place on the real host.
        (peers(["A"], ["B"], hosts=2), [0, 1], [0, 0]),
    ],
)
def test_every_rank_has_its_card(ranks: list[Peer], local_ranks: list[int], expected: list[int]) -> None:
    assert choose_cards(ranks, local_ranks, "nccl") == expected
    assert choose_cards(ranks, local_ranks, "gloo") == expected


def test_ranks_share_a_card_over_gloo_only() -> None:
    three = peers(["A", "B"], ["A", "B"], ["A", "B"])
    assert choose_cards(three, [0, 1, 2], "gloo") == [0, 1, 0]
    with pytest.raises(
        ValueError, match="at most one rank per card, got local rank 2 on a host with 2 cards"
    ):
        choose_cards(three, [0, 1, 2], "nccl")
    with pytest.raises(ValueError, match="with 0 cards"):
        choose_cards(peers([], []), [0, 1], "nccl")
    assert choose_cards(peers([], []), [0, 1], "gloo") == [0, 0]
    with pytest.raises(ValueError, match="got ranks 0 and 1 on A: let both see all cards"):
        choose_cards(peers(["A", "B"], ["A"]), [0, 1], "nccl")


def test_a_single_process_keeps_the_card_that_it_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {"is_available": True, "device_count": 2, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    assert init._own_card(None, "nccl") == 1
    assert [init._own_card(local_rank, "nccl") for local_rank in (0, 1)] == [0, 1]
    assert init._own_card(3, "gloo") == 1
    with pytest.raises(ValueError, match="expected less than the 2 cards of this host, got 3"):
        init._own_card(3, "nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert init._own_card(3, "gloo") == 0


@pytest.mark.parametrize(("backend", "share"), [("nccl", 1), ("single", 1), ("gloo", 4)])
def test_state_on_the_card_leaves_room_for_ranks_that_share_it(
    backend: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is shown one card of eight has it to itself."""
    numbers = {"memory_reserved": 0, "max_memory_allocated": 0}
    for name, answer in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    context = types.SimpleNamespace(backend=backend, local_size=4)
    monkeypatch.setattr(residence.context, "current", lambda: context)
    assert residence.spare_bytes(torch.device("cuda", 0)) == 850 // share


def test_a_card_without_kernels_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, object] = {"cuda_arch_list": "9.0"}
    monkeypatch.setattr(build, "build_info", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla T4")
    with pytest.raises(BMTrainError, match=r"built for compute capability 9.0, and Tesla T4 has 7.5.*=7.5"):
        check_card(0)
    built["cuda_arch_list"] = "7.0;9.0"
    check_card(0)
    built["cuda_arch_list"] = None  # torch's operations are used
    check_card(0)


@pytest.mark.parametrize(
    ("built", "capability", "missing"),
    [
        ("8.0;9.0+PTX", (8, 6), False),
        ("8.0;9.0+PTX", (12, 0), False),
        ("8.0 9.0", (12, 0), True),
        ("8.6", (8, 0), True),
        ("9.0a+PTX", (10, 0), True),
        ("10.0", (9, 0), True),
        ("Hopper", (7, 5), False),
        ("", (9, 0), False),
    ],
)
def test_architectures(built: str, capability: tuple[int, int], missing: bool) -> None:
    assert _cards.missing_architecture(built, capability) is missing
