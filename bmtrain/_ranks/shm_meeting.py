"""Setup of shared memory between the ranks of one host: each passes the file of its segment to the others.

A segment is an anonymous memory file (memfd), handed over through a unix socket. So it has no name that could be left
behind, and the size of /dev/shm does not limit it. The sockets stay open: when a process ends for any reason, its
peers' ends hang up. Where the kernel supports pidfds, the peer's process is watched as well: a socket that a
forked child inherited outlives its process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

from .._C import ShmCommunicator

# All ranks have just met: one that does not connect now has failed.
_MEETING_SECONDS = 60.0
_HUNG_UP = "another rank hung up while segments were exchanged"
_RANK = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def place() -> str:
    """A key that is equal for two processes exactly if they can share memory this way.

    One machine (until its next start), and one network namespace, in which abstract socket names live.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    except OSError:
        return ""


def why_not() -> str:
    """The requirement of shared memory that this process does not meet, in words; empty if it meets all."""
    if not (hasattr(os, "memfd_create") and hasattr(socket, "send_fds") and place()):
        return "this system has no memory files or no /proc"
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return "the size of files is limited here (ulimit -f)"
    try:
        os.close(_create_file(1))
    except OSError as error:
        return f"memory files are not allowed here ({error.strerror})"
    return ""


def connect(
    store: dist.Store, rank: int, size: int, timeout: float, name: str
) -> tuple[ShmCommunicator | None, str]:
    """Exchanges segments with the other ranks, all in the same `place`, and builds the communicator. Collective.

    Returns None and the reason if that failed on some rank: the same outcome on all of them. A RuntimeError means that
    the store was lost, or that a rank is missing.
    """
    made: ShmCommunicator | None = None
    reason = ""
    try:
        made = _exchange(store, rank, size, timeout, name)
    except (EOFError, ConnectionError, TimeoutError, struct.error):
        reason = f"rank {rank}: {_HUNG_UP}"
    except (OSError, RuntimeError) as error:
        reason = f"rank {rank}: {error}"
    outcomes = exchange(store, "outcome", reason or "ok", rank, size, timeout)
    failed = [outcome for outcome in outcomes if outcome != "ok"]
    if not failed:
        return made, ""
    if made is not None:
        made.close()
    return None, min(failed, key=lambda outcome: outcome.endswith(_HUNG_UP))  # prefer a cause


def exchange(store: dist.Store, name: str, value: str, rank: int, size: int, timeout: float) -> list[str]:
    """The values of ``size`` ranks under a ``name`` of the store that is used once, in rank order. Collective."""
    store.set(f"{name}/{rank}", value)
    keys = [f"{name}/{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=timeout))
    return [store.get(key).decode() for key in keys]


def _create_file(size: int) -> int:
    file = os.memfd_create("bmtrain", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, ShmCommunicator.segment_bytes(size))
    except OSError:
        os.close(file)
        raise
    return file


def _exchange(store: dist.Store, rank: int, size: int, timeout: float, name: str) -> ShmCommunicator:
    deadline = time.monotonic() + min(timeout, _MEETING_SECONDS)
    with contextlib.ExitStack() as undo:
        files, watches = [-1] * size, [-1] * (2 * size)
        files[rank] = _create_file(size)
        undo.callback(lambda: _close_all(files))
        given_up = undo.enter_context(contextlib.ExitStack())
        given_up.callback(lambda: _close_all(watches))
        peers = _meet(store, rank, size, deadline, undo)
        for peer in peers.values():
            socket.send_fds(peer, [_RANK.pack(rank)], [files[rank]])
        for other, peer in peers.items():
            message, received, flags, _ = socket.recv_fds(peer, _RANK.size, 1)
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if len(message) != _RANK.size or len(received) != 1:
                raise EOFError
            files[other] = received[0]
            watches[2 * other + 1] = _watch_process(peer)
            watches[2 * other] = peer.detach()
        made = ShmCommunicator(files, watches, rank, size, name, timeout)
        given_up.pop_all()  # the watches belong to the communicator now
    return made


def _meet(
    store: dist.Store, rank: int, size: int, deadline: float, undo: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """Connects to each other rank: as client to lower ranks, as server to higher ranks."""
    address = f"bmtrain-{os.urandom(16).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + address)
        listener.listen(size)
        store.set(f"address/{rank}", address)
        peers: dict[int, socket.socket] = {}
        for other in range(rank):
            key = f"address/{other}"
            store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
            peer = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            peer.settimeout(max(deadline - time.monotonic(), 0.1))
            peer.connect("\0" + store.get(key).decode())
            peer.sendall(_RANK.pack(rank))
            peers[other] = peer
        while len(peers) < size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.1))
            peer = undo.enter_context(listener.accept()[0])
            peer.settimeout(max(deadline - time.monotonic(), 0.1))
            if _credentials(peer)[1] != os.geteuid():
                continue  # abstract names can be seen by other users
            peers[_RANK.unpack(peer.recv(_RANK.size, socket.MSG_WAITALL))[0]] = peer
    return peers


def _credentials(peer: socket.socket) -> tuple[int, int]:
    """Process and user of the peer; the process is 0 if it is in a foreign namespace."""
    process, user, _ = _CREDENTIALS.unpack(
        peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return process, user


def _watch_process(peer: socket.socket) -> int:
    """A descriptor that becomes readable when the peer's process ends; -1 where there is none."""
    process, _ = _credentials(peer)
    if process == 0 or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(process)
    except OSError:
        return -1


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
