"""New communicators of the ranks that continue, in the processes that they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .._ranks import context as _context
from .._ranks.context import Context
from .._ranks.groups import connect_groups
from .._watch.watchdog import Watch
from ..topology import Topology
from .members import Members, Message


class Reconnection:
    """The rendezvous of the ranks that continue: a store that one of them serves."""

    def __init__(self, ctx: Context) -> None:
        self._limit = timedelta(seconds=ctx.timeout)
        self._served: Any = None

    def serve(self, members: Members) -> Message:
        """Serves the store; returns its address."""
        listener, host = members.open_port()
        port = int(listener.getsockname()[1])
        self._served = dist.TCPStore(
            host, port, None, True, self._limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return {"host": host, "port": port}

    def connect(
        self, ctx: Context, members: Members, address: Message, hosts: Sequence[str], places: Sequence[str]
    ) -> Context:
        """Replaces the context of this process by one of the ranks that continue. Collective.

        Args:
            members: of which an epoch has just begun.
            address: by `serve`.
            hosts: the host of each rank.
            places: of each rank; equal for ranks that can share memory.
        """
        store = self._served or dist.TCPStore(
            address["host"], address["port"], None, False, self._limit, wait_for_workers=False
        )
        place = Topology(members.rank, len(members.addresses), 1, 1)
        saved = "" if ctx.watch is None else ctx.watch.saved
        _context.uninstall()
        watch = None
        scoped = dist.PrefixStore(f"epoch/{members.epoch}", store)
        if place.world_size > 1:
            watch = Watch.join(scoped, place.rank, timeout=ctx.timeout, host=address["host"], hosts=hosts)
            watch.note_saved(saved)
        new = dataclasses.replace(
            ctx,
            topology=place,
            watch=watch,
            backend="gloo",
            groups=connect_groups(place, "gloo", ctx.timeout, scoped, watch),
            places=tuple(places),
        )
        _context.install(new)
        new.world.comm.barrier("epoch")
        return new
