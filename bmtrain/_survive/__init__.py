"""Training that continues without lost ranks. See docs/explanation/survive.md."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._base.arguments import require_integer
from .._ranks.context import Context
from .._ranks.shm_meeting import exchange

if TYPE_CHECKING:
    from .._ranks.init_options import InitOptions

__all__ = ["check_survive", "surviving"]


def check_survive(survive: int, options: InitOptions) -> int:
    """The argument of init_distributed.

    Raises:
        TypeError: not an integer.
        ValueError: neither 0 nor 1, or with something that does not survive.
    """
    number = require_integer("survive", survive)
    if number not in (0, 1):
        raise ValueError(f"survive: expected 0 or 1, got {number}")
    if number and not options.virtual_shards:
        raise ValueError(
            "survive: expected virtual_shards=, which make a step independent of the number of ranks"
        )
    if number and options.backend == "nccl":
        raise ValueError("survive: expected CPU ranks (backend='gloo'), got 'nccl'")
    return number


def surviving(ctx: Context, may_lose: int, store: Any, host: str, hosts: Sequence[str]) -> Context:
    """Returns the context of a rank that continues without lost ones. Collective."""
    from .members import Address, Members
    from .survival import Survival

    rank, size = ctx.world.rank, ctx.world.size
    if rank == 0:
        store.set("survive/secret", secrets.token_hex(16))
    members = Members(rank, host, len(set(hosts)) > 1, store.get("survive/secret").decode())
    own = json.dumps(members.own)
    members.addresses = [
        Address(*json.loads(text))
        for text in exchange(store, "survive/address", own, rank, size, ctx.timeout)
    ]
    survival = Survival(may_lose, members, hosts)
    ctx = dataclasses.replace(ctx, survival=survival)
    survival.attend(ctx)
    return ctx
