"""Connecting the groups of ranks that a topology names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ._context import Group
from ._watchdog import Watch, transport_timeout
from .topology import GroupKind, Topology

__all__ = ["connect_groups"]


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
                    create = getattr(_comm, f"create_{backend}")
                    patience = transport_timeout(timeout)
                    both: list[Any] = []
                    for purpose, label in (("gather", name), ("reduce", f"{name}.reduce")):
                        key = f"{name}/{group_id}/{purpose}"
                        comm = create(store, key, rank, len(members), patience, label)
                        both.append(watch.guard(comm, key, members))
                    made[members] = (both[0], both[1])
            comm, reduce_comm = made[members]
            groups[name] = Group(name, comm, reduce_comm, rank, len(members), group_id)
    except BaseException:
        for pair in made.values():
            for comm in pair:
                comm.close()
        raise
    return MappingProxyType(groups)
