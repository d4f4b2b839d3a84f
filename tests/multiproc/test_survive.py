"""A rank is killed at different places of a step: the others go on, and end with the bits of a run without the loss."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Status, at_once, large_blocks, rank_outcomes, run_ranks

import bmtrain as bmt
from bmtrain._ranks import context as _context
from bmtrain._ranks.groups import host_comm
from bmtrain._survive.copies import Message
from bmtrain._survive.reconnect import Reconnection
from bmtrain.distributed import checkpoint
from bmtrain.errors import CommunicationError

SHARDS, STEPS, VOCAB, SEQ, DIM = 8, 6, 29, 6, 12
#: Ranks and options of a run without a loss. On GPUs `survive` changes the order of operations of updates in fp32.
RANKS, INIT = 1, {"virtual_shards": SHARDS}
if torch.cuda.is_available():
    RANKS, INIT = 2, {**INIT, "survive": 1}
TRANSPORT = os.environ.get("BMTRAIN_CPU_TRANSPORT", "auto")
#: Number of random moments for each fault.
FAULTS = {"kill": 2, "stop": 0, "raise": 1, "twice": 1}
FAULTS |= {
    name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", os.environ.get("BMTRAIN_SURVIVE_FAULTS", ""))
}


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


def replace_once(owner: Any, name: str, call: Any) -> None:
    """Replaces a method for one call: by ``call``, which is given the method."""
    method = getattr(owner, name)

    def once(*args: Any, **options: Any) -> Any:
        setattr(owner, name, method)
        return call(method, *args, **options)

    setattr(owner, name, once)


def cut(agree: Any, ctx: Any, *own: int) -> Any:
    """Ends as if the last message had not come."""
    agree(ctx, *own)
    while not ctx.survival._lost:
        time.sleep(0.01)
    raise CommunicationError("cut")


def update_in_part(update: Any, parts: list[Any], *of_step: Any, **options: Any) -> None:
    *others, last = parts
    update([*others, last._replace(updates=last.updates[:-1])], *of_step, **options)
    os.kill(os.getpid(), signal.SIGKILL)


class Fault:
    """What happens to one rank at one place of one step, or ``after`` so many seconds from it."""

    folder = ""  # a file "end" in it ends a stop

    def __init__(self, rank: int, step: int, place: str, what: str = "kill", after: float = 0.0) -> None:
        self.of, self.now = (rank, step, place), bmt.rank()
        self.what, self.after = what, after

    def at(self, step: int, place: str) -> None:
        if self.what == "kill after another" and bmt.world_size() == 3 and step >= self.of[1]:
            self.what, self.of = "kill", (self.of[0], step, place)
        if self.what == "kill after another":
            return
        if (self.now, step, place) != self.of:
            return
        self.of = ()
        if self.after:
            signal.signal(signal.SIGALRM, lambda *_: self.happen())
            signal.setitimer(signal.ITIMER_REAL, self.after)
        else:
            self.happen()

    def happen(self) -> None:
        keeper = _context.context().survival._keeper
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "stop":
            until = f"for i in $(seq 900); do sleep 0.1; [ -e {self.folder}/end ] && break; done"
            wait = until if self.folder else "sleep 20"
            subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.what in ("mute", "slow"):  # as if its watchdog were too slow for the others, or all of it
            survival, watch = _context.context().survival, _context.context().watch
            for line in [watch._line.lines] if watch._line else watch._hub._ranks.values():
                line.send = lambda _: True
            while self.what == "slow" and not survival._lost:
                time.sleep(0.01)
        elif self.what == "raise":
            try:
                raise ValueError("of the script")
            except ValueError:
                sys.excepthook(*sys.exc_info())
            os._exit(1)
        elif self.what == "kill in a recovery":
            keeper.take = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "stop in a recovery":
            self.what = "stop"
            replace_once(Reconnection, "connect", lambda connect, *of: (self.happen(), connect(*of))[1])
        elif self.what == "unconnected":
            Reconnection.connect = lambda *_: (_ for _ in ()).throw(OSError("no way there"))
        elif self.what == "cut at the commit":  # the others are beyond it
            replace_once(_context.context().survival, "_agree", cut)
        elif self.what == "a process waits":
            replace_once(_context.context().survival, "waiting_at", lambda *_: bmt.rank() + 1)
        elif self.what == "kill in the update":  # of the last parameter
            optimizer = keeper.optimizers()[0]
            if optimizer._journal is not None:  # recorded
                replace_once(optimizer, "_apply_by_pieces", update_in_part)
            else:
                replace_once(optimizer._place, "apply", update_in_part)
        elif self.what == "flip in the copy":
            keeper.settle()
            copies = [copy for copy in keeper.ward.params.values() if copy.numel()]
            keeper.ward.optimizers[0].state[copies[-1]]["exp_avg"].view(torch.int32)[0] ^= 1 << 20
        elif self.what == "flip in a message":
            pack = Message.pack

            def damaged(message: Message, step: int) -> None:
                pack(message, step)
                next(g for g in reversed(message.gradients) if len(g)).view(torch.uint8)[-1] ^= 4
                Message.pack = pack

            Message.pack = damaged


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
    dtype: str,
    offload: bool,
    faults: tuple[Any, ...] = (),
    long: bool = False,
    folder: str = "",
    policy: bmt.BlockPolicy | None = None,
    clip: tuple[float, Any] = (0.5, 2),
) -> Any:
    """Trains with ``faults``; ``long``: the example's GPT-2. Saves into ``folder`` after a step."""
    torch.manual_seed(3)
    bmt.survive.exceptions()
    if not long:
        with bmt.default_policy(policy or bmt.BlockPolicy()):
            loss_of = model = bmt.BMTrainModelWrapper(Model().to(getattr(torch, dtype)))
    else:
        model, loss_of = example(getattr(torch, dtype))
    num_files = len(os.listdir("/proc/self/fd"))
    kind = bmt.optim.AdamOffloadOptimizer if offload else bmt.optim.AdamOptimizer
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=1e-2)
    manager = bmt.optim.OptimManager()
    schedule = bmt.lr_scheduler.Linear(optimizer, start_lr=1e-2, warmup_iter=2, end_iter=20)
    manager.add_optimizer(optimizer, schedule)
    plans, Fault.folder = [Fault(*fault) for fault in faults], folder
    user: dict[str, list[int]] = {"seen": []}
    bmt.survive.register("seen", lambda: user["seen"], lambda was: user.update(seen=was))  # no copies
    generator = torch.Generator().manual_seed(1)
    batches = bmt.batches(torch.randint(VOCAB, (5 * SHARDS, SEQ), generator=generator), 2, seed=1)

    def at(step: int, place: str) -> None:
        for plan in plans:
            plan.at(step, place)

    told = []
    for step in bmt.survive.steps(4 * STEPS if long else STEPS):
        at(step, "start")
        if folder and step == 1:
            checkpoint.save(folder, step, model, manager)
        batch = batches[step]
        manager.zero_grad()
        shards, losses = bmt.virtual_shards(step), []
        for number, shard in enumerate(shards):
            losses.append(loss_of(shard.of(batch)))
            if number == 1:
                at(step, "forward")
            if step not in user["seen"]:
                user["seen"].append(step)
            manager.backward(losses[-1])
            if number == 0:
                at(step, "backward")
            if number == 1:
                at(step, "loop end")
        at(step, "clip")
        norm = manager.clip_grad_norm(optimizer.param_groups, *clip)
        at(step, "step")
        manager.step()
        at(step, "after step")
        told.append((shards.mean(losses).item(), norm.item()))
    assert user["seen"] == list(range(len(told)))  # each step once, although some ran again
    assert len(os.listdir("/proc/self/fd")) <= num_files + 16  # of lost ranks nothing stays open
    values = dict(model.state_dict())
    for index, entry in optimizer.state_dict(gather=True)["state"].items():
        values.update({f"{index}.{name}": torch.as_tensor(value) for name, value in entry.items()})
    if folder:
        Path(folder, "end").touch()
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
        _plain[key] = run_ranks(RANKS, train, dtype, offload, (), long, init=INIT)[0]
    return _plain[key]


