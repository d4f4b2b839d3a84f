"""Bandwidth between this job's ranks: one table per kind of transfer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from .._base.host_memory import available_bytes
from .._C import ReduceOp, Work
from .._ranks.comm import wire_device
from .._ranks.context import Context
from ..global_var import context
from ..utils import print_rank

__all__ = ["all_gather", "reduce_scatter", "send_recv"]

_SMALLEST = 2**10
_LARGEST = 2**32
_DTYPE = torch.bfloat16
_ITEM = 2  # bytes of an element

# Posts one transfer; None where this rank takes no part in it.
_Post: TypeAlias = Callable[[], "Work | None"]


def all_gather(*, max_bytes: int = _LARGEST) -> None:
    """Time all-gathers of 2^10 bytes up to ``max_bytes`` of gathered data; rank 0 prints the table. Collective.

    Args:
        max_bytes: largest size; it stops earlier when memory does not allow more.

    Raises:
        RuntimeError: before `init_distributed`.
    """
    current = context("benchmark.all_gather()")
    comm = current.world.comm

    def prepare(size: int) -> _Post:
        part = torch.zeros(max(size // _ITEM // comm.size, 1), dtype=_DTYPE, device=current.device)
        whole = torch.empty(part.numel() * comm.size, dtype=_DTYPE, device=current.device)
        return lambda: comm.all_gather(whole, part, "benchmark")

    _measure("all_gather", current, max_bytes, prepare)


def reduce_scatter(*, max_bytes: int = _LARGEST) -> None:
    """Time reduce-scatters of 2^10 bytes up to ``max_bytes`` of input; rank 0 prints the table. Collective.

    Args:
        max_bytes: largest size; it stops earlier when memory does not allow more.

    Raises:
        RuntimeError: before `init_distributed`.
    """
    current = context("benchmark.reduce_scatter()")
    comm = current.world.comm

    def prepare(size: int) -> _Post:
        part = torch.empty(max(size // _ITEM // comm.size, 1), dtype=_DTYPE, device=current.device)
        whole = torch.zeros(part.numel() * comm.size, dtype=_DTYPE, device=current.device)
        return lambda: comm.reduce_scatter(part, whole, ReduceOp.SUM, "benchmark")

    _measure("reduce_scatter", current, max_bytes, prepare)


def send_recv(*, max_bytes: int = _LARGEST) -> None:
    """Time messages of 2^10 bytes up to ``max_bytes`` from rank 0 to 1, 2 to 3, ...; rank 0 prints. Collective.

    An odd last rank idles.

    Args:
        max_bytes: largest size; it stops earlier when memory does not allow more.

    Raises:
        RuntimeError: before `init_distributed`.
    """
    current = context("benchmark.send_recv()")
    comm = current.world.comm
    peer = comm.rank ^ 1

    def prepare(size: int) -> _Post:
        if peer >= comm.size:
            return lambda: None
        message = torch.zeros(size // _ITEM, dtype=_DTYPE, device=current.device)
        if comm.rank < peer:
            return lambda: comm.send(message, peer, "benchmark")
        return lambda: comm.recv(message, peer, "benchmark")

    _measure("send_recv", current, max_bytes, prepare)


def _measure(name: str, current: Context, max_bytes: int, prepare: Callable[[int], _Post]) -> None:
    comm = current.world.comm
    print_rank(f"{name}: {comm.size} ranks, {comm.backend}, {_DTYPE}")
    print_rank(f"{'size (bytes)':>14} {'time (ms)':>12} {'GB/s':>10}")
    for size in _sizes(max_bytes, current):
        post = prepare(size)
        _run(post)  # the first transfer of a size touches fresh memory
        _wait_for_all(current)
        started = time.perf_counter()
        _run(post)
        _wait_for_device(current)
        seconds = time.perf_counter() - started
        print_rank(f"{size:>14} {seconds * 1e3:>12.3f} {size / seconds / 1e9:>10.3f}")


def _run(post: _Post) -> None:
    work = post()
    if work is not None:
        work.wait()


def _sizes(max_bytes: int, current: Context) -> Iterator[int]:
    """Powers of two that fit into the memory of every rank; the ranks agree on each."""
    comm = current.world.comm
    size = _SMALLEST
    while size <= max_bytes:
        # A rank holds the whole, its part, and the transport's staging buffers: at most three times the size.
        fits = torch.tensor([3 * size <= _free_bytes(current)], dtype=torch.uint8, device=wire_device(comm))
        comm.all_reduce(fits, ReduceOp.MIN, "benchmark").wait()
        if not fits.item():
            print_rank(f"{size:>14} bytes and more do not fit into memory")
            return
        yield size
        size *= 2


def _free_bytes(current: Context) -> int:
    """Memory this rank may still use: of its device, or its share of the host's."""
    if current.device.type == "cuda":
        return int(torch.cuda.mem_get_info(current.device)[0])
    return available_bytes() // current.local_size


def _wait_for_device(current: Context) -> None:
    if current.device.type == "cuda":
        torch.cuda.synchronize(current.device)


def _wait_for_all(current: Context) -> None:
    _wait_for_device(current)
    current.world.comm.barrier("benchmark")
