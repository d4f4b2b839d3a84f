"""Models and measurements that benchmarks share: GPTs of Blocks, steps, silence between ranks, turns, a clear card."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._C import SilentCommunicator
from .._engine.policy import BlockPolicy
from .._ranks.context import current
from ..block_layer import Block
from ..global_var import context
from ..optim import OptimManager
from ..synchronize import synchronize
from ..wrapper import BMTrainModelWrapper, model_wrapper_dispatch

_Variant = TypeVar("_Variant")


def sharded(gpt: Any, policy: BlockPolicy | None = None) -> nn.Module:
    """Wraps a GPT, whose layers become Blocks; without a policy, they have the default one."""
    layers = [Block(model_wrapper_dispatch(layer), policy=policy) for layer in gpt.layers]
    gpt.layers = nn.ModuleList(layers)
    return BMTrainModelWrapper(gpt)


def stepping(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, set_to_none: bool = False
) -> Callable[[Tensor], Tensor]:
    """A training step by a manager, which takes a batch and returns its loss."""
    manager = OptimManager()
    manager.add_optimizer(optimizer)

    def step(batch: Tensor) -> Tensor:
        manager.zero_grad(set_to_none=set_to_none)
        loss: Tensor = model(batch)
        manager.backward(loss)
        manager.step()
        return loss.detach()

    return step


@contextmanager
def silence() -> Iterator[None]:
    """For the cost of a step without communication: objects built meanwhile have the same shards and buffers, and
    communicators that move nothing and lend the same memory as usual."""
    own = context()
    real, groups = own.world, own.groups
    silent = dataclasses.replace(
        real, comm=SilentCommunicator(real.comm), reduce_comm=SilentCommunicator(real.reduce_comm)
    )
    object.__setattr__(own, "groups", {**groups, "zero": silent})  # read-only to all other code
    try:
        yield
    finally:
        object.__setattr__(own, "groups", groups)


def _communicators() -> list[Any]:
    known = current()
    return [] if known is None else [known.world.comm, known.world.reduce_comm]


def reset_traffic() -> None:
    """Lets `traffic` count from here."""
    for comm in _communicators():
        comm.reset_traffic()


def traffic() -> tuple[int, int]:
    """Collectives and bytes of this rank since the last reset."""
    counts = [count for comm in _communicators() for count in comm.traffic().values()]
    return sum(messages for messages, _ in counts), sum(sent for _, sent in counts)


def timed(work: Callable[[], Any]) -> float:
    """Seconds from the start of ``work`` on all ranks to its end on all. Collective."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def in_turn(
    variants: Mapping[str, _Variant], time_turn: Callable[[_Variant, int], float], repeat: int
) -> dict[str, list[float]]:
    """Seconds of each turn of variants, which take turns, so that a busy machine disturbs them alike.

    The first turn, in which memory is allocated, does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeat + 1):
        for name, variant in variants.items():
            taken = time_turn(variant, turn)
            seconds[name] += [taken] * (turn > 0)
    return seconds


def clear_card() -> int:
    """Frees what is unused on the card and forgets its peak; returns the bytes that remain in use."""
    gc.collect()  # models are in cycles, and the next one needs the memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
