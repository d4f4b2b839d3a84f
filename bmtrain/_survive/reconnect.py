"""New communicators of the survivors, in the processes that they are."""

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
from .members import Meeting, Members, Message


class Reconnection:
    """The rendezvous of the survivors: a store that the first of them serves."""

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

    def connect(self, ctx: Context, members: Members, meeting: Meeting, hosts: Sequence[str]) -> Context:
        """Replaces the context of this process by one of the survivors. Collective."""
        address = meeting.given
        store = self._served or dist.TCPStore(
            address["host"], address["port"], None, False, self._limit, wait_for_workers=False
        )
        place = Topology(meeting.survivors.index(members.rank), len(meeting.survivors), 1, 1)
        saved = "" if ctx.watch is None else ctx.watch.saved
        _context.uninstall()
        watch = None
        scoped = dist.PrefixStore(f"epoch/{members.epoch + 1}", store)
        if place.world_size > 1:
            watch = Watch.join(scoped, place.rank, timeout=ctx.timeout, host=address["host"], hosts=hosts)
            watch.note_saved(saved)
        new = dataclasses.replace(
            ctx,
            topology=place,
            watch=watch,
            groups=connect_groups(place, ctx.backend, ctx.timeout, scoped, watch),
            places=tuple(ctx.places[rank] for rank in meeting.survivors),
        )
        _context.install(new)
        new.world.comm.barrier("survivors")
        return new
