"""`init_distributed`: from the launcher's variables to connected ranks."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Protocol

import torch

from ._base.arguments import require_integer
from ._base.deprecate import warn_once
from ._base.generators import seed_generators
from ._base.said import write_lines
from ._C import set_processor_share, set_update_threads
from ._engine.call import watch_backwards
from ._engine.drives import Drives
from ._engine.engine import Engine, current_engine
from ._ranks import context as _context
from ._ranks.cards import choose_cards, use_card, visible_cards
from ._ranks.context import Context
from ._ranks.groups import connect_groups
from ._ranks.init_options import InitOptions
from ._ranks.launch import Launch, read_launch
from ._ranks.orderly_end import register
from ._ranks.rendezvous import Peer, Rendezvous
from ._ranks.shm_meeting import place as place_in_memory
from ._ranks.streams import Streams
from ._shards.foreign import adapt_torch_errors
from ._survive import surviving, waiting_to_join, waits_for_a_place
from ._version import __version__
from ._watch.watchdog import Watch
from .data import adapt_distributed_sampler
from .global_var import config, context
from .topology import Topology
from .topology import Topology as topology
from .virtual import one_thread

__all__ = ["init_distributed", "is_initialized", "topology"]

_log = logging.getLogger("bmtrain")

# Meetings of this process so far: all ranks make the same ones, so that the number tells the keys of one that
# failed from those of the next.
_attempts = count()


class Plan(Protocol):
    """The part of :class:`bmtrain.plan.Plan` that `init_distributed` uses."""

    def require_fit(self, world_size: int) -> None: ...


def is_initialized() -> bool:
    """Whether `init_distributed` has been called.

    Example:
        >>> is_initialized()
        False
    """
    return _context.current() is not None


def init_distributed(
    init_method: str | int = "env://",
    seed: int = 0,
    pipe_size: int = -1,
    num_micro_batches: int | None = None,
    tp_size: int = 1,
    *,
    zero_level: int | None = None,
    loss_scale_factor: float = 2,
    loss_scale_steps: int = 1024,
    backend: str | None = None,
    timeout: float | timedelta = 600,
    plan: Plan | None = None,
    virtual_shards: int | None = None,
    ep_size: int = 1,
    survive: int = 0,
    sp_size: int = 1,
    tier_directories: Sequence[str | os.PathLike[str]] | None = None,
) -> None:
    """Joins the other ranks of the job and makes this process ready for everything else in the library.

    Reads rank and size from the launcher's environment variables (torchrun, ``torch.distributed.launch``,
    Open MPI, MPICH, Intel MPI, MVAPICH, a Slurm step); without any of them the process is rank 0 of 1 and
    opens no port. Every rank must call it with the same arguments. It leaves ``torch.distributed`` as it is, and the
    environment too (except ``NCCL_LAUNCH_ORDER_IMPLICIT`` on GPUs), and nothing needs to be shut down at the end of a
    script.

    Args:
        init_method: the address of the rendezvous: ``env://`` (MASTER_ADDR and MASTER_PORT), ``tcp://host:port`` or
            ``file:///path``; ``?rank=R&world_size=W`` in it wins over the environment. An int is the seed, as
            in the first release.
        seed: seeds ``torch``, ``random`` and ``numpy`` on every rank with the value of rank 0.
        pipe_size: pipeline stages; 0 or less: no pipeline.
        num_micro_batches: micro-batches that a pipeline cuts the gathered batch into; default ``pipe_size``.
        tp_size: ranks that compute one loss together (tensor parallelism); 1 or less: none.
        zero_level: ZeRO level, 2 or 3, of Blocks that name none (deprecated: give it to the Block).
        loss_scale_factor: factor of the loss scale that `optim_step` keeps; below 1 its reciprocal is meant.
        loss_scale_steps: good steps after which `optim_step` raises the loss scale.
        backend: ``"gloo"`` or ``"nccl"``; default: environment variable ``BMTRAIN_BACKEND``, else NCCL on a
            machine with usable GPUs, else Gloo. With ``"gloo"`` GPU ranks exchange tensors through host memory, and
            several may share a card.
        timeout: seconds, or a timedelta, after which this call or any later operation gives up with an error.
        plan: by :func:`bmtrain.plan.estimate`, for this number of ranks; raises if it does not fit.
        virtual_shards: parts of a step's batch for :func:`bmtrain.virtual_shards`, at least ``dp_size``.
        ep_size: ranks that hold the experts of a :class:`bmtrain.nn.MoE` together (expert parallelism).
        survive: number of ranks that may be lost at once while the others continue: 0 or 1. Needs
            ``virtual_shards``; see `docs/howto/survive.md`.
        sp_size: ranks that divide the tokens of one batch, see :func:`bmtrain.shard_sequence`.
        tier_directories: for what Blocks keep on drives (`BlockPolicy`): in files without a name, of each rank's own,
            which end with the process. Several are several drives: they are measured, and filled in proportion to their
            speed. With it, making an optimizer is collective.

    Raises:
        ValueError: an argument or launch variable that makes no sense, or that differs between ranks.
        RuntimeError: a second call.
        DoesNotFitError: the plan needs more memory than there is.
        BMTrainError: another process has this rank, or the backend is not available.
        DiskError: no file can be made in one of several ``tier_directories``.
        CommunicationError: ranks are missing at the time-out, or the address cannot be served or reached.

    Example:
        >>> import bmtrain
        >>> bmtrain.init_distributed(seed=1)
        >>> bmtrain.rank(), bmtrain.world_size(), bmtrain.config["device"].type in ("cpu", "cuda")
        (0, 1, True)
    """
    if _context.current() is not None:
        raise RuntimeError(
            "bmtrain is initialized already: init_distributed() may be called once per process"
        )
    if not isinstance(init_method, str):
        seed = require_integer("init_method", init_method)
        init_method = "env://"
        warn_once(
            "init_distributed.int", "init_distributed(SEED) is deprecated: write init_distributed(seed=SEED)"
        )
    options = InitOptions.check(
        seed=seed,
        pipe_size=pipe_size,
        num_micro_batches=num_micro_batches,
        tp_size=tp_size,
        ep_size=ep_size,
        sp_size=sp_size,
        zero_level=zero_level,
        loss_scale=(loss_scale_factor, loss_scale_steps),
        backend=backend,
        timeout=timeout,
        virtual_shards=virtual_shards,
        survive=survive,
        tier_directories=tier_directories,
    )
    launch = read_launch(init_method, os.environ, sys.argv)
    if plan is not None:
        plan.require_fit(launch.world_size)
    _use(_enter(launch, options), options)
    place = context().topology
    _log.info(
        "bmtrain: rank %d of %d (%s), %s, device %s",
        place.rank,
        place.world_size,
        launch.source,
        context().backend,
        config["device"],
    )
    _log.info("bmtrain: %s", place)


def _enter(launch: Launch, options: InitOptions) -> Context:
    """Meets the other ranks, if there are any."""
    is_joining = options.survive and waits_for_a_place()
    place = options.topology(0, 1) if is_joining else options.topology(launch.rank, launch.world_size)
    if is_joining or place.world_size > 1:
        write_lines()
    if place.world_size > 1:
        return _join(launch, place, options)
    alone = _alone(launch, place, options)
    return waiting_to_join(alone, _host_identity()) if is_joining else alone


def _use(context: Context, options: InitOptions) -> None:
    """Makes everything of this process that depends on the context ready."""
    _context.install(context)
    register()
    config["loss_scale_factor"], config["loss_scale_steps"] = options.loss_scale
    if options.virtual_shards:
        one_thread(context.device)
    seed_generators(context.seed)
    adapt_distributed_sampler()
    adapt_torch_errors()
    watch_backwards()
    if options.tier_directories:
        current_engine(context).drives = Drives.measured(options.tier_directories, context)
    if os.environ.get("BMTRAIN_TIMELINE"):
        from .timeline import record_from_environment  # here: few runs are recorded

        record_from_environment()


def _alone(launch: Launch, place: Topology, options: InitOptions) -> Context:
    """The context of a single process, without store, port or other ranks."""
    local_rank = launch.local_rank or 0
    device = use_card(_own_card(launch.local_rank, options.backend))
    return _build(place, options, "single", device, (local_rank, 1), options.seed, None, None)


def _join(launch: Launch, place: Topology, options: InitOptions) -> Context:
    """Meets the other ranks, checks that all were started alike, and connects the groups."""
    meeting = Rendezvous(launch, options.timeout, next(_attempts))
    peers = meeting.agree(
        Peer(
            rank=launch.rank,
            host=_host_identity(),
            pid=os.getpid(),
            local_rank=launch.local_rank,
            cpus=_usable_cpus(),
            cards=visible_cards(),
            seed=options.seed,
            place=place_in_memory(),
        ),
        {"bmtrain version": __version__, **options.to_compare()},
    )
    locals_ = [_local_rank(peer, peers) for peer in peers]
    card = choose_cards(peers, locals_, options.backend)[launch.rank]
    local_rank = locals_[launch.rank]
    same_host = [peer for peer in peers if peer.host == peers[launch.rank].host]
    local_size = launch.local_size or len(same_host)
    if options.seed != peers[0].seed:
        warnings.warn(
            f"init_distributed: expected the same seed on every rank, got {options.seed} on rank "
            f"{launch.rank} and {peers[0].seed} on rank 0, which is used",
            stacklevel=4,
        )
    _share_processors(peers[launch.rank], same_host)
    device = use_card(card)
    host = launch.meeting.host if launch.meeting.scheme == "tcp" else peers[0].host.split()[0]
    hosts = [peer.host for peer in peers]
    watch = Watch.join(meeting.store, launch.rank, timeout=options.timeout, host=host, hosts=hosts)
    try:
        local, places = (local_rank, local_size), tuple(peer.place for peer in peers)
        context = _build(
            place, options, options.backend, device, local, peers[0].seed, meeting, watch, places
        )
        context.world.comm.barrier("init_distributed")
        if options.survive:
            context = surviving(context, host, hosts)
    except BaseException:
        watch.stop()
        raise
    # From here on no rank needs the store, see bmtrain/_ranks/rendezvous.py.
    meeting.close()
    return context


def _build(
    place: Topology,
    options: InitOptions,
    backend: str,
    device: torch.device,
    local: tuple[int, int],
    seed: int,
    meeting: Rendezvous | None,
    watch: Watch | None,
    places: tuple[str, ...] = (),
) -> Context:
    return Context(
        topology=place,
        device=device,
        backend=backend,
        local_rank=local[0],
        local_size=local[1],
        timeout=options.timeout,
        seed=seed,
        groups=connect_groups(
            place, backend, options.timeout, meeting.store if meeting else None, watch, bool(options.survive)
        ),
        engine=Engine(device),
        watch=watch,
        zero_level=options.zero_level,
        pipe_enabled=options.pipe_enabled,
        micros=options.micros,
        virtual_shards=options.virtual_shards,
        streams=Streams.for_device(device),
        places=places,
    )


def _own_card(local_rank: int | None, backend: str) -> int:
    """The card of a single process: from its launcher; without one, the program's current device."""
    num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_cards == 0:
        return 0
    if local_rank is None:
        return torch.cuda.current_device()
    if backend == "nccl" and local_rank >= num_cards:
        raise ValueError(
            f"local rank: expected less than the {num_cards} cards of this host, got {local_rank}"
        )
    return local_rank % num_cards


