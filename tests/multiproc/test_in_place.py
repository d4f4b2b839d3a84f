"""Ranks of one host gather and reduce large blocks in memory that they share: what is copied, and that nobody sees
what is not meant for it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Status, rank_outcomes, run_ranks
from harness.large_blocks import DIM, LAYERS, Layer, Small, inputs, model_of

import bmtrain as bmt
from bmtrain import _C
from bmtrain.benchmark._training import silence
from bmtrain.errors import CommunicationError
from bmtrain.global_var import context


class InStep(Layer):
    """Lets no rank go on in backward before all have come to this layer.

    A rank has two buffers for gradients. One that is so far ahead of another that this one still reads both of them
    sends a copy, as it may wherever processors are few.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: bmt.synchronize())
        return super().forward(x)


def copied_in_a_step(options: dict[str, Any], accumulated: int = 0) -> tuple[int, int, int]:
    model, group = model_of(kind=InStep, **options), context().world
    for step in range(4):
        group.comm.reset_traffic()
        group.reduce_comm.reset_traffic()
        for _ in range(accumulated):
            with bmt.no_sync():
                model(inputs(step)).sum().backward()
        model(inputs(step)).sum().backward()
    gathers, barriers = group.comm.bytes_copied, group.comm.traffic()["barrier"][0]
    reductions = group.reduce_comm.bytes_copied
    group.comm.reset_traffic()
    bmt.synchronize()
    partition = model[0]._storages[0].shards.layout.partition
    return gathers - barriers * group.comm.bytes_copied, reductions, 4 * partition


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_step_copies_its_own_slice_and_nothing_else(world: int, recompute: bool) -> None:
    for gathers, reductions, partition in run_ranks(world, copied_in_a_step, {"use_checkpoint": recompute}):
        assert gathers == (2 * LAYERS - 1) * partition  # each rank its slice, once for all
        assert reductions == 0  # gradients are summed from where autograd's have landed


@pytest.mark.parametrize(
    ("policy", "accumulated"),
    [
        (bmt.BlockPolicy(level=2), 0),
        (bmt.BlockPolicy(level=1), 0),
        (bmt.BlockPolicy(level=3, keep_gathered=True), 2),
        (bmt.BlockPolicy(level=1, gather_dtype=torch.bfloat16), 0),
    ],
    ids=["level 2", "level 1", "kept", "through bf16"],
)
def test_what_stays_gathered_is_copied_once(policy: bmt.BlockPolicy, accumulated: int) -> None:
    for gathers, _, partition in run_ranks(2, copied_in_a_step, {"policy": policy}, accumulated):
        assert gathers == LAYERS * partition * (policy.gather_dtype or torch.float32).itemsize // 4


def step_without_communication() -> tuple[int, int, int]:
    """Bytes copied, and bytes in place before and after a step of another model that moves nothing."""
    model, comm = model_of(), context().world.comm
    with silence():
        silent = model_of()
    for step in range(3):
        model(inputs(step)).sum().backward()
    before = comm.bytes_in_place
    comm.reset_traffic()
    for step in range(3):
        silent(inputs(step)).sum().backward()
    found = comm.bytes_copied, before, comm.bytes_in_place
    model(inputs()).sum().backward()  # the ranks still agree on who uses what
    return found


def test_a_step_without_communication_uses_the_same_memory() -> None:
    for copied, before, after in run_ranks(2, step_without_communication, fresh=True):
        assert copied == 0
        assert before == after > 0


def training(options: dict[str, Any], accumulate: bool) -> list[Any]:
    """Losses and parameters after some steps in which the ranks are early and late in turn."""
    rank = bmt.rank()
    model = model_of(delay=lambda call: 0.01 * ((call + rank) % 3 == 0), **options)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    seen: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        if accumulate:
            with bmt.no_sync():
                model(inputs(step)).square().sum().backward()
        loss = model(inputs(step + 10)).square().sum()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            seen.append((loss.item(), model(inputs(step)).double().sum().item()))
    return [*seen, *(p.detach().double().sum().item() for p in model.parameters())]


@pytest.mark.parametrize(
    ("world", "options", "accumulate"),
    [
        (2, {}, False),
        (3, {"use_checkpoint": False}, True),
        (2, {"zero_level": 2}, True),
        (2, {"policy": bmt.BlockPolicy(level=1)}, True),
        (3, {"policy": bmt.BlockPolicy(level=3, keep_gathered=True)}, True),
        (2, {"policy": bmt.BlockPolicy(compute_dtype=torch.bfloat16)}, False),
        (3, {"policy": bmt.BlockPolicy(gather_dtype=torch.bfloat16)}, False),
        (2, {"policy": bmt.BlockPolicy(level=1, gather_dtype=torch.bfloat16)}, True),
    ],
    ids=[
        "recomputed",
        "accumulated",
        "level 2",
        "level 1",
        "kept",
        "computed in bf16",
        "through bf16",
        "through bf16, level 1",
    ],
)
def test_same_bits_as_over_gloo(world: int, options: dict[str, Any], accumulate: bool) -> None:
    over_gloo, over_shm = (
        run_ranks(world, training, options, accumulate, environment={"BMTRAIN_CPU_TRANSPORT": transport})
        for transport in ("gloo", "shm")
    )
    assert over_gloo == over_shm