def outcomes_of(world: int, *arguments: Any, transport: str = TRANSPORT, **init: Any) -> list[Any]:
    init = {"virtual_shards": SHARDS, "survive": 1, **init}
    environment = {"BMTRAIN_CPU_TRANSPORT": transport}
    return rank_outcomes(
        world, train, *arguments, init=init, fresh=True, timeout=100, environment=environment
    )


def survive(lost: int, dtype: str, offload: bool, *faults: Any, long: bool = False, **init: Any) -> list[Any]:
    return survived(outcomes_of(4, dtype, offload, faults, long, **init), lost, dtype, offload, long)


def survived(outcomes: list[Any], lost: int, dtype: str, offload: bool, long: bool = False) -> list[Any]:
    kept = [outcome for outcome in outcomes if outcome.status is Status.RETURNED]
    assert len(kept) == 4 - lost, "\n".join(map(str, outcomes))
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


@pytest.mark.parametrize(
    ("rank", "place", "what"),
    [(rank, place, "kill") for rank in (0, 2) for place in PLACES]
    + [(0, "forward", "raise"), (1, "step", "raise")],
)
def test_one_rank_is_lost(rank, place, what):
    """In memory that ranks share (Adam), and with copies (AdamOffload)."""
    dtype, offload = ("bfloat16", True) if rank else ("float32", False)
    survive(1, dtype, offload, (rank, 2, place, what))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", [0, 2])
