"""Two hosts on one: network namespaces joined by a pair of virtual interfaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence

import pytest

__all__ = ["ip", "joined_hosts"]


def ip(*arguments: str) -> None:
    """Run the program ``ip``."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def joined_hosts(
    addresses: Sequence[str] = ("10.77.0.1/24", "10.77.0.2/24"),
) -> Iterator[list[tuple[str, str]]]:
    """Namespace and interface of two hosts with these addresses. Skips the test where they cannot be made."""
    mark = os.getpid() % 100_000
    hosts = [(f"bmtrain-{mark}-{side}", f"bmt{mark}{side}") for side in "ab"]
    try:
        for namespace, _ in hosts:
            ip("netns", "add", namespace)
        (first, one), (second, other) = hosts
        ip("link", "add", one, "netns", first, "type", "veth", "peer", "name", other, "netns", second)
        for address, (namespace, interface) in zip(addresses, hosts, strict=True):
            # "nodad": without the second in which IPv6 looks whether another host has the address.
            options = ["nodad"] if ":" in address else []
            ip("-n", namespace, "address", "add", address, "dev", interface, *options)
            ip("-n", namespace, "link", "set", interface, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(hosts)
        reason = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"network namespaces cannot be made here: {reason.strip()}")
    try:
        yield hosts
    finally:
        _remove(hosts)


def _remove(hosts: list[tuple[str, str]]) -> None:
    """The interfaces go with their namespaces."""
    for namespace, _ in hosts:
        subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)
