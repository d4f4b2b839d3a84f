"""Updates of state on a drive that continue after the step: nobody sees an unfinished one, and no failure is lost."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_process, run_ranks
from harness.disk_tier import ALL, TIERS, kernel_bytes, make, small_chunks
from harness.offloaded import LAYERS, values_of

import bmtrain as bmt
from bmtrain import _C
from bmtrain._engine.engine import current_engine
from bmtrain._ranks.context import context
from bmtrain.optim.places.disk_later import DiskUpdate

STATE = TIERS[1]


def tiers(path: Path) -> dict[str, Any]:
    return {"tier_directories": [str(path)]}


def built(places: dict[str, Any], **options: Any) -> tuple[Any, Any, Any]:
    """A model whose gradients are there, its optimizer, and a function that makes gradients again."""
    small_chunks()
    model, optimizer = make("AdamOptimizer", torch.float32, places, **options)

    def backward() -> None:
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(bmt.rank()))
        model(x).square().mean().backward()

    backward()
    return model, optimizer, backward


def num_pending(model: Any) -> int:
    return sum(bool(layer._runtime.pending) for layer in model.layers)


def zero(set_to_none: bool) -> Any:
    return lambda model, optimizer, backward: optimizer.zero_grad(set_to_none=set_to_none)


#: What a script does after a step, and whether it waits for all blocks.
READERS: dict[str, tuple[Any, bool]] = {
    "nothing": (lambda model, optimizer, backward: None, False),
    "zero_grad": (zero(False), False),
    "zero_grad(set_to_none=True)": (zero(True), False),
    "a parameter": (lambda model, optimizer, backward: model.layers[0].weight.sum(), False),
    "the state": (lambda model, optimizer, backward: optimizer.state, True),
    "state_dict": (lambda model, optimizer, backward: model.state_dict(), True),
    "the next step": (lambda model, optimizer, backward: (backward(), optimizer.step()), False),
    "forward": (lambda model, optimizer, backward: backward(), True),
}


def read_after_step() -> dict[str, list[Any]]:
    """Returns how many blocks have a pending update after each reader, and the values at the end."""
    found: dict[str, list[Any]] = {}
    for name, (read, _) in READERS.items():
        values = []
        for places in (TIERS[0], STATE, ALL):
            model, optimizer, backward = built(places)
            optimizer.step()
            before = num_pending(model)
            read(model, optimizer, backward)
            found.setdefault(name, []).append((before, num_pending(model), len(model.layers)))
            values.append(
                [*values_of(model, [optimizer]), *(p.grad for p in model.parameters() if p.grad is not None)]
            )
        for other in values[1:]:
            assert len(other) == len(values[0])
            assert all(map(torch.equal, values[0], other)), name
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_only_readers_wait(world: int, drive: Path) -> None:
    for found in run_ranks(world, read_after_step, init=tiers(drive)):
        for name, (in_memory, *on_drives) in found.items():
            assert in_memory[:2] == (0, 0)
            for before, after, total in on_drives:
                assert before == total
                assert (after == 0) == READERS[name][1], name


def step_plain_parameter() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    bmt.optim.AdamOptimizer([p], lr=0.5).step()
    assert p.tolist() == pytest.approx([0.5] * 3)


def test_parameters_of_plain_torch_beside_drives(drive: Path) -> None:
    run_ranks(1, step_plain_parameter, init=tiers(drive))


# ---- where the library cannot see who reads


def hold_data(model: Any) -> Any:
    return model.layers[1].weight.data


def hold_gradient(model: Any) -> Any:
    return model.layers[1].weight.grad


def hold_graph(model: Any) -> Any:
    """A graph that leads to the shard itself."""
    return (3 * model.layers[1].weight).sum()


def hold_each() -> None:
    for hold in (hold_data, hold_gradient, hold_graph):
        results = []
        for places in (TIERS[0], STATE, ALL):
            model, optimizer, backward = built(places)
            optimizer.step()
            optimizer.zero_grad()
            backward()
            held = hold(model)
            optimizer.step()
            pending = [bool(layer._runtime.pending) for layer in model.layers]
            if places:
                assert not pending[1] and pending[0]
            if hold is hold_graph:
                held.backward()
            elif hold is hold_data:
                results.append([held.clone()])  # by the tensor alone
                held.mul_(0.5)
            backward()
            optimizer.step()
            results.append(values_of(model, [optimizer]))
        number = len(results) // 3
        for place in (1, 2):
            found = results[place * number : (place + 1) * number]
            for ours, theirs in zip(found, results[:number], strict=True):
                assert len(ours) == len(theirs) > 0
                assert all(map(torch.equal, ours, theirs)), (hold, place)


def test_other_references_make_the_step_wait(drive: Path) -> None:
    run_ranks(2, hold_each, init=tiers(drive))


# ---- inside backward


def train_in_backward(num_optimizers: int) -> None:
    results = []
    seen: dict[bool, list[list[torch.Tensor]]] = {False: [], True: []}  # between backward and step
    for places in TIERS:
        for in_backward in (False, True):
            small_chunks()
            model, _ = make("AdamOptimizer", torch.float32, places)
            named = list(model.named_parameters())
            groups = [
                {"params": [p for name, p in named if ("bias" in name) == is_bias], "weight_decay": decay}
                for is_bias, decay in ((False, 0.1), (True, 0.0))
            ]
            shares = (
                [groups] if num_optimizers == 1 else [[group] for group in groups]
            )  # of one block, of one file
            optimizers = [bmt.optim.AdamOptimizer(share, lr=0.01) for share in shares]
            manager = bmt.optim.OptimManager(step_in_backward=in_backward)
            for optimizer in optimizers:
                manager.add_optimizer(optimizer)
            pending = 0
            for step in range(4):
                x = torch.randn(3, 40, generator=torch.Generator().manual_seed(10 * step + bmt.rank()))
                manager.zero_grad(set_to_none=step % 2 == 0)
                manager.backward(model(x).square().mean())
                pending = max(pending, num_pending(model))
                if step == 2:
                    first, *_, last = model.layers
                    seen[in_backward].append([p.detach().clone() for p in (first.weight, last.bias)])
                manager.step()
            assert bool(pending) == (in_backward and bool(places))
            results.append(values_of(model, optimizers))
    for found in (results, *seen.values()):
        for result in found[1:]:
            assert len(result) == len(found[0])
            assert all(map(torch.equal, result, found[0]))


def train_with_an_expected_call_that_is_missing() -> None:
    """The second call of a block is expected, and its parameters are read for it, when its update begins."""
    small_chunks()
    results = []
    for places in (TIERS[0], ALL):
        torch.manual_seed(3)
        with bmt.default_policy(bmt.BlockPolicy(**places)):
            one, two, three = blocks = [bmt.Block(bmt.nn.Linear(64, 64)) for _ in range(3)]
        model = torch.nn.ModuleList(blocks)
        bmt.init_parameters(model)
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
        manager = bmt.optim.OptimManager(step_in_backward=True)
        manager.add_optimizer(optimizer)
        for order in 3 * [(one, two, three, one), (two, three, one)]:
            x = torch.ones(2, 64, requires_grad=True)
            manager.zero_grad()
            for block in order:
                x = block(x)
            manager.backward(x.square().mean())
            manager.step()
        results.append(values_of(model, [optimizer]))
    assert all(map(torch.equal, *results))


def test_parameters_read_for_a_call_that_is_missing(drive: Path) -> None:
    run_ranks(2, train_with_an_expected_call_that_is_missing, init=tiers(drive))


def count_bytes_and_memory(policy: dict[str, Any]) -> list[float]:
    with bmt.default_policy(bmt.BlockPolicy(**ALL, **policy)):
        blocks = [bmt.Block(bmt.nn.Linear(1024, 1024, bias=False)) for _ in range(16)]
    model = bmt.TransformerBlockList(blocks)
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    manager = bmt.optim.OptimManager(step_in_backward=True)
    manager.add_optimizer(optimizer)
    before, most = (0, 0), 0
    for step in range(5):  # two of which compare the numbers of gradients
        before = kernel_bytes()
        manager.zero_grad()
        manager.backward(model(torch.full((1, 1024), 1.0 + step + bmt.rank())).sum())
        most = max(most, current_engine(context()).tier.pool.stats()["bytes_in_use"])
        manager.step()
        optimizer._place.finish()
    moved = [now - old for now, old in zip(kernel_bytes(), before, strict=True)]
    return [number / (next(model.parameters()).numel() * 4) for number in (*moved, most)]


#: Policy, and blocks whose parameters are read again for backward or update, with one and two ranks.
READ_AGAIN = [({}, (15, 16)), ({"recompute": "off"}, (15, 16)), ({"level": 2}, (0, 16))]


@pytest.mark.parametrize(("policy", "again"), READ_AGAIN, ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_updates_inside_backward_take_what_is_in_memory(
    world: int, policy: dict[str, Any], again: tuple[int, int], tmp_path: Path
) -> None:
    """In shards of the 16 blocks: parameters are read, and moments; both are written, and gradients are not."""
    for read, written, most in run_ranks(world, count_bytes_and_memory, policy, init=tiers(tmp_path)):
        assert read == pytest.approx(16 + again[world - 1] + 32, rel=0.02)
        assert written == pytest.approx(48, rel=0.02)
        assert most <= 12  # with gradients


def set_to_none(model: Any, manager: Any) -> None:
    for p in model.parameters():
        p.grad = None


def zero_in_place(model: Any, manager: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()


def assign_zeros(model: Any, manager: Any) -> None:
    set_to_none(model, manager)
    for p in model.parameters():
        p.grad = torch.zeros_like(p.detach())


def convert(model: Any, manager: Any) -> None:
    model.to(torch.float32)
    manager.zero_grad()


#: How a script drops gradients, and what raises after an update inside backward.
DROPS: dict[str, tuple[Any, str | None]] = {
    "manager": (lambda model, manager: manager.zero_grad(), None),
    "manager, None": (lambda model, manager: manager.zero_grad(set_to_none=True), None),
    "model": (lambda model, manager: model.zero_grad(), None),
    "model, zeros": (lambda model, manager: model.zero_grad(set_to_none=False), None),
    "= None": (set_to_none, None),
    "= zeros": (assign_zeros, None),
    "conversion": (convert, None),
    "zero_()": (zero_in_place, "drop"),
    "nothing": (lambda model, manager: None, "backward"),
    "step": (lambda model, manager: manager.optimizers[0].step(), "drop"),
}


def drop_gradients(name: str) -> None:
    """Some steps leave blocks out, whose zeros count, and None does not."""
    small_chunks()
    drop, refused = DROPS[name]
    results = []
    for places in (TIERS[0], ALL):
        model, optimizer = make("AdamOptimizer", torch.float32, places)
        manager = bmt.optim.OptimManager(step_in_backward=True)
        manager.add_optimizer(optimizer)
        losses = []
        for step, order in enumerate([(0, 1, 2), (0, 1), (2, 1), (0, 1, 2)]):
            x = torch.randn(3, 40, generator=torch.Generator().manual_seed(step + bmt.rank()))
            wrong = refused if step and places else None
            counts = [state["step"] for state in optimizer.state.values()]
            with error_of_consumed(wrong == "drop"):
                drop(model, manager)
            if wrong == "drop":
                assert counts == [state["step"] for state in optimizer.state.values()]
                return
            losses.append(run_layers(model, x, order))
            with error_of_consumed(wrong == "backward"):
                manager.backward(losses[-1])
            if wrong:
                return
            manager.step()
            assert len(bmt.inspect.inspect_model(model, "*")) == len(list(model.parameters()))
        results.append([*(loss.detach() for loss in losses), *values_of(model, [optimizer])])
    assert all(map(torch.equal, *results))


def error_of_consumed(is_expected: bool) -> AbstractContextManager[Any]:
    if not is_expected:
        return nullcontext()
    return pytest.raises(RuntimeError, match=r"gradients of .*: the update inside .*; call zero_grad\(\)")


def run_layers(model: Any, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    for number in order:
        x = model.layers[number](x)
    return x.square().mean()


@pytest.mark.parametrize("name", DROPS)
def test_gradients_that_an_update_has_used(name: str, drive: Path) -> None:
    run_ranks(2, drop_gradients, name, init=tiers(drive))


def with_slow_transfers(num_optimizers: int) -> None:
    _C.disturb_transfers(2000)  # microseconds at most
    try:
        train_in_backward(num_optimizers)
    finally:
        _C.disturb_transfers(0)


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_blocks_pass_while_the_backward_computes(num_optimizers: int, drive: Path) -> None:
    run_ranks(2, with_slow_transfers, num_optimizers, init=tiers(drive))


# ---- ends


def lose_optimizer() -> None:
    values = []
    for places in (TIERS[0], STATE, ALL):
        model, optimizer, backward = built(places)
        optimizer.step()
        del optimizer, backward
        values.append([p.detach().clone() for p in model.parameters()])
    for other in values[1:]:
        assert all(map(torch.equal, values[0], other))


def test_an_optimizer_ends_its_updates(drive: Path) -> None:
    run_ranks(2, lose_optimizer, init=tiers(drive))


def fail_last(places: dict[str, Any], read: str) -> str:
    model, optimizer, _ = built(places)
    optimizer.step()
    optimizer._place.finish()
    if bmt.rank() == 1:
        _C.disturb_transfers(0, 0, -5)
    try:
        optimizer.step()
        weight = model.layers[1].weight
        with pytest.raises(bmt.errors.DiskError) as raised:
            if read == "gather":
                weight.gather()
            elif read == "save":
                model.state_dict()
            else:
                optimizer.state_dict(gather=True)
    finally:
        _C.disturb_transfers(0)
    return str(raised.value)


@pytest.mark.parametrize("read", ["gather", "save", "state"])
@pytest.mark.parametrize("places", [STATE, ALL], ids=["state", "all"])
def test_a_failure_of_the_last_update_is_raised_by_all(
    places: dict[str, Any], read: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, fail_last, places, read, init=tiers(tmp_path), fresh=True)
    assert first == second
    assert "Input/output error" in first


def fail_in_backward(places: dict[str, Any]) -> str:
    small_chunks()
    model, optimizer = make("AdamOptimizer", torch.float32, places)
    manager = bmt.optim.OptimManager(step_in_backward=True)
    manager.add_optimizer(optimizer)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(bmt.rank()))
    for step in range(2):
        manager.zero_grad()
        loss = model(x).square().mean()
        optimizer._place.finish()
        if step == 1 and bmt.rank() == 1:
            _C.disturb_transfers(0, 0, -5)
        try:
            manager.backward(loss)  # in which a rank alone does not raise, as the others reduce gradients
            if step == 0:
                manager.step()
                continue
            with pytest.raises(bmt.errors.DiskError) as raised:
                manager.step()
        finally:
            _C.disturb_transfers(0)
    return str(raised.value)


def test_a_failure_inside_backward_is_raised_by_all_in_the_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail_in_backward, STATE, init=tiers(tmp_path), fresh=True)
    assert first == second
    assert "Input/output error" in first


def fail_to_compute(places: dict[str, Any]) -> list[str]:
    """Returns the errors of reads on this rank, of which one cannot compute its update."""
    model, optimizer, _ = built(places)
    inner = optimizer._place._inner
    apply = inner.apply

    def without_memory(parts: Any, states: Any, *, is_early: bool) -> None:
        if is_early:
            raise RuntimeError("no memory")
        apply(parts, states, is_early=is_early)

    if bmt.rank() == 1:
        inner.apply = without_memory
    optimizer.step()
    errors = []
    for layer in model.layers:
        try:
            layer.weight.sum()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("places", [STATE, ALL], ids=["state", "all"])
def test_an_update_that_cannot_be_computed_is_raised_where_it_is_read(
    places: dict[str, Any], drive: Path
) -> None:
    first, second = run_ranks(2, fail_to_compute, places, init=tiers(drive))
    assert first == []
    assert second == ["no memory"] * LAYERS


def fail_beside_the_thread(places: dict[str, Any]) -> None:
    """A drive fails in another transfer while the thread computes, and one more update is to begin."""
    model, optimizer, _ = built(places)
    place, inner = optimizer._place, optimizer._place._inner
    computes, goes_on, apply = threading.Event(), threading.Event(), inner.apply

    def held(parts: Any, states: Any, *, is_early: bool) -> None:
        if is_early:
            computes.set()
            assert goes_on.wait(60)
        apply(parts, states, is_early=is_early)

    inner.apply = held
    optimizer.step()
    assert computes.wait(60)
    background, updates = place._background, [pending.update for pending in place._pending]
    assert len(updates) == LAYERS
    assert not any(update.is_done for update in updates)
    place._drives.note(bmt.errors.DiskError("the drive is gone"))
    late = DiskUpdate(background, model.layers[0]._runtime, [], list)
    background.post([late], place._passage(), place._compute)
    for update in (late, *updates):  # none of which would end by itself
        assert update.is_done
        assert str(update.failure) == "the drive is gone"
    assert not background._queue
    goes_on.set()
    background.finish()
    for layer in model.layers:
        with pytest.raises(bmt.errors.DiskError, match="the drive is gone"):
            layer.weight.sum()


@pytest.mark.parametrize("places", [STATE, ALL], ids=["state", "all"])
def test_a_failure_ends_updates_that_are_under_way(places: dict[str, Any], drive: Path) -> None:
    run_ranks(1, fail_beside_the_thread, places, init=tiers(drive), fresh=True)


SLOW_EXIT = """
import sys, torch
import bmtrain as bmt
from bmtrain import _C

bmt.init_distributed(tier_directories=[sys.argv[1]])
policy = bmt.BlockPolicy(parameters="disk", gradients="disk", optimizer="disk")
model = bmt.Block(bmt.nn.Linear(3000, 3000), policy=policy)
bmt.init_parameters(model)
optimizer = bmt.optim.AdamOptimizer(model.parameters())
model(torch.ones(1, 3000)).sum().backward()
optimizer.step()
_C.disturb_transfers(300_000)  # microseconds at most, each of many
optimizer.step()
print("left" if model._runtime.pending else "done", flush=True)
"""


def test_an_exit_waits_for_no_update(tmp_path: Path) -> None:
    text = run_process([sys.executable, "-c", SLOW_EXIT, str(tmp_path)]).stdout
    assert text.splitlines()[-1] == "left"  # and nothing after it
