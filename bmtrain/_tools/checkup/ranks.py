"""Checks that ranks make together: they meet, and compute correct results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import global_var
from ..._C import ReduceOp, num_update_workers
from ..._ranks import context as _context
from ..._ranks.context import Context
from ...errors import BMTrainError
from ...init import init_distributed
from ...optim import AdamOptimizer
from .findings import Check

_MAX_SKEW_SECONDS = 1.0


def meet(timeout: float) -> Context:
    """This process as a rank of the job; initializes it if needed. Collective.

    Raises:
        BMTrainError, ValueError: as `init_distributed` does.
    """
    if _context.current() is None:
        init_distributed(timeout=timeout)
    return global_var.context()


def check_ranks(timeout: float, clock: Callable[[], float] = time.time) -> Iterator[Check]:
    """The ranks meet, their clocks agree, collectives and Adam compute correct results. Collective."""
    try:
        context = meet(timeout)
    except (BMTrainError, ValueError) as error:
        yield Check(
            "ranks",
            str(error).splitlines()[0],
            "start every rank (WORLD_SIZE of them, each with its own RANK), with a MASTER_ADDR and MASTER_PORT "
            "that all of them reach; look at what the missing ones print",
        )
        return
    world = context.topology.world_size
    carrier = context.world.comm.backend
    transport = context.backend if carrier == context.backend else f"{context.backend} over {carrier}"
    yield Check("ranks", f"rank {context.topology.rank} of {world}, {transport}, {context.device}")
    yield Check("offload", f"extra threads for updates on the host: {num_update_workers()}")
    yield _check_clocks(context, clock)
    yield _check_collectives(context)
    yield _check_adam(context)


def _check_clocks(context: Context, clock: Callable[[], float]) -> Check:
    group = context.world
    group.comm.barrier("doctor")
    # Seconds do not fit in the exact integers of fp32; fp64 holds them to less than a microsecond.
    mine = torch.tensor([clock()], dtype=torch.float64, device=context.device)
    clocks = mine.new_empty(group.size)
    group.comm.all_gather(clocks, mine, "doctor").wait()
    skew = float(clocks.max() - clocks.min())
    if skew > _MAX_SKEW_SECONDS:
        late = int((clocks - clocks.median()).abs().argmax())
        return Check(
            "clocks",
            f"the ranks' clocks differ by {skew:.1f} s, rank {late} the most",
            f"synchronise the clock of rank {late}'s host (timedatectl set-ntp true, or chronyc makestep)",
        )
    return Check("clocks", f"the ranks' clocks agree to {skew * 1e3:.0f} ms")


def _check_collectives(context: Context) -> Check:
    group = context.world
    begin = time.perf_counter()
    mine = torch.full((1024,), float(group.rank + 1), device=context.device)
    whole = mine.new_empty(1024 * group.size)
    group.comm.all_gather(whole, mine, "doctor").wait()
    part = torch.empty_like(mine)
    group.reduce_comm.reduce_scatter(part, whole, ReduceOp.SUM, "doctor").wait()
    wrong = (part != group.size * (group.rank + 1)).any()
    milliseconds = (time.perf_counter() - begin) * 1e3
    if bool(wrong):
        return Check(
            "collectives",
            "a sum over the ranks is wrong",
            "look for a faulty network card or memory (dmesg), then report this",
        )
    return Check(
        "collectives",
        f"gather and sum over {group.size} rank{'' if group.size == 1 else 's'} are right ({milliseconds:.1f} ms)",
    )


def _check_adam(context: Context) -> Check:
    start = torch.linspace(-1, 1, 4099, device=context.device)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers: list[Any] = [AdamOptimizer([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1)]
    for _ in range(3):
        ours.grad, theirs.grad = ours.detach().sin(), theirs.detach().sin()
        for optimizer in optimizers:
            optimizer.step()
    difference = float((ours.detach() - theirs.detach()).abs().max())
    if not difference < 1e-4:
        return Check(
            "Adam",
            f"differs from torch's by {difference:.2g}",
            "set BMTRAIN_CPU_ISA=base and try again; report this with the name of the processor",
        )
    return Check("Adam", f"as torch's; largest difference {difference:.1g}")
