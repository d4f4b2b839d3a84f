"""Connection of the watchdogs of a job to rank 0's, through the store of the rendezvous."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence

from torch.distributed import Store

from .._base.aside import Aside
from .._base.said import Waiting
from ..errors import CommunicationError
from . import endings
from .lines import Lines, listen

_POLL_SECONDS = 0.2


def open_hub(store: Store, host: str, hosts: Sequence[str]) -> tuple[socket.socket, str]:
    """On rank 0: opens a port for the other watchdogs; publishes it in the store, with the secret that admits them."""
    listener, address = listen(host, len(set(hosts)) > 1)
    secret = secrets.token_hex(16)
    store.set("watch", json.dumps([address, listener.getsockname()[1], secret]))
    return listener, secret


def reach_hub(
    store: Store, rank: int, host: str, hosts: Sequence[str], timeout: float
) -> tuple[Lines, str, str]:
    """On another rank: connects to rank 0's watchdog; also returns the job's secret and rank 0's process.

    ``host`` is this rank's name of rank 0's host, ``hosts`` has each rank's name of its own.
    """
    who = f"rank {rank} of {len(hosts)}"
    try:
        published, port, secret = json.loads(_await(store, "watch", timeout))
        # What rank 0 calls its host may mean another one elsewhere (localhost); what this rank was started with leads
        # to rank 0, but perhaps not to the interface that it listens on.
        names = [published, host] if hosts[rank] == hosts[0] else [host, published]
        lines, process = _connect(dict.fromkeys(names), port, secret, rank, timeout)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, (ConnectionResetError, BrokenPipeError, RuntimeError)):
            raise CommunicationError(
                f"{who}: cannot connect the ranks: rank 0 ended before its watchdog let this rank in ({reason}): "
                "look for its error"
            ) from None
        raise CommunicationError(
            f"{who}: cannot reach the watchdog of rank 0, at a port of its own on the host of MASTER_ADDR: {reason}; "
            "see whether rank 0 ended"
        ) from None
    return lines, secret, process


def _connect(names: Iterable[str], port: int, secret: str, rank: int, timeout: float) -> tuple[Lines, str]:
    """Connects to the first of the names at which the hub of this job accepts this rank."""
    failures: list[OSError] = []
    for name in names:
        try:
            lines = Lines(socket.create_connection((name, port), timeout))
        except OSError as error:
            failures.append(error)
            continue
        lines.connection.settimeout(timeout)
        lines.send({"do": "hello", "rank": rank, "secret": secret, "process": endings.own_process()})
        welcome = lines.receive()
        if welcome:
            lines.connection.settimeout(0.5)
            return lines, str(welcome[0].get("process", ""))
        lines.close()
        failures.append(ConnectionResetError(f"{name} port {port} closed the connection"))
    raise failures[0]


def _await(store: Store, key: str, timeout: float) -> bytes:
    """Waits for a key of the store, which all ranks have reached by now."""
    # Aside: a client of torch's store waits without a limit for a server that is stopped.
    waiting, aside = Waiting(f"watch-{os.getppid()}"), Aside(lambda: bytes(store.get(key)), "bmtrain-store")
    end = time.monotonic() + timeout
    while not aside.wait(_POLL_SECONDS):
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {timeout:g} s")
        if waiting.is_due():
            waiting.report("rank 0 to open its watchdog's port")
    return aside.result()
