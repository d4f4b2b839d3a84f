"""Groups that a program makes by itself: one rank makes an id, all ranks join with it."""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import threading

import torch.distributed as dist

from .._base.arguments import require_integer
from .._C import Communicator, SingleCommunicator
from .._ranks import context as _context
from .._ranks.comm import create_gloo, transport_timeout
from .._ranks.shm_meeting import exchange
from ..errors import CommunicationError

_ID_BYTES = 128  # as NCCL's
_MAGIC = "bmtrain"
_DEFAULT_TIMEOUT = 600.0

# The store that serves the ids made by this process: opened by the first one, and kept, because a rank may still be
# joining when this process has joined.
_server: dist.TCPStore | None = None
_server_lock = threading.Lock()  # protects _server


def getUniqueId() -> bytes:
    """An id for `commInitRank`: 128 bytes, to be carried to the other ranks.

    It holds an address at which this process serves the rendezvous, so that this process must live until all ranks
    have joined.

    Example:
        >>> len(getUniqueId())
        128
    """
    global _server
    with _server_lock:
        if _server is None:
            _server = dist.TCPStore("0.0.0.0", 0, None, True, _timeout(), wait_for_workers=False)
        port = _server.port
    text = f"{_MAGIC} {_own_address()} {port} {secrets.token_hex(8)}"
    return text.encode().ljust(_ID_BYTES, b"\0")


def commInitRank(unique_id: bytes, world_size: int, rank: int) -> Communicator:
    """Join a group. [collective over its ranks]

    Args:
        unique_id: the result of `getUniqueId` in one process; valid for one group.
        world_size: number of ranks.
        rank: this process's rank, 0 to world_size - 1.

    Raises:
        ValueError: a malformed id, a rank outside the group, or an id that this rank has used before.
        CommunicationError: not all ranks arrived in time.

    Example:
        >>> comm = commInitRank(getUniqueId(), world_size=1, rank=0)
        >>> comm.rank, comm.size
        (0, 1)
    """
    host, port, token = _parse(unique_id)
    world_size, rank = require_integer("world_size", world_size), require_integer("rank", rank)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"nccl.commInitRank: expected 0 <= rank < world_size, got rank {rank} of {world_size}"
        )
    name = f"user-{token[:6]}"
    if world_size == 1:
        return SingleCommunicator(name)
    store = _connect(host, port, f"nccl.commInitRank: rank {rank} of {world_size}")
    if store.add(f"{token}/{rank}", 1) != 1:
        raise ValueError(
            f"nccl.commInitRank: rank {rank} has used this id before: make a new one with getUniqueId()"
        )
    context = _context.current()
    if context is None or context.watch is None:
        return create_gloo(store, token, rank, world_size, _timeout().total_seconds(), name)
    patience = transport_timeout(context.timeout)
    comm = create_gloo(store, token, rank, world_size, patience, name)
    members = exchange(store, f"{token}/member", str(context.topology.rank), rank, world_size, patience)
    return context.watch.guard(comm, f"user/{token}", tuple(map(int, members)))


def _timeout() -> datetime.timedelta:
    current = _context.current()
    return datetime.timedelta(seconds=_DEFAULT_TIMEOUT if current is None else current.timeout)


def _parse(unique_id: bytes) -> tuple[str, int, str]:
    if not isinstance(unique_id, (bytes, bytearray)):
        raise TypeError(f"nccl.commInitRank: unique_id: expected bytes, got {type(unique_id).__name__}")
    parts = bytes(unique_id).rstrip(b"\0").decode("ascii", "replace").split(" ")
    if len(parts) != 4 or parts[0] != _MAGIC or not parts[2].isdigit():
        raise ValueError(
            f"nccl.commInitRank: unique_id: expected the {_ID_BYTES} bytes that getUniqueId() returned, got "
            f"{bytes(unique_id[:40])!r} of {len(unique_id)} bytes"
        )
    return parts[1], int(parts[2]), parts[3]


def _connect(host: str, port: int, who: str) -> dist.Store:
    if _server is not None and port == _server.port and host == _own_address():
        return _server
    try:
        return dist.TCPStore(host, port, None, False, _timeout(), wait_for_workers=False)
    except RuntimeError as error:
        raise CommunicationError(
            f"{who}: no answer at {host}:{port}, where the process that made the id should be: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _own_address() -> str:
    """The address under which the other ranks of the job reach this host."""
    current = _context.current()
    if current is None or current.local_size == current.topology.world_size:
        return "127.0.0.1"
    # No packet is sent: connecting a datagram socket only asks the kernel which interface it would use.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", socket.gethostname()), 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
