"""A rank is killed at different places of a step: the others go on, and end with the bits of a run without the loss."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Status, rank_outcomes, run_ranks

import bmtrain as bmt
from bmtrain._survive.copies import Message
from bmtrain.distributed import checkpoint
from bmtrain.errors import CommunicationError

SHARDS, STEPS, VOCAB, SEQ, DIM = 8, 6, 29, 6, 12
TRANSPORT = os.environ.get("BMTRAIN_CPU_TRANSPORT", "auto")
KILLS = int(os.environ.get("BMTRAIN_SURVIVE_KILLS", "3"))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(DIM),
            torch.nn.Linear(DIM, 40),
            torch.nn.Linear(40, DIM),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(torch.nn.Module):
    """Has a tied head outside of the Blocks, and a last layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCAB, DIM), torch.nn.Embedding(SEQ, DIM)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.norm = torch.nn.LayerNorm(DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.tokens(ids) + self.places.weight, 0.1, self.training)
        for layer in (*self.layers, self.layers[-1]):
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


#: Where a rank may be killed by itself.
PLACES = ("forward", "backward", "loop end", "clip", "step", "after step")


class Death:
    """Kills, or stops for a while, one rank at one place of one step."""

    def __init__(self, rank: int, step: int, place: str, stop: float = 0.0) -> None:
        self.of, self.now = (rank, step, place), bmt.rank()
        self.stop = stop

    def at(self, step: int, place: str) -> None:
        if (self.now, step, place) != self.of:
            return
        if self.stop:
            subprocess.Popen(["sh", "-c", f"sleep {self.stop}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def example(dtype: torch.dtype) -> Any:
    """The example's GPT-2, and its loss as a function of tokens."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "example"))
    from models import GPT

    model = GPT(2, VOCAB, 16, 8, 2, 32, SEQ, dtype=dtype)
    bmt.init_parameters(model)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        position = torch.arange(SEQ).expand(len(ids), SEQ)
        logits = model(ids, position, torch.ones(len(ids), SEQ, dtype=torch.bool))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    return model, loss


def train(
    dtype: str, offload: bool, deaths: tuple[Any, ...] = (), after: float = 0.0, victim: int | None = None
) -> Any:
    """Trains; ``deaths`` by the rank itself, or of the ``victim`` so many seconds ``after`` the first step."""
    torch.manual_seed(3)
    if victim is None:
        loss_of = model = bmt.BMTrainModelWrapper(Model().to(getattr(torch, dtype)))
    else:
        model, loss_of = example(getattr(torch, dtype))
    num_files = len(os.listdir("/proc/self/fd"))
    kind = bmt.optim.AdamOffloadOptimizer if offload else bmt.optim.AdamOptimizer
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=1e-2)
    manager = bmt.optim.OptimManager()
    schedule = bmt.lr_scheduler.Linear(optimizer, start_lr=1e-2, warmup_iter=2, end_iter=20)
    manager.add_optimizer(optimizer, schedule)
    plans = [Death(*death) for death in deaths]
    own = bmt.rank()

    def at(step: int, place: str) -> None:
        for plan in plans:
            plan.at(step, place)

    told = []
    for step in range(STEPS if victim is None else 4 * STEPS):
        if step == 1 and victim == own:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        batch = torch.randint(VOCAB, (2 * SHARDS, SEQ), generator=torch.Generator().manual_seed(step))
        manager.zero_grad()
        shards, losses = bmt.virtual_shards(step), []
        for number, shard in enumerate(shards):
            losses.append(loss_of(shard.of(batch)))
            if number == 1:
                at(step, "forward")
            manager.backward(losses[-1])
            if number == 0:
                at(step, "backward")
            if number == 1:
                at(step, "loop end")
        at(step, "clip")
        norm = manager.clip_grad_norm(optimizer.param_groups, 0.5)
        at(step, "step")
        manager.step()
        at(step, "after step")
        told.append((shards.mean(losses).item(), norm.item()))
    assert len(os.listdir("/proc/self/fd")) <= num_files + 16  # of lost ranks nothing stays open
    values = dict(model.state_dict())
    for index, entry in optimizer.state_dict(gather=True)["state"].items():
        values.update({f"{index}.{name}": torch.as_tensor(value) for name, value in entry.items()})
    return told, values, bmt.world_size()


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name, value in one.items()
    )


_plain: dict[Any, Any] = {}


def undisturbed(dtype: str, offload: bool, long: bool = False) -> Any:
    key = dtype, offload, long
    if key not in _plain:
        victim = 99 if long else None
        _plain[key] = run_ranks(1, train, dtype, offload, (), 0.0, victim, init={"virtual_shards": SHARDS})[0]
    return _plain[key]


def outcomes_of(world: int, *arguments: Any, transport: str = TRANSPORT, **init: Any) -> list[Any]:
    init = {"virtual_shards": SHARDS, "survive": 1, **init}
    environment = {"BMTRAIN_CPU_TRANSPORT": transport}
    return rank_outcomes(
        world, train, *arguments, init=init, fresh=True, timeout=100, environment=environment
    )


def survive(
    lost: int, dtype: str, offload: bool, *arguments: Any, long: bool = False, **init: Any
) -> list[Any]:
    outcomes = outcomes_of(4, dtype, offload, *arguments, **init)
    kept = [outcome for outcome in outcomes if outcome.status is Status.RETURNED]
    assert len(kept) == 4 - lost
    told, values, *_ = undisturbed(dtype, offload, long)
    for outcome in kept:
        assert outcome.value[0] == told
        assert same_bits(outcome.value[1], values)
        assert outcome.value[2] == 4 - lost
    return outcomes


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_loss(dtype, offload):
    survive(0, dtype, offload)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_dies(place, rank):
    dtype, offload = ("bfloat16", True) if rank else ("float32", False)
    survive(1, dtype, offload, ((rank, 2, place),))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_one_after_the_other(transport):
    survive(2, "float32", True, ((1, 1, "forward"), (3, 3, "clip")), transport=transport)


@pytest.mark.parametrize("number", range(KILLS))
def test_a_rank_dies_at_any_moment(number):
    chance = random.Random(time.time())
    dtype, offload = chance.choice(["float32", "bfloat16"]), chance.choice([False, True])
    survive(1, dtype, offload, (), chance.uniform(0.0, 0.5), chance.randrange(4), long=True)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stopped_rank_does_not_come_back(rank):
    outcomes = survive(1, "float32", True, ((rank, 2, "backward", 14),), timeout=6)
    assert outcomes[rank].status is Status.RAISED
    assert "CommunicationError" in str(outcomes[rank])


def test_two_losses_at_once_end_the_job():
    outcomes = outcomes_of(4, "float32", False, ((1, 2, "clip"), (2, 2, "clip")))
    for rank in (0, 3):
        assert outcomes[rank].status is Status.RAISED
        assert "the last checkpoint" in str(outcomes[rank]) or "died" in str(outcomes[rank])


def test_one_of_two_ranks_ends():
    outcomes = outcomes_of(2, "float32", False, ((1, 2, "clip"),))
    assert "only more than half may continue" in str(outcomes[0])


def misuse() -> None:
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4))
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    manager = bmt.optim.OptimManager()
    with pytest.raises(RuntimeError, match="before the first loop"):
        next(iter(bmt.virtual_shards(0)))
    for wrong in (
        bmt.optim.MuonOptimizer([p for p in model.parameters() if len(p.full_shape) == 2]),
        bmt.optim.AdamOptimizer(model.parameters(), state_dtype="bfloat16"),
        torch.optim.AdamW(model.parameters()),
    ):
        with pytest.raises(ValueError, match=f"survive: expected AdamOptimizer.*{type(wrong).__name__}"):
            bmt.optim.OptimManager().add_optimizer(wrong)
    with pytest.raises(ValueError, match="no loss scale"):
        bmt.optim.OptimManager(loss_scale=8).add_optimizer(optimizer)
    manager.add_optimizer(optimizer)
    with pytest.raises(ValueError, match="one OptimManager"):
        bmt.optim.OptimManager().add_optimizer(optimizer)
    with pytest.raises(ValueError, match=r"data.loader: not with init_distributed\(survive"):
        bmt.data.loader(range(80), 2)
    with pytest.raises(RuntimeError, match="a loop over virtual shards before"):
        manager.step()
    for shard in bmt.virtual_shards(0):
        manager.backward(model(shard.of(torch.ones(SHARDS, 4))).sum())
    with pytest.raises(RuntimeError, match="after each loop"):
        next(iter(bmt.virtual_shards(1)))
    next(model.parameters()).grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="gradients to be changed by"):
        manager.step()


def test_misuse_raises():
    run_ranks(2, misuse, init={"virtual_shards": SHARDS, "survive": 1}, fresh=True)


@pytest.mark.parametrize(
    "init",
    [{"survive": 1}, {"survive": 2, "virtual_shards": 8}, {"survive": 1, "virtual_shards": 8, "ep_size": 2}],
)
def test_arguments_that_raise(init):
    run_ranks(1, refused, init, init=False)


def refused(init: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="survive: expected"):
        bmt.init_distributed(**init)


def flip(where: int) -> None:
    params = [bmt.DistributedParameter(torch.ones(16))]
    params[0].grad = torch.ones_like(params[0])
    message = Message(params, bmt.rank())
    message.pack(3)
    message.check(3, sender=1)
    message.data[where] ^= 4
    with pytest.raises(CommunicationError, match="gradients of step 3 of rank 1"):
        message.check(3, sender=1)


@pytest.mark.parametrize("where", [0, 9, 16, -1])
def test_a_flipped_bit_of_a_message_is_named(where):
    run_ranks(2, flip, where)


def resumed(folder: str, deaths: tuple[Any, ...]) -> Any:
    """Saves after a loss, and loads; or loads on another number of ranks."""
    torch.manual_seed(3)
    model = bmt.BMTrainModelWrapper(Model())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    plans = [Death(*death) for death in deaths]
    first = 0 if deaths else checkpoint.load(folder, model, manager).step
    for step in range(first, 6):
        batch = torch.randint(VOCAB, (2 * SHARDS, SEQ), generator=torch.Generator().manual_seed(step))
        if step == 4 and deaths:
            checkpoint.save(folder, step, model, manager)
            checkpoint.load(folder, model, manager)
        for shard in bmt.virtual_shards(step):
            manager.backward(model(shard.of(batch)))
            for plan in plans:
                plan.at(step, "backward")
        manager.step()
    return dict(model.state_dict())


def test_checkpoints_after_a_loss(tmp_path):
    init = {"virtual_shards": SHARDS, "survive": 1}
    deaths = ((0, 2, "backward"), (2, 5, "backward"))
    outcomes = rank_outcomes(4, resumed, str(tmp_path), deaths, init=init, fresh=True)
    again = run_ranks(2, resumed, str(tmp_path), (), init=init, fresh=True)[0]
    for rank in (1, 3):
        assert same_bits(outcomes[rank].value, again)
