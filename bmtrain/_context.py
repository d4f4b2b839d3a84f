"""The one piece of process-wide state: what `init_distributed` found out and built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .topology import GroupKind, Topology

if TYPE_CHECKING:
    from ._C import Communicator
    from ._engine.engine import Engine
    from ._watchdog import Watch

__all__ = ["Context", "Group", "Parts", "Streams", "current", "install", "refuse_child", "uninstall"]


@dataclass(frozen=True)
class Group:
    """One group of ranks as this rank sees it.

    The two communicators connect the same ranks. Gathers of parameters use the first, reductions of
    gradients the second, so that a gather of one block overlaps the reduction of another.

    Attributes:
        name: family of the group, a :class:`~bmtrain.topology.GroupKind` value.
        comm: all-gathers and everything a user calls; shown as ``config["..._comm"]``.
        reduce_comm: reductions of the sharded buffers.
        rank: this process inside the group.
        size: number of ranks.
        group_id: number of the group in its family.
    """

    name: str
    comm: Communicator
    reduce_comm: Communicator
    rank: int
    size: int
    group_id: int


class Parts(NamedTuple):
    """How a group divides the work of holding a tensor.

    Attributes:
        sharing: the ranks with this one that hold one shard each.
        replicas: the ranks that hold the same shard as this one; None if there are no others.
    """

    sharing: Group
    replicas: Group | None = None


class InertStream:
    """Stands for a CUDA stream or event on a CPU run: everything has happened already."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """Return ``event``, or an inert one."""
        return self if event is None else event

    def record(self, stream: Any = None) -> None:
        """Nothing to mark."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Everything queued before has completed."""
        return True


@dataclass(frozen=True)
class Streams:
    """The CUDA streams and the event that `config` shows; inert objects on a CPU run."""

    calc_stream: Any = field(default_factory=InertStream)
    load_stream: Any = field(default_factory=InertStream)
    barrier_stream: Any = field(default_factory=InertStream)
    tp_comm_stream: Any = field(default_factory=InertStream)
    pp_comm_stream: Any = field(default_factory=InertStream)
    load_event: Any = field(default_factory=InertStream)

    @classmethod
    def for_device(cls, device: torch.device) -> Streams:
        """Real streams on a CUDA device, inert ones elsewhere."""
        if device.type != "cuda":
            return cls()
        with torch.cuda.device(device):
            return cls(
                calc_stream=torch.cuda.current_stream(),
                load_stream=torch.cuda.Stream(priority=-1),
                barrier_stream=torch.cuda.Stream(),
                tp_comm_stream=torch.cuda.Stream(),
                pp_comm_stream=torch.cuda.Stream(),
                load_event=torch.cuda.Event(),
            )


@dataclass(frozen=True)
class Context:
    """Everything `init_distributed` established, read-only.

    Attributes:
        topology: coordinates of this rank.
        device: where this rank computes.
        backend: ``"single"`` (one process), ``"gloo"`` or ``"nccl"``.
        local_rank: this process among those of its host.
        local_size: processes on its host.
        timeout: seconds after which an operation of the library gives up.
        seed: value the random generators of every rank were seeded with.
        groups: one :class:`Group` per :class:`~bmtrain.topology.GroupKind`. Groups with the same members
            share their communicators.
        zero_level: ZeRO level of Blocks that do not name one.
        pipe_enabled: whether a pipeline was asked for, be it of one stage.
        micros: number of micro-batches a pipeline cuts the batch into.
        streams: what `config` shows as streams.
        watch: the watchdog; None in a single process.
        virtual_shards: number of virtual shards of a step; 0 without.
    """

    topology: Topology
    device: torch.device
    backend: str
    local_rank: int
    local_size: int
    timeout: float
    seed: int
    groups: Mapping[str, Group]
    zero_level: int = 3
    pipe_enabled: bool = False
    micros: int = 1
    streams: Streams = field(default_factory=Streams)
    watch: Watch | None = None
    virtual_shards: int = 0
    _parts: dict[tuple[str, int], Parts] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def engine(self) -> Engine:
        """What all Blocks of this process share."""
        from ._engine.engine import Engine

        return Engine(self.device)

    def zero_group(self, tp_mode: bool = False, pipe: bool = False) -> Group:
        """The group that shards a parameter.

        Args:
            tp_mode: whether the parameter is tensor-parallel (each rank of a tp group has its own part).
            pipe: whether it belongs to a pipeline stage.
        """
        if pipe:
            kind = GroupKind.PP_TP_ZERO if tp_mode else GroupKind.PP_ZERO
        else:
            kind = GroupKind.TP_ZERO if tp_mode else GroupKind.ZERO
        return self.groups[kind.value]

    def parts_of(self, family: str, num_sharing: int) -> Parts:
        """A group cut into parts that shard among themselves, each holding what the others hold.

        Its ranks one after the other make a part, so that those of a host share. Collective over all ranks of the job
        at the first need of such parts.

        Args:
            family: name of the group.
            num_sharing: ranks of a part, a divisor of the group's.
        """
        group = self.groups[family]
        if num_sharing == group.size:
            return Parts(group)
        if (family, num_sharing) not in self._parts:
            from ._groups import connect_parts

            self._parts[family, num_sharing] = connect_parts(self, family, num_sharing)
        return self._parts[family, num_sharing]

    def communicators(self) -> list[Communicator]:
        """Those of all groups and parts, each once."""
        groups = [*self.groups.values()]
        for parts in self._parts.values():
            groups += [parts.sharing] + ([] if parts.replicas is None else [parts.replicas])
        found = {id(comm): comm for group in groups for comm in (group.comm, group.reduce_comm)}
        return list(found.values())


_current: Context | None = None
#: The rank whose child this process is.
forked_from: int | None = None


def _note_fork() -> None:
    global forked_from
    if _current is not None and _current.groups["zero"].size > 1:
        forked_from = _current.topology.rank


os.register_at_fork(after_in_child=_note_fork)


def refuse_child(what: str) -> None:
    """Called before ``what`` exchanges something with the other ranks.

    Raises:
        RuntimeError: this process was forked from a rank, and shares connections with it that only the rank may use.
    """
    if forked_from is not None:
        raise RuntimeError(
            f"{what}: this process was forked from rank {forked_from} after init_distributed() (a worker of a "
            "DataLoader, os.fork, multiprocessing) and is no rank itself; do this in the rank"
        )


def current() -> Context | None:
    """The installed context, None before `init_distributed`."""
    return _current


def install(context: Context) -> None:
    """Make ``context`` the context of this process.

    Raises:
        RuntimeError: if there is one already.
    """
    global _current
    if _current is not None:
        raise RuntimeError(
            "bmtrain is initialized already: init_distributed() may be called once per process"
        )
    _current = context


def uninstall() -> None:
    """Close this process's communicators and forget the context; tests use it to try another topology."""
    global _current
    context, _current = _current, None
    if context is not None:
        parts = [group for both in context._parts.values() for group in both if group is not None]
        for group in (*context.groups.values(), *parts):
            group.comm.close()
            group.reduce_comm.close()
        if context.watch is not None:
            context.watch.stop()
