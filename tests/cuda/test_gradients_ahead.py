"""Gradients that go to the host inside backward, over a fake device: when they do, and that no bit depends on it,
whatever happens to them between backward and step."""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.gradient_changes import WAYS, Run, clipped, plain
from harness.offloaded import LAYERS, values_of

import bmtrain as bmt
from bmtrain import _C
from bmtrain.optim.places.overlap import ahead

#: Blocks of the last of six steps whose gradients come from a copy that was made inside backward.
USED = {
    "plain": LAYERS,
    "clipped": LAYERS,
    "clipped_after_forward": LAYERS,
    "clipped_twice": LAYERS,
    "not_clipped": LAYERS,
    "unsent_then_sent": LAYERS,
    "a_part_clipped": LAYERS - 1,
    "written_through_data": LAYERS - 1,
    "written_in_place": LAYERS - 1,
    "written_by_an_older_holder": LAYERS - 1,
    "written_through_the_flat_gradient": LAYERS - 1,
    "replaced": LAYERS - 1,
    "set_unread": LAYERS - 1,
    "added_to_with_a_graph_kept": 0,
    "regularised": LAYERS - 2,
    "hooked": LAYERS - 1,
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks whose copies a step has taken, step by step."""
    counts: list[int] = []
    take, end_step = ahead.SentAhead.take, ahead.SentAhead.end_step
    taken = 0

    def counting_take(self: Any, *args: Any) -> Any:
        nonlocal taken
        result = take(self, *args)
        taken += result is not None
        return result

    def counting_end(self: Any) -> None:
        nonlocal taken
        counts.append(taken)
        taken = 0
        end_step(self)

    monkeypatch.setattr(ahead.SentAhead, "take", counting_take)
    monkeypatch.setattr(ahead.SentAhead, "end_step", counting_end)
    return counts


def bits(run: Run, way: Callable[[Run, int], None], steps: int = 6) -> list[torch.Tensor]:
    for number in range(steps):
        way(run, number)
        run.manager.step()
    return [*values_of(run.model, run.optimizers), torch.tensor(run.manager.loss_scale)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", WAYS)
def test_no_bit_changes(staged: ctypes.CDLL, name: str, used: list[int]) -> None:
    way = WAYS[name]
    expected = bits(Run(overlap=False), way)
    for lazy in (False, True):
        used.clear()
        staged.fake_lazy(lazy)
        _C.disturb_updates(100)
        assert_same(bits(Run(overlap=True), way), expected)
        if name in USED:
            assert used[-1] == USED[name]


@pytest.mark.parametrize("kind", ["AdamOffloadOptimizer", "SGDOffloadOptimizer", "LionOffloadOptimizer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_optimizer(staged: ctypes.CDLL, kind: str, dtype: torch.dtype, used: list[int]) -> None:
    results = []
    for overlap in (False, True):
        staged.fake_lazy(overlap)
        run = Run(overlap, dtype)
        run.optimizers = [getattr(bmt.optim, kind)(run.model.parameters(), lr=1e-3, overlap=overlap)]
        run.manager.optimizers[:] = run.optimizers
        results.append(bits(run, clipped))
    assert_same(*results)
    assert used[-1] == LAYERS


def weights_and_biases(run: Run) -> list[list[torch.Tensor]]:
    first = next(run.model.parameters())
    return [[first, *(layer.weight for layer in run.layers)], [layer.bias for layer in run.layers]]


def first_and_last_layers(run: Run) -> list[list[torch.Tensor]]:
    first, last = (
        [p for layer in layers for p in layer.parameters()] for layers in (run.layers[:2], run.layers[2:])
    )
    return [[next(run.model.parameters()), *first], last]


@pytest.mark.parametrize("shares_of", [weights_and_biases, first_and_last_layers])
def test_several_optimizers(staged: ctypes.CDLL, shares_of: Callable[[Run], Any], used: list[int]) -> None:
    results = []
    for overlap in (False, True):
        staged.fake_lazy(overlap)
        run = Run(overlap)
        run.add(shares_of(run))
        results.append(bits(run, clipped))
    assert_same(*results)
    # Of a block that two optimizers share the second one's part is updated inside its step.
    assert used[-2:] == ([LAYERS, LAYERS] if shares_of is weights_and_biases else [2, 3])


def test_a_fraction_stays_on_the_device(staged: ctypes.CDLL, used: list[int]) -> None:
    results = []
    for overlap in (False, True):
        run = Run(overlap, fraction=0.4)
        results.append(bits(run, clipped))
    assert_same(*results)
    assert used[-1] == LAYERS - 2


def test_updates_that_start_in_backward(staged: ctypes.CDLL) -> None:
    results = []
    for early in (False, True):
        run = Run(overlap=True)
        run.manager = bmt.optim.OptimManager(step_in_backward=early)
        run.add([list(run.model.parameters())])
        results.append(bits(run, plain))
    assert_same(*results)


def copies_to_the_host(journal: bytes, stream: str) -> int:
    return sum(line == f"work on {stream}" for line in journal.decode().splitlines())


def test_gradients_leave_inside_backward(staged: ctypes.CDLL) -> None:
    """One copy for each block, behind the reduction that has completed its gradients; the step sends what is outside
    blocks, and the number by which clipping multiplies."""
    run = Run(overlap=True)
    for number in range(2):
        clipped(run, number)
        run.manager.step()
    list(run.optimizers[0].state)  # waits
    loss = run.loss()
    run.manager.zero_grad()
    staged.fake_journal()
    run.manager.backward(loss)
    journal = staged.fake_journal()
    lines = journal.decode().splitlines()
    work = Counter(line for line in lines if line.startswith("work on "))
    (sent, count), *others = work.most_common()
    assert count == LAYERS
    assert len(others) == 1  # the sum over ranks of what is outside blocks
    to_host = sent.rpartition(" ")[2]
    assert to_host != "0"
    for block, at in enumerate(n for n, line in enumerate(lines) if line == sent):
        # It waits for what the computing stream has queued, which has waited for the block's reduction.
        assert lines[at - 1].startswith(f"{to_host} waits for event ")
        assert lines[at - 2].endswith(" on 0")
        assert sum(line.startswith("Send on ") for line in lines[:at]) >= block + 1
    run.clip()
    assert copies_to_the_host(staged.fake_journal(), to_host) == 1
    run.manager.step()
    list(run.optimizers[0].state)  # waits
    journal = staged.fake_journal()
    assert copies_to_the_host(journal, to_host) == 1
    assert journal.decode().count("work on ") == 1 + LAYERS + 1  # all parameters came back by copies


def test_nothing_is_sent_before_the_last_backward_of_a_step(staged: ctypes.CDLL) -> None:
    run = Run(overlap=True)

    def train() -> list[int]:
        run.manager.zero_grad()
        counts = []
        for _ in range(3):
            loss = run.loss()
            staged.fake_journal()
            run.manager.backward(loss)
            counts.append(staged.fake_journal().decode().count("work on ") - 1)  # a sum outside blocks
        run.manager.step()
        return counts

    assert train() == [0, 0, 0]
    train()
    assert train() == [0, 0, LAYERS]


def test_host_memory_is_bounded(
    staged: ctypes.CDLL, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first blocks, which the next forward needs first, have their room; the others go through the slots."""
    of_a_block = 2048  # bytes: 512 with the bias, and what this rank has of the weight
    monkeypatch.setattr(ahead, "available_bytes", lambda: 2 * 4 * 2 * of_a_block + 100)  # for two ranks
    run = Run(overlap=True)
    before = bmt.memory_report(run.model, run.manager)
    expected = bits(Run(overlap=False), clipped)
    found = bits(run, clipped)
    assert_same(found, expected)
    assert used[-1] == 2
    assert before.staging == 0
    staging = bmt.memory_report(run.model, run.manager).staging
    assert 2 * of_a_block < staging < 2 * of_a_block + 8 * of_a_block  # and three slots


def test_a_parameter_can_be_copied_in_between(staged: ctypes.CDLL) -> None:
    run = Run(overlap=True)
    for number in range(2):
        clipped(run, number)
        run.manager.step()
    plain(run, 2)
    weight = run.layers[0].weight
    before, twin = weight.detach().clone(), copy.deepcopy(weight)
    run.manager.step()
    assert torch.equal(twin, before)
    assert twin.grad is None
    assert weight.grad is not None