def test_two_die_in_updates(step, dtype):
    """The second one in the step after the recovery; with ``step`` 0 state has just begun."""
    faults = ((rank, at, "step", "kill in the update") for rank, at in ((1, step), (3, step + 1)))
    survive(2, dtype, False, *faults)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_one_after_the_other(transport, offload):
    survive(2, "float32", offload, (1, 1, "forward"), (3, 3, "clip"), transport=transport)


def test_a_clip_by_the_largest_magnitude_runs_again():
    options = False, "", None, (1e-3, "inf")
    told, values, _ = run_ranks(RANKS, train, "float32", False, (), *options, init=INIT)[0]
    assert all(norm > 1e-3 for _, norm in told)
    outcomes = outcomes_of(4, "float32", False, ((1, 2, "clip"),), *options)
    kept = [outcome.value for outcome in outcomes if outcome.status is Status.RETURNED]
    assert [size for *_, size in kept] == [3] * 3, "\n".join(map(str, outcomes))
    assert all(of_rank == told and same_bits(bits, values) for of_rank, bits, _ in kept)


def train_large(dies: bool) -> tuple[list[float], int]:
    """With ``dies`` a rank ends in a backward, when the others have sent it gradients where it would read them."""
    model = large_blocks.model_of(2)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for step in bmt.survive.steps(3):
        manager.zero_grad()
        for shard in bmt.virtual_shards(step):
            if dies and (bmt.rank(), bmt.world_size(), step) == (1, 3, 1):
                weight = next(model[1].parameters())
                weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            x = shard.of(torch.randn(12, large_blocks.DIM, generator=torch.Generator().manual_seed(step)))
            manager.backward(model(x).square().mean())
        manager.step()
    return [p.gather().double().sum().item() for p in model.parameters()], bmt.world_size()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_gradients_that_a_lost_rank_never_sent(transport):
    run = partial(rank_outcomes, 3, train_large, init={"virtual_shards": 6, "survive": 1}, fresh=True)
    [expected, *_], found = (
        run(dies, environment={"BMTRAIN_CPU_TRANSPORT": transport}) for dies in (False, True)
    )
    assert found[1].status is Status.DIED
    for outcome in (found[0], found[2]):
        assert outcome.status is Status.RETURNED, outcome
        assert outcome.value == (expected.value[0], 2)


#: Policies of Blocks whose shards other ranks hold too, and the first two faults of a job.
REPLICATED = [
    ({"level": 0}, (1, 1, "forward"), (3, 3, "clip")),
    ({"level": 0}, (0, 2, "backward"), (2, 4, "step")),
    ({"zero_size": 2}, (3, 1, "loop end"), (1, 3, "step")),
    ({"zero_size": 2}, (0, 2, "clip"), (2, 4, "after step")),
]


@pytest.mark.parametrize(("policy", "first", "second"), REPLICATED)
def test_shards_that_others_hold(policy, first, second):
    """Of 3 ranks and of 2 all share the Blocks with a ``zero_size`` of 2; there shards have copies again."""
    outcomes = outcomes_of(4, "float32", False, (first, second), False, "", bmt.BlockPolicy(**policy))
    survived(outcomes, 2, "float32", False)


