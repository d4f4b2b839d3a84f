"""Training that continues without lost ranks. See docs/explanation/survive.md."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Sequence

from .._ranks.agree import broadcast_json, gather_json
from .._ranks.context import Context
from .._ranks.groups import host_comm

__all__ = ["surviving", "waiting_to_join", "waits_for_a_place"]


def surviving(ctx: Context, host: str, hosts: Sequence[str]) -> Context:
    """Returns the context of a rank that continues without lost ones; ``host`` is rank 0's. Collective."""
    from .joining import Joining
    from .members import Address, Members

    comm = host_comm(ctx)
    if hosts[comm.rank] != hosts[0] and ctx.watch is not None:
        host = ctx.watch.own_host()
    secret = broadcast_json(secrets.token_hex(16), 0, "survive", comm)
    members = Members(comm.rank, host, len(set(hosts)) > 1, secret)
    members.addresses = [Address(*own) for own in gather_json(members.own, "survive", comm)]
    survival = Joining(members, hosts[comm.rank], hosts)
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
