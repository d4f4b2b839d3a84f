"""Training that continues without lost ranks. See docs/explanation/survive.md."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Sequence
from typing import Any

from .._ranks.context import Context
from .._ranks.shm_meeting import exchange

__all__ = ["surviving", "waiting_to_join", "waits_for_a_place"]


def surviving(ctx: Context, store: Any, host: str, hosts: Sequence[str]) -> Context:
    """Returns the context of a rank that continues without lost ones. Collective."""
    from .joining import Joining
    from .members import Address, Members

    rank, size = ctx.world.rank, ctx.world.size
    if rank == 0:
        store.set("survive/secret", secrets.token_hex(16))
    members = Members(rank, host, len(set(hosts)) > 1, store.get("survive/secret").decode())
    own = json.dumps(members.own)
    members.addresses = [
        Address(*json.loads(text))
        for text in exchange(store, "survive/address", own, rank, size, ctx.timeout)
    ]
    survival = Joining(members, hosts[rank], hosts)
    ctx = dataclasses.replace(ctx, survival=survival)
    survival.attend(ctx, hosts)
    return ctx


def waits_for_a_place() -> bool:
    """Whether this process is to take a lost rank's place."""
    return bool(os.environ.get("BMTRAIN_JOIN"))


def waiting_to_join(ctx: Context, host: str) -> Context:
    """Returns the context of a process that takes a lost rank's place in `survive.steps`."""
    from .joining import Joining

    return dataclasses.replace(ctx, survival=Joining(None, host, [host]))
