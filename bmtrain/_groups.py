"""Connecting the groups of ranks that a topology names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ._aside import Aside
from ._context import Group, Parts
from ._watchdog import Watch, transport_timeout
from .errors import CommunicationError
from .topology import GroupKind, Topology

if TYPE_CHECKING:
    from ._context import Context

__all__ = ["connect_groups", "connect_parts"]


def connect_groups(
    place: Topology, backend: str, timeout: float, store: Any, watch: Watch | None
) -> Mapping[str, Group]:
    """Create every group's two communicators, groups of equal members sharing theirs.

    The families come in one fixed order on every rank and each rank is in one group of a family, so that the
    members of a group always meet. A group of one rank needs no connection.

    Args:
        place: this rank's coordinates.
        backend: what connects groups of more than one rank.
        timeout: seconds for connecting and for every later operation.
        store: where the ranks find each other; None for a single process.
        watch: what watches over the communicators; None for a single process.
    """
    from . import _comm

    made: dict[tuple[int, ...], tuple[Any, Any]] = {}
    groups: dict[str, Group] = {}
    try:
        for kind in GroupKind:
            name, members = kind.value, place.members(kind)
            rank, group_id = place.get_group_rank(kind), place.get_group_id(kind)
            if members not in made:
                if len(members) == 1 or watch is None:
                    made[members] = (_comm.create_single(name), _comm.create_single(f"{name}.reduce"))
                else:
                    world = made.get(tuple(range(place.world_size)))
                    connect = _connecting(backend, store, timeout, watch, world)
                    made[members] = connect(f"{name}/{group_id}", name, rank, members, group_id)
            comm, reduce_comm = made[members]
            groups[name] = Group(name, comm, reduce_comm, rank, len(members), group_id)
    except BaseException:
        for pair in made.values():
            for comm in pair:
                comm.close()
        raise
    return MappingProxyType(groups)


_LABEL = "groups of ranks"
_LOOK_SECONDS = 0.2  # how often to see whether a rank is gone

_Connect = Callable[[str, str, int, tuple[int, ...], int], tuple[Any, Any]]


def _connecting(
    backend: str, store: Any, timeout: float, watch: Watch, world: tuple[Any, Any] | None
) -> _Connect:
    """What connects the two communicators of a group.

    It is given a key of the group's own, a name, this rank, the members, and a number that no other group made in the
    same call of all ranks has. NCCL splits the groups off those of ``world``, the communicators of all ranks, so
    that nobody has to meet anew.
    """
    from . import _comm

    create = getattr(_comm, f"create_{backend}")
    parents = world if world is not None and backend == "nccl" else (None, None)

    def connect(key: str, name: str, rank: int, members: tuple[int, ...], number: int) -> tuple[Any, Any]:
        both = []
        purposes = (("gather", name), ("reduce", f"{name}.reduce"))
        for (purpose, label), parent in zip(purposes, parents, strict=True):
            own = f"{key}/{purpose}"
            if parent is None:
                make = partial(create, store, own, rank, len(members), transport_timeout(timeout), label)
                # NCCL's has to be made by the thread that has chosen the device.
                comm = make() if backend == "nccl" else _while_all_are_there(watch, make, label)
            else:
                comm = _comm.split_nccl(parent, number, rank, len(members), label)
            both.append(watch.guard(comm, own, members))
        return both[0], both[1]

    return connect


def _while_all_are_there(watch: Watch, make: Callable[[], Any], name: str) -> Any:
    """A communicator; raises on all ranks, no later than the time-out, if one does not come or is gone."""
    aside, started = Aside(make, "bmtrain-connect"), time.monotonic()
    while not aside.wait(_LOOK_SECONDS):
        if why := watch.why_unconnected(time.monotonic() - started):
            raise CommunicationError(f"group {name!r}: cannot connect the ranks: {why}")
    return aside.result()


def connect_parts(context: Context, family: str, num_sharing: int) -> Parts:
    """Connect the parts of a group, and the ranks with the same place in them. Collective over all ranks of the job.

    Args:
        context: of this process.
        family: name of the group.
        num_sharing: ranks of a part, fewer than the group's.
    """
    from ._comm import create_single

    group, members = context.groups[family], context.topology.members(family)
    number, place = divmod(group.rank, num_sharing)
    alone = create_single(family), create_single(f"{family}.reduce")
    if num_sharing == 1:
        return Parts(Group(family, *alone, 0, 1, group.rank), group)
    if context.watch is None:
        raise RuntimeError(f"{family}: a group of {group.size} ranks in a single process")
    name, key = f"{family}/{num_sharing}", f"{family}/{group.group_id}/{num_sharing}"
    world = context.groups["zero"].comm, context.groups["zero"].reduce_comm
    with _meeting(context) as store:
        connect = _connecting(context.backend, store, context.timeout, context.watch, world)
        sharing = members[number * num_sharing : (number + 1) * num_sharing]
        num_parts = group.size // num_sharing
        comms = connect(f"{key}/sharing/{number}", name, place, sharing, group.group_id * num_parts + number)
        replicas = members[place::num_sharing]
        replica_comms = connect(
            f"{key}/replicas/{place}",
            f"{name}.replicas",
            number,
            replicas,
            group.group_id * num_sharing + place,
        )
    return Parts(
        Group(family, *comms, place, num_sharing, number),
        Group(family, *replica_comms, number, len(replicas), place),
    )


@contextmanager
def _meeting(context: Context) -> Iterator[Any]:
    """A store where all ranks find each other, after the one they started with has gone. Collective."""
    from ._agree import broadcast_json, on_rank_0

    limit = timedelta(seconds=context.timeout)
    served: list[Any] = []

    def serve() -> int:
        served.append(dist.TCPStore("localhost", 0, None, True, limit, wait_for_workers=False))
        return int(served[0].port)

    port = broadcast_json(on_rank_0(serve, _LABEL) or 0, label=_LABEL)
    host = context.watch.host_of_rank_0() if context.watch is not None else "localhost"
    yield served[0] if served else dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
    context.groups["zero"].comm.barrier(_LABEL)  # nobody needs the server any more
