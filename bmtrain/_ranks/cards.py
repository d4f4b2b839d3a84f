"""The GPU of a rank, and a check that the core was compiled for it.

[Note: Cards of their own]
A launcher lets every rank see all GPUs of its host, or each rank one of its own (Slurm's ``--gpus-per-task``, or a
wrapper that sets ``CUDA_VISIBLE_DEVICES``), which is number 0 to that rank, whatever its local rank. So ranks exchange
the names of their visible cards, and count among the ranks of their host that see the same cards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from .._base import build
from ..errors import BMTrainError
from .rendezvous import Peer


def visible_cards() -> list[str]:
    """Names of the cards that this process can use, the same in every process that sees them."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]


def choose_cards(peers: Sequence[Peer], local_ranks: Sequence[int], backend: str) -> list[int]:
    """For each rank, the index of its card among the visible cards; 0 for a rank without any.

    Raises:
        ValueError: over ``nccl``, two ranks of a host would use one card. The same on every rank.
    """
    chosen = [_place_of(peer, peers, local_ranks) for peer in peers]
    if backend != "nccl":
        return [place % max(len(peer.cards), 1) for place, peer in zip(chosen, peers, strict=True)]
    users: dict[tuple[str, str], int] = {}
    for peer, place, local_rank in zip(peers, chosen, local_ranks, strict=True):
        if place >= len(peer.cards):
            raise ValueError(
                f"backend 'nccl': expected at most one rank per card, got local rank {local_rank} on a host "
                f"with {len(peer.cards)} cards (rank {peer.rank}): start fewer there, or use backend='gloo'"
            )
        other = users.setdefault((peer.host, peer.cards[place]), peer.rank)
        if other != peer.rank:
            raise ValueError(
                f"backend 'nccl': expected at most one rank per card, got ranks {other} and {peer.rank} on "
                f"{peer.cards[place]}: let both see all cards of their host, or use backend='gloo'"
            )
    return chosen


def _place_of(peer: Peer, peers: Sequence[Peer], local_ranks: Sequence[int]) -> int:
    """See [Note: Cards of their own]."""
    local_rank = local_ranks[peer.rank]
    of_host = [other for other in peers if other.host == peer.host]
    alike = [other for other in of_host if other.cards == peer.cards]
    if len(alike) == len(of_host) and local_rank < len(peer.cards):
        return local_rank
    return sorted(alike, key=lambda other: local_ranks[other.rank]).index(peer)


def use_card(number: int) -> torch.device:
    """Makes a card this process's current device; the CPU where there is none."""
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return torch.device("cpu")
    check_card(number)
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def check_card(number: int) -> None:
    """Raises if the core has CUDA kernels, but none that run on a card: they would fail inside the first step."""
    built = build.build_info()["cuda_arch_list"]
    capability = torch.cuda.get_device_capability(number)
    if built is not None and missing_architecture(str(built), capability):
        card, name = torch.cuda.get_device_name(number), ".".join(map(str, capability))
        raise BMTrainError(
            f"bmtrain's CUDA kernels were built for compute capability {built}, and {card} "
            f"has {name}: build bmtrain again with TORCH_CUDA_ARCH_LIST={name}, or with BMTRAIN_CUDA=0"
        )


def missing_architecture(built: str, capability: tuple[int, int]) -> bool:
    """Whether nothing that was compiled for ``built`` (as TORCH_CUDA_ARCH_LIST has it) runs on a card.

    Machine code runs on cards of the same major number and at least its minor one; PTX on all later ones. An entry
    without a number (``Hopper``) is taken to match.

    >>> [missing_architecture("8.0;9.0+PTX", card) for card in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))]
    [True, False, False, False, False]
    >>> missing_architecture("9.0", (10, 0)), missing_architecture("9.0a", (9, 0))
    (True, False)
    """
    names = [name for name in re.split(r"[;,\s]+", built.strip()) if name]
    for name in names:
        known = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", name)
        if known is None:
            return False
        architecture = int(known[1]), int(known[2])
        is_newer = architecture < capability and known[4] is not None and not known[3]
        if is_newer or (architecture[0] == capability[0] and architecture[1] <= capability[1]):
            return False
    return bool(names)
