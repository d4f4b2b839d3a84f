"""New communicators of the ranks that continue, in the processes that they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .._base.aside import Aside
from .._ranks import context as _context
from .._ranks.context import Context
from .._ranks.groups import connect_groups, host_comm
from .._watch.watchdog import Watch
from ..errors import CommunicationError
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
        self,
        ctx: Context,
        rank: int,
        address: Message,
        hosts: Sequence[str],
        places: Sequence[str],
        may_survive: Callable[[Message], str] | None = None,
    ) -> Context:
        """Replaces the context of this process by one of the ranks that continue. Collective.

        Args:
            rank: of this process among them.
            address: by `serve`.
            hosts: the host of each rank.
            places: of each rank; equal for ranks that can share memory.
            may_survive: see `Watch`.
        """
        store = self._served
        if store is None:  # its client waits without a limit for a server that is stopped
            host, port = address["host"], address["port"]
            aside = Aside(
                lambda: dist.TCPStore(host, port, None, False, self._limit, wait_for_workers=False),
                "bmtrain-store",
            )
            if not aside.wait(ctx.timeout):
                raise CommunicationError(f"no answer of {host} port {port} within {ctx.timeout:g} s")
            store = aside.result()
        place = Topology(rank, len(hosts), 1, 1)
        saved = "" if ctx.watch is None else ctx.watch.saved
        _context.uninstall()
        watch = None
        if place.world_size > 1:
            watch = Watch.join(
                store, rank, timeout=ctx.timeout, host=address["host"], hosts=hosts, may_survive=may_survive
            )
            watch.note_saved(saved)
        try:
            groups = connect_groups(place, ctx.backend, ctx.timeout, store, watch, has_host=True)
        except BaseException:
            if watch is not None:
                watch.stop()
            raise
        new = dataclasses.replace(ctx, topology=place, watch=watch, groups=groups, places=tuple(places))
        _context.install(new)
        for comm in {id(c): c for c in (host_comm(new), new.world.comm)}.values():
            comm.barrier("epoch")
        return new