def _local_rank(peer: Peer, peers: list[Peer]) -> int:
    """The launcher's local rank, else the position among the ranks of the same host."""
    if peer.local_rank is not None:
        return peer.local_rank
    return [other.rank for other in peers if other.host == peer.host].index(peer.rank)


def _host_identity() -> str:
    """A key that is equal for two processes exactly if they run on one machine (containers count as machines)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


def _usable_cpus() -> str:
    if hasattr(os, "sched_getaffinity"):
        return ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    return ",".join(str(cpu) for cpu in range(os.cpu_count() or 1))


def _share_processors(me: Peer, same_host: list[Peer]) -> None:
    """Divides the processors among the ranks that may use the same ones, unless OMP_NUM_THREADS decides.

    A launcher that gives every rank its own processors has divided them already. Offloaded updates ignore torchrun's
    default of OMP_NUM_THREADS=1, which would leave the processors of a host with GPUs idle.
    """
    sharers = sum(peer.cpus == me.cpus for peer in same_host)
    share = max(1, len(me.cpus.split(",")) // sharers)
    set_processor_share(share)
    is_of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    set_update_threads(share if is_of_torchrun else 0)
    if sharers > 1 and not os.environ.get("OMP_NUM_THREADS") and share < torch.get_num_threads():
        torch.set_num_threads(share)
