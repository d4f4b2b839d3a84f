"""Connecting the groups of ranks that a topology names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .._base.aside import Aside
from .._base.said import Waiting
from .._C import SingleCommunicator
from ..errors import CommunicationError
from ..topology import GroupKind, Topology, equal_runs
from .agree import broadcast_json, on_rank_0
from .comm import create_gloo, transport_timeout
from .comm_nccl import create_nccl, split_nccl
from .context import Context, Group, Parts

if TYPE_CHECKING:
    from .._watch.watchdog import Watch


def connect_groups(
    place: Topology, backend: str, timeout: float, store: Any, watch: Watch | None, has_host: bool = False
) -> Mapping[str, Group]:
    """Creates every group's two communicators, groups of equal members sharing theirs.

    The families come in one fixed order on every rank and each rank is in one group of a family, so that the
    members of a group always meet. A group of one rank needs no connection.

    Args:
        has_host: whether GPU ranks are connected through host memory too, by one communicator: see `host_comm`.
    """
    made: dict[tuple[int, ...], tuple[Any, Any]] = {}
    groups: dict[str, Group] = {}
    try:
        for kind in GroupKind:
            name, members = kind.value, place.members(kind)
            rank, group_id = place.get_group_rank(kind), place.get_group_id(kind)
            if members not in made:
                if len(members) == 1 or watch is None:
                    made[members] = (SingleCommunicator(name), SingleCommunicator(f"{name}.reduce"))
                else:
                    world = made.get(tuple(range(place.world_size)))
                    connect = _connecting(backend, store, timeout, watch, world)
                    made[members] = connect(f"{name}/{group_id}", name, rank, members, group_id)
            comm, reduce_comm = made[members]
            groups[name] = Group(name, comm, reduce_comm, rank, len(members), group_id)
        if has_host and backend == "nccl" and watch is not None:
            comm = _connect_through_host(place, timeout, store, watch)
            groups[_HOST] = Group(_HOST, comm, comm, place.rank, place.world_size, 0)
    except BaseException:
        for pair in made.values():
            for comm in pair:
                comm.close()
        raise
    return MappingProxyType(groups)


def host_comm(context: Context) -> Any:
    """The communicator of all ranks for tensors in host memory; GPU ranks have it with ``survive=``."""
    return context.groups.get(_HOST, context.world).comm


def _connect_through_host(place: Topology, timeout: float, store: Any, watch: Watch) -> Any:
    make = partial(create_gloo, store, _HOST, place.rank, place.world_size, transport_timeout(timeout), _HOST)
    return watch.guard(_connect_or_fail(watch, make, _HOST), _HOST, tuple(range(place.world_size)))


_LABEL = "groups of ranks"
_HOST = "host"
_POLL_SECONDS = 0.2  # interval of checks for exited ranks

_Connect = Callable[[str, str, int, tuple[int, ...], int], tuple[Any, Any]]


def _connecting(
    backend: str, store: Any, timeout: float, watch: Watch, world: tuple[Any, Any] | None
) -> _Connect:
    """Returns the function that connects the two communicators of a group.

    It is given a key of the group's own, a name, this rank, the members, and a number that no other group made in the
    same call of all ranks has. NCCL splits the groups off the communicators of ``world``, the group of all ranks,
    without another rendezvous.
    """
    create = create_nccl if backend == "nccl" else create_gloo
    parents = world if world is not None and backend == "nccl" else (None, None)

    def connect(key: str, name: str, rank: int, members: tuple[int, ...], number: int) -> tuple[Any, Any]:
        both = []
        purposes = (("gather", name), ("reduce", f"{name}.reduce"))
        for (purpose, label), parent in zip(purposes, parents, strict=True):
            own = f"{key}/{purpose}"
            if parent is None:
                make = partial(create, store, own, rank, len(members), transport_timeout(timeout), label)
                # NCCL's must be made by the thread that has set the device.
                comm = make() if backend == "nccl" else _connect_or_fail(watch, make, label)
            else:
                comm = split_nccl(parent, number, rank, len(members), label)
            both.append(watch.guard(comm, own, members))
        return both[0], both[1]

    return connect


def _connect_or_fail(watch: Watch, make: Callable[[], Any], name: str) -> Any:
    """Connects a communicator; raises on all ranks, no later than the time-out, if one is late or has exited."""
    aside, started = Aside(make, "bmtrain-connect"), time.monotonic()
    waiting = Waiting(f"connect-{name}-{os.getppid()}")
    while not aside.wait(_POLL_SECONDS):
        if why := watch.why_unconnected(time.monotonic() - started):
            raise CommunicationError(f"group {name!r}: cannot connect the ranks: {why}")
        if waiting.is_due():
            waiting.report(f"the ranks of group {name!r} to connect")
    try:
        return aside.result()
    except CommunicationError:
        if why := watch.why_connecting_failed():
            raise CommunicationError(f"group {name!r}: cannot connect the ranks: {why}") from None
        raise


def parts_of(context: Context, family: str, num_sharing: int) -> Parts:
    """A group divided into parts of ``num_sharing`` ranks, which shard among themselves and replicate each other.

    A part has consecutive ranks, so that ranks of one host share. Collective over all ranks of the job when such parts
    are first needed.
    """
    group = context.groups[family]
    if num_sharing == group.size:
        return Parts(group)
    if (family, num_sharing) not in context.parts:
        context.parts[family, num_sharing] = _connect_parts(context, family, num_sharing)
    return context.parts[family, num_sharing]


def ranks_per_host(context: Context, family: str) -> int:
    """The number of consecutive members of a group on each host, if equal in all groups of the family; else 1."""
    if not context.places:
        return 1
    groups = context.topology.groups(family)
    numbers = {equal_runs([context.places[rank] for rank in members]) for members in groups}
    return numbers.pop() if len(numbers) == 1 else 1


def _connect_parts(context: Context, family: str, num_sharing: int) -> Parts:
    """Connects the parts of a group, and the ranks with the same place in them. Collective over all ranks."""
    group, members = context.groups[family], context.topology.members(family)
    number, place = divmod(group.rank, num_sharing)
    name, key = f"{family}/{num_sharing}", f"{family}/{group.group_id}/{num_sharing}"
    if num_sharing == 1:
        alone = SingleCommunicator(name), SingleCommunicator(f"{name}.reduce")
        return Parts(Group(family, *alone, 0, 1, group.rank), group)
    if context.watch is None:
        raise RuntimeError(f"{family}: a group of {group.size} ranks in a single process")
    world = context.world.comm, context.world.reduce_comm
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
    """A store for a rendezvous of all ranks after the first store has been closed. Collective."""
    watch = context.watch
    assert watch is not None  # nobody else is to be met in a single process
    limit = timedelta(seconds=context.timeout)
    served: list[Any] = []

    def serve() -> int:
        listener, host = watch.listen()  # the store's own port would be open on every interface
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(
            host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        served.append(store)
        return port

    port = broadcast_json(on_rank_0(serve, _LABEL) or 0, label=_LABEL)
    yield (
        served[0]
        if served
        else dist.TCPStore(watch.host_of_rank_0(), port, None, False, limit, wait_for_workers=False)
    )
    context.world.comm.barrier(_LABEL)  # no rank needs the server any more