class Meddler(Layer):
    """While its backward runs it writes a gradient of the block behind it, which is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and self.behind:
            x.register_hook(self.meddle)
        return super().forward(super().forward(x))

    def meddle(self, _: torch.Tensor) -> None:
        for p in self.behind:
            p.grad = torch.ones_like(p) if p.grad is None else p.grad.add_(1.0)


def training_with_delays(seeds: int, options: dict[str, Any], dtype: torch.dtype) -> list[list[float]]:
    """Gradients of some steps, at first without delays; what usually comes early comes late, and the reverse."""
    torch.manual_seed(0)
    model = bmt.TransformerBlockList([bmt.Block(Meddler().to(dtype), **options) for _ in range(5)])
    model[1].behind.append(model[2].weight)
    seen = []
    for seed in range(seeds):
        _C.set_random_delays(seed * bmt.world_size() + bmt.rank(), 4000 if seed else 0)
        seen.append([])
        for step in range(3):
            if step < 2:  # the last one adds to what is there
                model.zero_grad(set_to_none=step == 0)
            model(inputs(step).to(dtype).requires_grad_()).float().square().sum().backward()
            seen[-1] += [p.grad.double().sum().item() for p in model.parameters()]
    _C.set_random_delays(0, 0)
    return seen


@pytest.mark.parametrize(
    ("world", "recompute", "dtype"),
    [(2, False, torch.float32), (3, True, torch.float32), (2, False, torch.bfloat16)],
)
def test_random_delays_change_no_bit(world: int, recompute: bool, dtype: torch.dtype) -> None:
    options = {"use_checkpoint": recompute}
    for first, *others in run_ranks(world, training_with_delays, 6, options, dtype):
        assert all(other == first for other in others)
    assert (
        first
        == run_ranks(
            world,
            training_with_delays,
            1,
            options,
            dtype,
            environment={"BMTRAIN_CPU_TRANSPORT": "gloo"},
        )[-1][0]
    )


class Scribbler(Layer):
    """Writes into its gathered weight, on every rank something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.add_(bmt.rank() + 1)
            self.weight.data[0] = 7.0  # a write that counts no version
        time.sleep(0.05 * bmt.rank())
        return torch.nn.functional.linear(x, self.weight)


def writes_into_what_is_gathered() -> None:
    torch.manual_seed(0)
    block = bmt.Block(Scribbler(), use_checkpoint=False)
    whole = block.weight.gather().detach().view(DIM, DIM).clone()
    mine = whole + bmt.rank() + 1
    mine[0] = 7.0
    x = inputs()
    for _ in range(5):  # more than there are buffers
        with torch.no_grad():
            torch.testing.assert_close(block(x), torch.nn.functional.linear(x, mine), rtol=1e-5, atol=1e-3)
    assert torch.equal(block.weight.gather().view(DIM, DIM), whole)


def test_what_a_forward_writes_stays_with_its_rank() -> None:
    run_ranks(2, writes_into_what_is_gathered)


LONG = (3 << 20) + 5  # elements of a buffer that ends within a page


