"""The only process-wide state: everything that `init_distributed` established and built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.fx import _symbolic_trace as fx

from .._base.tensors import gathering_error
from ..errors import CommunicationError
from ..topology import GroupKind, Topology
from .streams import Streams

if TYPE_CHECKING:
    from .._C import Communicator
    from .._watch.watchdog import Watch
    from .survival import Survival


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
    """Division of a group into parts that shard a tensor.

    Attributes:
        sharing: the ranks with this one that hold one shard each.
        replicas: the ranks that hold the same shard as this one; None if there are no others.
    """

    sharing: Group
    replicas: Group | None = None


class EngineOfBlocks(Protocol):
    """The interface of the engine (which is built on parameters) that parameters call."""

    @property
    def gradients(self) -> _Gradients: ...

    def waiting(self, name: str, reason: str) -> AbstractContextManager[None]: ...

    def check_optimizer(self, optimizer: Any) -> None: ...

    def refuse_shard(self, collective: str, x: torch.Tensor) -> None: ...

    @property
    def is_summing_virtual_shards(self) -> bool: ...


class _Gradients(Protocol):
    def of_parameter(self, param: Any, gradient: torch.Tensor) -> torch.Tensor | None: ...

    def note_accumulated(self, param: Any) -> None: ...


@dataclass(frozen=True)
class Context:
    """Everything `init_distributed` established, read-only.

    Attributes:
        topology: coordinates of this rank.
        device: the run device of this rank.
        backend: ``"single"`` (one process), ``"gloo"`` or ``"nccl"``.
        local_rank: index of this process on its host.
        local_size: processes on its host.
        timeout: seconds after which an operation of the library gives up.
        seed: value the random generators of every rank were seeded with.
        groups: one :class:`Group` per :class:`~bmtrain.topology.GroupKind`. Groups with the same members
            share their communicators.
        engine: runs Blocks; `current_engine()` of `_engine/engine.py` gives it with its own type.
        zero_level: ZeRO level of Blocks that do not name one.
        pipe_enabled: whether a pipeline was requested, also with a single stage.
        micros: number of micro-batches a pipeline cuts the batch into.
        streams: the streams that `config` shows.
        watch: the watchdog; None in a single process.
        virtual_shards: number of virtual shards of a step; 0 without.
        survival: continues without lost ranks; None without ``survive=``.
        places: the host of each rank of the job, as an identifier; empty for a single process.
    """

    topology: Topology
    device: torch.device
    backend: str
    local_rank: int
    local_size: int
    timeout: float
    seed: int
    groups: Mapping[str, Group]
    engine: EngineOfBlocks
    zero_level: int = 3
    pipe_enabled: bool = False
    micros: int = 1
    streams: Streams = field(default_factory=Streams)
    watch: Watch | None = None
    virtual_shards: int = 0
    places: tuple[str, ...] = ()
    survival: Survival | None = None
    #: Parts of groups that were connected, by family and number of sharing ranks: see `_groups.parts_of`.
    parts: dict[tuple[str, int], Parts] = field(default_factory=dict, init=False, repr=False)

    @property
    def world(self) -> Group:
        """The group of all ranks."""
        return self.groups[GroupKind.ZERO.value]

    def zero_group(self, slices: str | None = None, pipe: bool = False) -> Group:
        """The group that shards a parameter; ``slices``: ``"tp"`` or ``"ep"`` if the ranks of such a group have a slice
        each."""
        kinds = _STAGE_ZERO_KINDS if pipe else _ZERO_KINDS
        return self.groups[kinds[slices].value]

    def require_intact(self, what: str) -> None:
        """Raises if values of this rank cannot be trusted, when ``what`` has read them or is about to return them.

        [Note: Values behind a failure]
        On a GPU the host queues work behind operations that have not ended. When a communicator is aborted its kernels
        leave, and work queued behind them (a norm, an update, a loss) runs on data that never arrived. The abort is
        recorded before that: a caller that waits for the device and then checks knows whether values can be trusted.
        On the CPU a caller that waits for an operation raises, and nothing is queued.
        """
        if self.backend != "nccl":
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for comm in self.communicators():
            if why := comm.failure():
                raise CommunicationError(
                    f"{what}: not possible after a failure: parameters, gradients and optimizer state of this rank may "
                    f"have been computed from data that never arrived. Resume from the last checkpoint. Cause: {why}"
                )

    def communicators(self) -> list[Communicator]:
        """The communicators of all groups and parts, each once."""
        groups = [*self.groups.values()]
        for parts in self.parts.values():
            groups += [parts.sharing] + ([] if parts.replicas is None else [parts.replicas])
        found = {id(comm): comm for group in groups for comm in (group.comm, group.reduce_comm)}
        return list(found.values())


_ZERO_KINDS = {None: GroupKind.ZERO, "tp": GroupKind.TP_ZERO, "ep": GroupKind.EP_ZERO}
_STAGE_ZERO_KINDS = {None: GroupKind.PP_ZERO, "tp": GroupKind.PP_TP_ZERO, "ep": GroupKind.PP_EP_ZERO}

_PROXY = torch._C._TorchDispatchModeKey.PROXY

_current: Context | None = None
#: The rank that this process was forked from.
forked_from: int | None = None


def _note_fork() -> None:
    global forked_from
    if _current is not None and _current.world.size > 1:
        forked_from = _current.topology.rank


os.register_at_fork(after_in_child=_note_fork)


def refuse_child(what: str) -> None:
    """Raises RuntimeError in a process forked from a rank, before ``what`` uses the connections that both share."""
    if forked_from is not None:
        raise RuntimeError(
            f"{what}: this process was forked from rank {forked_from} after init_distributed() (a worker of a "
            "DataLoader, os.fork, multiprocessing) and is no rank itself; do this in the rank"
        )


def require_gathering(what: str) -> None:
    """Checks that ``what`` may gather parameters here.

    Raises:
        RuntimeError: a transform of torch.func is running or a graph is traced, or this process was forked from a rank.
    """
    is_traced = torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()
    is_traced |= getattr(fx, "_is_fx_tracing_flag", False) or torch._C._get_dispatch_mode(_PROXY) is not None
    if forked_from is not None or peek_interpreter_stack() is not None or is_traced:
        refuse_child(what)
        raise gathering_error(what, is_traced)


def current() -> Context | None:
    """The installed context, None before `init_distributed`."""
    return _current


def context(needed_by: str | None = None) -> Context:
    """The context of this process; ``needed_by`` names the caller in errors.

    Raises:
        RuntimeError: before `init_distributed`, or in a process forked from a rank.
    """
    found = current()
    if found is None:
        from .._watch.report import share_traceback

        share_traceback()
        needs = f" before using {needed_by}" if needed_by else " first"
        raise RuntimeError(f"bmtrain is not initialized: call bmtrain.init_distributed(){needs}")
    if forked_from is not None:
        refuse_child(needed_by or "bmtrain")
    return found


def install(context: Context) -> None:
    """Makes ``context`` the context of this process, which has none."""
    global _current
    _current = context


def require_intact(what: str) -> None:
    """`Context.require_intact` of this process; nothing before `init_distributed`."""
    if _current is not None:
        _current.require_intact(what)


def uninstall() -> None:
    """Closes this process's communicators and forgets the context; tests use it to try another topology."""
    global _current
    context, _current = _current, None
    if context is not None:
        for comm in context.communicators():
            comm.close()
        if context.watch is not None:
            context.watch.stop()