@pytest.mark.parametrize("fault", [fault for fault, number in FAULTS.items() for _ in range(number)])
def test_faults_at_any_moment(fault):
    chance = random.Random(time.time())
    dtype, offload = chance.choice(["float32", "bfloat16"]), chance.choice([False, True])
    first, second = chance.sample(range(4), 2)
    what = "kill" if fault == "twice" else fault
    last = 8 if fault == "twice" else 20
    faults = [(first, chance.randrange(1, last), "start", what, chance.uniform(0.001, 0.05))]
    if fault == "twice":
        faults.append((second, 14, "start", "kill after another", chance.uniform(0.001, 0.05)))
    init = {"timeout": 6} if fault == "stop" else {}
    survive(len(faults), dtype, offload, *faults, long=True, **init)


STOPPED_AND_SLOW = [(0, 3), (2, 0), (2, 1)]
SECOND = [
    *((4, 2, "clip"), (4, 1, "start", "kill in a recovery")),
    *((rank, 1, "start", "stop in a recovery") for rank in (0, 4)),
]


@pytest.fixture(scope="module")
def of_stops(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """Outcomes of jobs in which a rank is stopped until their end, by their case: they wait at the same time."""
    jobs: dict[Any, tuple[Any, ...]] = {
        (rank, slow): (4, "float32", True, ((slow, 2, "start", "mute"), (rank, 2, "backward", "stop")))
        for rank, slow in STOPPED_AND_SLOW
    }
    jobs |= {second: (5, "float32", False, (second, (2, 2, "clip"))) for second in SECOND[2:]}
    calls = [
        partial(outcomes_of, *job, False, str(tmp_path_factory.mktemp("stopped")), timeout=6)
        for job in jobs.values()
    ]
    return dict(zip(jobs, at_once(calls), strict=True))


@pytest.mark.parametrize(("rank", "slow"), STOPPED_AND_SLOW)
def test_a_stopped_rank_does_not_come_back_and_a_slow_one_is_not_lost(rank, slow, of_stops):
    outcomes = survived(of_stops[rank, slow], 1, "float32", True)
    assert outcomes[rank].status is Status.RAISED
    assert "CommunicationError" in str(outcomes[rank])


def test_a_rank_that_is_only_slow_is_not_lost():
    outcomes = survive(0, "bfloat16", False, (2, 2, "backward", "slow"), timeout=6)
    assert "bmtrain: no rank lost; 4 ranks continue" in outcomes[0].output


@pytest.mark.parametrize(
    ("rank", "what", "named"),
    [
        (1, "the copy", "exp_avg of parameter "),
        (0, "a message", "the message with the gradient of parameter "),
    ],
)
def test_a_flipped_bit_is_named_and_not_trained_on(rank, what, named):
    """The copy of rank 0, on rank 1, is made again: rank 0 is lost some steps later."""
    outcomes = survive(1, "float32", True, (rank, 2, "backward", f"flip in {what}"), (0, 5, "loop end"))
    assert f"bmtrain: damaged: {named}" in outcomes[1].output
    assert ", in the copy of rank 0; it is not used: all copies are made again" in outcomes[1].output


def test_a_damaged_copy_does_not_replace_its_rank(tmp_path):
    faults = (2, 2, "backward", "flip in the copy"), (1, 2, "loop end")
    outcomes = outcomes_of(4, "float32", True, faults, False, str(tmp_path))
    for rank in (0, 2, 3):
        assert "rank 1 was lost and cannot be replaced, as there is damage: exp_avg of" in str(outcomes[rank])
        assert "checkpoint: continue with checkpoint.load(" in str(outcomes[rank])


def test_too_many_losses_in_a_recovery_name_the_last_checkpoint(tmp_path):
    faults = (2, 1, "start", "kill in a recovery"), (1, 2, "backward")
    outcomes = outcomes_of(4, "float32", False, faults, False, str(tmp_path))
    for rank in (0, 3):
        assert "ranks 1-2 of 4 lost, and only more than half may continue" in str(outcomes[rank])
        assert "from the last checkpoint: continue with checkpoint.load(" in str(outcomes[rank])


def test_survivors_that_cannot_connect_end_the_job():
    faults = *((rank, 1, "start", "unconnected") for rank in (0, 2, 3)), (1, 2, "backward")
    outcomes = outcomes_of(4, "float32", False, faults)
    for rank in (0, 2, 3):
        assert "rank 1 lost, and the others cannot connect: start the job again" in str(outcomes[rank])


@pytest.mark.parametrize(
    ("world", "policy", "lost", "words"),
    [
        (5, {}, (1, 2), "rank 1 and the keeper of its copy, rank 2, were lost at once"),
        (6, {"zero_size": 3}, (1, 4), "ranks 1, 4 had the same shards, and were lost at once"),
    ],
)
def test_two_with_the_same_shard_at_once_end_the_job(world, policy, lost, words):
    faults = tuple((rank, 2, "clip") for rank in lost)
    outcomes = outcomes_of(world, "float32", False, faults, False, "", bmt.BlockPolicy(**policy))
    for rank in set(range(world)) - set(lost):
        assert outcomes[rank].status is Status.RAISED
        assert words in str(outcomes[rank])


def what_is_copied(policy: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes that a rank sends in a step, those for parameters outside of Blocks, and number of others with a copy."""
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        model = bmt.BMTrainModelWrapper(Model())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOffloadOptimizer(model.parameters()))
    for step in range(2):
        before = host_comm(_context.context()).traffic().get("send", (0, 0))
        for _ in bmt.virtual_shards(step):
            manager.backward(model(torch.ones(1, SEQ, dtype=torch.long)))
        sent = host_comm(_context.context()).traffic()["send"]
        manager.step()
    outside = [p for p in model.parameters() if p._block is None]
    least = 8 * (1 + len(outside)) + sum(-(-p.numel() // 2) * 8 for p in outside)  # numbers and sums, fp32
    return sent[1] - before[1], least, len(_context.context().survival._keeper.ward.params) - len(outside)


@pytest.mark.parametrize("policy", [{}, {"level": 0}, {"zero_size": 2}])
def test_only_what_no_other_rank_holds_is_copied(policy):
    found = run_ranks(4, what_is_copied, policy, init={"virtual_shards": 4, "survive": 1})
    for sent, least, in_blocks in found:
        assert (sent > least, in_blocks > 0) == (not policy, not policy)
        assert sent >= least


@pytest.mark.parametrize("second", SECOND)
def test_two_others_at_once(second, of_stops):
    outcomes = of_stops.get(second) or outcomes_of(5, "float32", False, (second, (2, 2, "clip")), timeout=6)
    told, values, *_ = undisturbed("float32", False)
    for rank in {0, 1, 3, 4} - {second[0]}:
        assert outcomes[rank].status is Status.RETURNED, str(outcomes[rank])
        assert outcomes[rank].value[0] == told
        assert same_bits(outcomes[rank].value[1], values)


def test_a_commit_that_a_rank_has_not_seen():
    survive(1, "bfloat16", True, (2, 2, "loop end", "cut at the commit"), (1, 2, "clip"))


def test_a_place_is_not_given_after_a_loss():
    """The process waits at a rank that has another number by then."""
    survive(1, "float32", False, (3, 2, "backward", "a process waits"), (0, 2, "clip"))


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


def not_in_an_optimizer() -> None:
    """A frozen parameter outside of Blocks."""
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model[1].parameters()))
    with pytest.raises(
        ValueError, match="parameters outside Blocks in an optimizer.*got parameter 0 of shape"
    ):
        for shard in bmt.virtual_shards(0):
            manager.backward(model(shard.of(torch.ones(SHARDS, 4))).sum())


def test_frozen_parameters_outside_of_blocks_are_named():
    run_ranks(2, not_in_an_optimizer, init={"virtual_shards": SHARDS, "survive": 1}, fresh=True)


@pytest.mark.parametrize(
    "init",
    [
        {"survive": 1},
        {"survive": 2, "virtual_shards": 8},
        {"survive": 1, "virtual_shards": 8, "ep_size": 2},
        {"survive": 1, "virtual_shards": 8, "pipe_size": 2},
    ],
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
    assert not message.damage(3)
    message.data[where] ^= 4
    assert re.search("a message of step 7 instead of 3|gradient of parameter .* in step 3", message.damage(3))


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
    plans = [Fault(*death) for death in deaths]
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