class ScribblerAtTheEnd(bmt.DistributedModule):
    """Writes to the end of what is gathered, some megabytes behind its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.arange(LONG, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[-1].add_(1 + bmt.rank())
        return x * self.weight[-1]


def writes_to_the_end() -> list[float]:
    found = []
    for _ in range(4):
        block = bmt.Block(ScribblerAtTheEnd(), policy=bmt.BlockPolicy(level=2, recompute="off"))
        for _ in range(3):
            with torch.no_grad():
                found.append(block(torch.ones(())).item())
        found.append(block(torch.ones(())).item())
        del block  # while it is gathered for a backward
        gc.collect()
    return [value - LONG for value in found]


def test_what_a_forward_writes_is_gone_with_its_use_of_the_memory() -> None:
    assert run_ranks(2, writes_to_the_end) == [[0.0] * 16, [1.0] * 16]


def writes_while_another_computes() -> None:
    """Rank 0 changes its shards as soon as its own forward is over; rank 1 is in the middle of it."""
    model = model_of(delay=lambda call: 0.1 * bmt.rank())
    whole = [p.gather().detach() for p in model.parameters()]
    wanted = inputs()
    for weight, bias in zip(whole[::2], whole[1::2], strict=True):
        wanted = wanted + torch.tanh(torch.nn.functional.linear(wanted, weight.view(DIM, DIM), bias))
    for training in (False, True):
        with torch.set_grad_enabled(training):
            result = model(inputs()).detach()
        for p in model.parameters():
            p.data.add_(1.0)
        torch.testing.assert_close(result, wanted)
        for p, full in zip(model.parameters(), whole, strict=True):
            assert torch.equal(p.gather().flatten(), full.flatten() + 1.0)
            p.data.copy_(p._spec.slice_of(full.flatten()))


def test_writes_after_a_forward_do_not_reach_a_rank_that_is_behind() -> None:
    run_ranks(2, writes_while_another_computes)


def models_that_end_gathered(late: int, level: int) -> tuple[list[float], list[int]]:
    """Models are dropped while blocks are gathered, by one rank before the others."""
    results, sizes = [], []
    for number in range(8):
        model = model_of(2, policy=bmt.BlockPolicy(level=level, recompute="off"))
        for _ in range(2):
            model(inputs(number)).sum().backward()
        model(inputs(number))  # blocks stay gathered for a backward that does not come
        if bmt.rank() != late:
            del model
            gc.collect()
        other = model_of(3)
        loss = other(inputs(number)).square().sum()
        loss.backward()
        model = None
        gc.collect()
        results += [loss.item(), *(p.grad.double().sum().item() for p in other.parameters())]
        sizes.append(context().world.comm.bytes_in_place)
    return results, sizes


@pytest.mark.parametrize("level", [1, 2, 3])
def test_models_dropped_while_gathered(level: int) -> None:
    early, late = (run_ranks(2, models_that_end_gathered, rank, level) for rank in (0, 1))
    assert early == late
    results, sizes = early[0]
    assert sizes == early[1][1]
    num = len(results) // 8
    assert len({results[number * num] for number in range(8)}) == 8
    assert len(set(sizes[1:])) == 1  # what was left behind is used again


def memory_of_a_model_that_is_gone() -> tuple[int, int]:
    """Bytes in place of a model that is gone, right after it and after many gathers of another one."""
    comm = context().world.comm
    before = comm.bytes_in_place
    model = model_of(5, zero_level=2)
    first = model(inputs())
    first.sum().backward()
    del model
    gc.collect()
    after = comm.bytes_in_place - before
    other = bmt.Block(Small())
    with torch.no_grad():
        wanted = [other(number) for number in range(8)]
        for step in range(4200):
            result = other(step % 8)
            assert result == wanted[step % 8]
    left = comm.bytes_in_place - before
    assert torch.equal(model_of(5, zero_level=2)(inputs()), first)  # in that memory, which is there anew
    return after, left


def test_memory_of_a_model_that_is_gone_is_given_back() -> None:
    block, small = 4 * (DIM * DIM + DIM), 4 * 520 * 520
    for used, left in run_ranks(2, memory_of_a_model_that_is_gone, fresh=True):
        assert used >= LAYERS * block / 2
        assert left <= 2 * small / 2 + 4096


class Nested(Layer):
    """A layer that calls a block while it is gathered itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.__dict__["inner"] = inner  # a block of its own, not a part of this one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.inner is None else self.inner(x))


def many_gathered_at_once() -> list[float]:
    torch.manual_seed(0)
    blocks: list[Any] = []
    for _ in range(8):
        blocks.append(bmt.Block(Nested(blocks[-1] if blocks else None)))
    results = []
    for step in range(3):
        loss = blocks[-1](inputs(step)).square().sum()
        loss.backward()
        results.append(loss.item())
    return results + [p.grad.double().sum().item() for block in blocks for p in block.parameters()]


def test_more_blocks_gathered_at_once_than_there_are_buffers() -> None:
    over_gloo, over_shm = (
        run_ranks(2, many_gathered_at_once, environment={"BMTRAIN_CPU_TRANSPORT": transport})
        for transport in ("gloo", "shm")
    )
    assert over_gloo == over_shm


def killed_in_a_forward() -> list[str]:
    rank = bmt.rank()

    def die(call: int) -> float:
        if rank == 1 and call == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    model = model_of(delay=die)
    with pytest.raises(CommunicationError, match="rank 1 died"):
        for _ in range(3):
            model(inputs()).sum().backward()
    return files_of_shared_memory()


def files_of_shared_memory() -> list[str]:
    """What this process has open or mapped of /dev/shm, where other programs have files as well."""
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in found if "/dev/shm" in name]


def test_a_rank_killed_while_memory_is_shared() -> None:
    outcomes = rank_outcomes(2, killed_in_a_forward, fresh=True)
    assert outcomes[1].status is Status.DIED
    assert outcomes[0].status is Status.RETURNED, outcomes[0]
    assert outcomes[0].value == []
