"""Scripts that change numbers between the steps of a job that loses ranks: the bits of one rank, or an error."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import Status, rank_outcomes, run_ranks

import bmtrain as bmt
from bmtrain._C import StepJournal
from bmtrain._ranks.context import context
from bmtrain._survive.copies import Ward
from bmtrain._survive.memory_file import MemoryFile
from bmtrain._survive.shared import SharedWard

SHARDS, STEPS = 8, 6
LOST = {2: 1, 4: 0}  # rank by step
#: Ranks and options of a run without a loss. On GPUs `survive` changes the order of operations of updates in fp32.
RANKS, INIT = 1, {"virtual_shards": SHARDS}
if torch.cuda.is_available():
    RANKS, INIT = 2, {**INIT, "survive": 1}


ON_CPU_RANKS = pytest.mark.skipif(torch.cuda.is_available(), reason="of memory that ranks share")


def update_others_and_die(optimizer: Any) -> None:
    """Lets the process die when its next step has updated all parameters except the first one of each part."""
    is_recorded = optimizer._journal is not None
    owner, name = (optimizer, "_apply_by_pieces") if is_recorded else (optimizer._place, "apply")
    update = getattr(owner, name)

    def in_part(parts: list[Any], *of_step: Any, **options: Any) -> None:
        update([part._replace(updates=part.updates[1:]) for part in parts], *of_step, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, in_part)


def train(program: str, loses: bool) -> Any:
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(12, 30), torch.nn.Dropout(0.1), torch.nn.Linear(30, 5))
    model = bmt.BMTrainModelWrapper(plain)
    if program == "memory that a rank cannot map" and bmt.rank() == 1:
        MemoryFile.of_process = classmethod(lambda *_: None)  # type: ignore[assignment, method-assign]
    params = list(model.parameters())
    optimizers: list[Any] = [bmt.optim.AdamOptimizer(params, lr=0.01, weight_decay=0.01)]
    views = [p.data for p in params]
    if program == "two optimizers":
        kinds = bmt.optim.AdamOptimizer, bmt.optim.LionOptimizer
        optimizers = [kind(params[n::2], lr=0.01) for n, kind in enumerate(kinds)]
    manager = bmt.optim.OptimManager(accumulate=2 if program == "accumulate" else 1)
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    batches = bmt.batches(torch.randn(64, 12, generator=torch.Generator().manual_seed(1)), 2, seed=1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizers[0], lambda step: 1 / (1 + step)
    )  # not the manager's
    losses, opened = [], []
    for step in range(STEPS):
        if program == "options":
            optimizers[0].param_groups[0].update(weight_decay=0.1 * step, betas=(0.9, 0.99 - 0.01 * step))
        if program.startswith("frozen in turn"):
            params[0].requires_grad_(step % 2 == (program == "frozen in turn"))
        for p in params if step % 2 else ():
            if program == "data":
                p.data.mul_(0.9)
            elif program == "steps outside" and p is params[0]:
                for q in params:
                    q.grad = torch.ones_like(q)
                optimizers[0].step()  # of the optimizer alone, before the loop
            elif program == "views":
                next(view for view, of in zip(views, params, strict=True) if of is p).mul_(0.9)
            elif program == "assigned":
                p.data = p.data * 0.9
        writes = (
            optimizers[0].state.values() if bmt.rank() == 0 else ()
        )  # the other ranks have to raise as well
        for entry in writes if program == "state" else ():
            entry["exp_avg"].mul_(0.5)
        manager.zero_grad()
        shards, own = bmt.virtual_shards(step), []
        for number, shard in enumerate(shards):
            own.append(model(shard.of(batches[step])).square().mean())
            if loses and number == 1 and LOST.get(step) == bmt.rank() and "update" not in program:
                os.kill(os.getpid(), signal.SIGKILL)
            manager.backward(own[-1])
        for entry in writes if program == "state in a step" else ():
            entry["exp_avg"].mul_(0.5)
        if program == "data in a step":
            params[0].data.mul_(0.9)
        if loses and LOST.get(step) == bmt.rank() and "update" in program:
            update_others_and_die(optimizers[0])
        if program == "steps left out" and step in (1, 2, 4):
            manager.zero_grad()
        elif program != "step left out on one rank" or bmt.rank() or step != 1:
            manager.step()
            schedule.step()
        losses.append(shards.mean(own).item())
        opened.append(len(os.listdir("/proc/self/fd")))
        if bmt.world_size() > 1:
            survival: Any = context().survival
            copies = not isinstance(survival._keeper.ward, SharedWard)
            assert copies is (program == "memory that a rank cannot map" or torch.cuda.is_available())
    states = [optimizer.state_dict(gather=True)["state"] for optimizer in optimizers]
    return losses, {**model.state_dict(), **dict(enumerate(torch.utils._pytree.tree_leaves(states)))}, opened


def outcomes_of(program: str) -> list[Any]:
    init = {"virtual_shards": SHARDS, "survive": 1}
    return rank_outcomes(4, train, program, True, init=init, fresh=True, timeout=100)


@pytest.mark.parametrize(
    "program",
    [
        "options",
        "two optimizers",
        "data",
        "assigned",
        "frozen in turn",
        "frozen in turn, dies in an update",
        "steps left out",
        "steps outside",
        "memory that a rank cannot map",
    ],
)
def test_same_bits(program: str) -> None:
    losses, values, _ = run_ranks(RANKS, train, program, False, init=INIT)[0]
    kept = [outcome.value for outcome in outcomes_of(program) if outcome.status is Status.RETURNED]
    assert len(kept) == 2
    for own_losses, own_values, opened in kept:
        assert own_losses == losses
        assert all(torch.equal(torch.as_tensor(own_values[k]), torch.as_tensor(v)) for k, v in values.items())
        # Descriptors: nothing of a lost rank, or of an earlier group. GPU ranks have few for each other one.
        assert min(opened[0] - opened[3], opened[3] - opened[5]) >= (0 if torch.cuda.is_available() else 1)


def test_views_that_a_script_holds_stay_views() -> None:
    alone = run_ranks(RANKS, train, "views", False, init=INIT)[0]
    for found in run_ranks(
        2, train, "views", False, init={"virtual_shards": SHARDS, "survive": 1}, fresh=True
    ):
        assert found[0] == alone[0]
        assert all(torch.equal(torch.as_tensor(found[1][k]), torch.as_tensor(v)) for k, v in alone[1].items())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("state", "expected optimizer state to be changed by OptimManager.step() and load_state_dict() only"),
        ("state in a step", "expected optimizer state to be changed by OptimManager.step()"),
        (
            "data in a step",
            "expected parameters to be changed before a loop over virtual shards or after Optim",
        ),
        (
            "step left out on one rank",
            "expected all ranks to leave a step out, or none, got some of them",
        ),
        ("accumulate", "no_sync: virtual shards are summed one by one"),
    ],
)
def test_refused(program: str, words: str) -> None:
    for outcome in outcomes_of(program):
        assert words in str(outcome)


def count_updates_beside_a_forward() -> int:
    """Updates of copies that began in a step and end only when the next forward has run."""
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=0.01))
    updated, forward, update = [], threading.Event(), Ward.step

    def update_after_a_forward(ward: Ward, number: int, scale: float) -> None:
        updated.append(forward.wait(30))
        update(ward, number, scale)

    Ward.step = update_after_a_forward  # type: ignore[method-assign]
    for step in range(3):
        for _ in bmt.virtual_shards(step):
            loss = model(torch.ones(2, 4)).sum()
            forward.set()
            manager.backward(loss)
        forward.clear()
        manager.step()
    count = sum(updated)
    forward.set()  # for the last update, which the end of the process waits for
    return count


def test_a_copy_is_updated_beside_the_next_forward() -> None:
    init = {"virtual_shards": 4, "survive": 1}
    assert run_ranks(2, count_updates_beside_a_forward, init=init, fresh=True) == [2, 2]


def places_of_gradients() -> set[int]:
    """Addresses of the gradients of a Block in several steps."""
    block = bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(64, 64)))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(block.parameters(), lr=0.01))
    places = set()
    for step in range(3):
        manager.zero_grad()
        for _ in bmt.virtual_shards(step):
            manager.backward(block(torch.ones(2, 64)).sum())
        places.add(next(block.parameters()).grad.data_ptr())
        kept = torch.empty(1 << 16)  # in the place of what was freed
        manager.step()
        assert len(kept)
    return places


@ON_CPU_RANKS
def test_gradients_stay_in_their_memory() -> None:
    for places in run_ranks(2, places_of_gradients, init={"virtual_shards": 4, "survive": 1}, fresh=True):
        assert len(places) == 1


def records_after_a_load() -> list[bool]:
    """Whether updates are recorded in the step after one that loads a state without arrays."""
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))
    optimizer = bmt.optim.SGDOptimizer(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    found = []
    for step in range(3):
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        for _ in bmt.virtual_shards(step):
            manager.backward(model(torch.ones(2, 4)).sum())
        found.append(optimizer._journal is not None)
        manager.step()
    return found


@ON_CPU_RANKS
def test_updates_are_recorded_after_a_load() -> None:
    init = {"virtual_shards": 4, "survive": 1}
    assert run_ranks(2, records_after_a_load, init=init, fresh=True) == [[True] * 3] * 2


@pytest.mark.parametrize("missing", [None, 1, 2, 3, 4, 5, 6])
def test_an_update_is_complete_with_all_pieces_of_its_parameters(missing: int | None) -> None:
    """A rank may die between two pieces of a parameter: the keeper of its copy completes all updates then."""
    sizes, gate = (1, 5000, 2049), 7  # 1, 3 and 2 pieces
    assert [StepJournal.num_pieces_of(size) for size in sizes] == [1, 3, 2]
    first_pieces = (
        1,
        2,
        5,
    )  # the piece before them is of another optimizer's parameter, which was not updated
    parameters = [
        SimpleNamespace(
            _number=10 + n,
            _spec=SimpleNamespace(
                part=lambda _, size=size: (0, size), group=SimpleNamespace(size=1), replicas=None
            ),
        )
        for n, size in enumerate(sizes)
    ]
    journal = torch.full((8,), gate)
    journal[1] = gate - 1
    if missing is not None:
        journal[1 + missing] = gate - 1
    ward: Any = object.__new__(SharedWard)
    ward.rank, ward._gate, ward._trained = 0, gate, parameters
    ward._updates = [SimpleNamespace(number=0)]
    ward._arrays = [(0, p, ()) for p in parameters]
    ward._ward = SimpleNamespace(first_pieces=first_pieces)
    expected = set() if missing is None else {(0, 10), (0, 11), (0, 12)}
    assert ward._updates_left(journal.view(torch.uint8)) == expected


def one_model_after_the_other(dies: bool, in_blocks: bool) -> list[dict[str, torch.Tensor]]:
    """A sweep: each model with a manager of its own. Rank 1 is lost while the second one trains."""
    found, dies = [], dies and bmt.rank() == 1
    for trial in range(2):
        torch.manual_seed(trial)
        layers = [torch.nn.Linear(6, 6) for _ in range(2)]
        plain = torch.nn.ModuleList(layers) if in_blocks else torch.nn.Sequential(*layers)
        model = bmt.BMTrainModelWrapper(torch.nn.ModuleDict({"layers": plain}))
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=0.05))
        for step in range(3):
            batch = torch.randn(SHARDS, 6, generator=torch.Generator().manual_seed(step))
            manager.zero_grad()
            for shard in bmt.virtual_shards(step):
                x = shard.of(batch)
                for layer in model["layers"]:
                    x = torch.tanh(layer(x))
                if dies and trial == 1 and step == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                manager.backward(x.square().mean())
            manager.step()
        found.append(model.state_dict())
        del model, manager
    return found


@pytest.mark.parametrize("in_blocks", [True, False])
def test_a_second_model_is_protected_too(in_blocks: bool) -> None:
    expected = run_ranks(RANKS, one_model_after_the_other, False, in_blocks, init=INIT, fresh=True)[0]
    init = {"virtual_shards": SHARDS, "survive": 1}
    outcomes = rank_outcomes(3, one_model_after_the_other, True, in_blocks, init=init, fresh=True)
    assert [outcome.status is Status.RETURNED for outcome in outcomes] == [True, False, True]
    for values in (outcomes[0].value, outcomes[2].value):
        for one, other in zip(values, expected, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)
