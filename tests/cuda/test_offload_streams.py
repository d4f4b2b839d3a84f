"""Offloaded updates of parameters on a device, over a fake one: copies that run as late or as early as streams and
events allow change no bit, host memory is bounded, and gradients travel while another block is computed."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness.offloaded import LAYERS, Model, values_of

import bmtrain as bmt
from bmtrain import _C
from bmtrain._engine.engine import current_engine
from bmtrain._engine.observer import Observer
from bmtrain.global_var import context
from bmtrain.optim.places.overlap.staging import SLOTS


class Run:
    """Training with everything that reads or changes gradients between steps."""

    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Model().to(dtype)
        self.optimizer = bmt.optim.AdamOffloadOptimizer(
            self.model.parameters(), lr=1e-2, weight_decay=0.1, **options
        )
        self.manager = bmt.optim.OptimManager(loss_scale=2.0**10)
        self.manager.add_optimizer(self.optimizer)
        self.x = torch.randn(6, 40).to(dtype)
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        if number % 3 == 0:
            self.manager.zero_grad(set_to_none=number % 2 == 0)
        loss = self.model(self.x).float().square().mean()
        if number % 3 == 1:
            self.manager.zero_grad()
        self.manager.backward(loss)
        self.manager.clip_grad_norm(self.optimizer.param_groups, max_norm=0.1)
        self.manager.step()
        if number % 3 == 2:
            self.manager.zero_grad()
            assert self.model.layers[2].bias.grad is not None  # read while its update is under way
            assert not self.model.layers[2].bias.grad.any()
        self.losses.append(loss.item())
        assert self.manager.loss_scale == 2.0**10  # no step was skipped

    def steps(self, count: int) -> list[torch.Tensor]:
        for number in range(count):
            self.step(number)
        return [torch.tensor(self.losses), *values_of(self.model, [self.optimizer])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lazy", [False, True])
def test_no_bit_changes(staged: ctypes.CDLL, dtype: torch.dtype, lazy: bool) -> None:
    expected = Run(dtype, overlap=False).steps(9)
    staged.fake_lazy(lazy)
    _C.disturb_updates(200)
    run = Run(dtype)
    found = run.steps(9)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    staging = run.optimizer._place.overlap._stagings.popitem()[1]
    assert len({memory.data_ptr() for memory in (*staging._gradients, *staging._parameters)}) == 2 * SLOTS


@pytest.mark.parametrize("number", range(LAYERS))
def test_a_block_can_be_needed_before_what_had_its_slot(staged: ctypes.CDLL, number: int) -> None:
    """Updates differ in size: the gradients of one come while the parameters of the one before leave."""
    results = []
    for overlap in (False, True):
        run = Run(torch.bfloat16, overlap=overlap)
        for _ in range(4):
            staged.fake_lazy(overlap)
            _C.disturb_updates(100)
            run.manager.zero_grad()
            assert run.model.layers[number].weight.shape == (768,)  # waits, after the first step
            run.manager.backward(run.model(run.x).float().square().mean())
            for p in run.model.parameters():
                assert p.grad is not None  # so that the step copies all of them
            run.manager.step()
        results.append(values_of(run.model, [run.optimizer]))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("order", [1, -1])
def test_any_block_can_be_needed_first(staged: ctypes.CDLL, order: int) -> None:
    staged.fake_lazy(1)
    runs = [Run(torch.bfloat16, overlap=overlap) for overlap in (False, True)]
    for run in runs:
        for number in range(3):
            run.step(number)
    blocks = [list(run.model.layers[::order]) for run in runs]
    for expected, found in zip(*blocks, strict=True):
        assert torch.equal(expected.weight.detach(), found.weight.detach())


def test_copies_of_one_block_go_on_while_another_is_computed(staged: ctypes.CDLL) -> None:
    run = Run(torch.bfloat16)
    for number in range(3):
        run.step(number)
    run.manager.zero_grad()
    run.manager.backward(run.model(run.x).float().square().mean())
    assert all(p.grad is not None for p in run.model.parameters())  # who reads them has them copied again
    staged.fake_journal()
    run.manager.step()
    queued = staged.fake_journal().decode().splitlines()
    # The step has sent off the gradients of as many blocks as have a slot, before any is computed.
    assert sum(line.startswith("work on ") for line in queued) >= SLOTS
    list(run.optimizer.state)  # waits for all
    rest = staged.fake_journal().decode().splitlines()
    copies = [line for line in (*queued, *rest) if line.startswith("work on ")]
    streams = {line.rpartition(" ")[2] for line in copies}
    assert len(streams) == 2
    assert "0" not in streams
    assert len(copies) == 2 * (LAYERS + 1)  # gradients of each block and of what is outside, and parameters


class Waits(Observer):
    """Writes down in which order blocks were launched and their updates waited for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def computed(self, runtime: Any) -> None:
        self.events.append(("launched", runtime.label))

    def waiting(self, name: str, reason: str) -> AbstractContextManager[None]:
        if reason in ("update", "gather"):
            self.events.append((reason, name))
        return nullcontext()


def test_the_host_waits_for_an_update_once_the_block_before_is_launched(staged: ctypes.CDLL) -> None:
    run = Run(torch.bfloat16)
    for number in range(4):  # the last one leaves every update under way
        run.step(number)
    labels = [block._runtime.label for block in run.model.layers]
    engine = current_engine(context())
    engine.observer = waits = Waits()
    try:
        loss = run.model(run.x).float().square().mean()
        lagging, waits.events = waits.events, []
        loss.backward()
        waits.events = []
        run.model(run.x)
    finally:
        engine.observer = None
    for before, label in pairwise(labels):
        at = lagging.index(("update", label))
        assert lagging.index(("launched", before)) < at < lagging.index(("gather", label))
    # Without a step between, gathers of a forward overlap with the block before again.
    for before, label in pairwise(labels):
        assert waits.events.index(("gather", label)) < waits.events.index(("launched", before))


def test_a_failed_update_is_told(staged: ctypes.CDLL) -> None:
    run = Run(torch.bfloat16)
    run.step(0)
    list(run.optimizer.state)  # waits
    label = run.model.layers[3]._runtime.label
    _C.disturb_updates(0, label)
    run.step(4)
    with pytest.raises(RuntimeError, match="the update of its parameters failed: failed on request"):
        list(run.optimizer.state)
