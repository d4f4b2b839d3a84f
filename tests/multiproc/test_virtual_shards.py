"""Training with virtual shards has the same bits on any number of ranks.

``BMTRAIN_VIRTUAL_STEPS`` sets how long (10 steps).
"""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks

import bmtrain as bmt
from bmtrain._C import FlatLayout
from bmtrain.distributed import checkpoint

SHARDS, VOCAB, SEQ, DIM = 8, 29, 6, 12
STEPS = int(os.environ.get("BMTRAIN_VIRTUAL_STEPS", "10"))


class Layer(torch.nn.Module):
    """One layer of a GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleDict({name: torch.nn.LayerNorm(DIM) for name in ("attention", "mlp")})
        self.qkv, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)
        self.up, self.down = torch.nn.Linear(DIM, 4 * DIM), torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(self.norms["attention"](x)).view(*x.shape[:2], 3, 2, DIM // 2).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms["mlp"](x)))), 0.1, self.training)


class TinyGPT(torch.nn.Module):
    """A GPT-2 whose head is its embedding; in 16 bit its last layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCAB, DIM), torch.nn.Embedding(SEQ, DIM)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.norm = torch.nn.LayerNorm(DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.tokens(ids) + self.places.weight, 0.1, self.training)
        for layer in (*self.layers, *([self.layers[-1]] if x.dtype != torch.float32 else [])):
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Run:
    """A model in training."""

    def __init__(self, dtype: str, loss_scale: float | None = None) -> None:
        torch.manual_seed(3)
        self.model = bmt.BMTrainModelWrapper(TinyGPT().to(getattr(torch, dtype)))
        kind = bmt.optim.AdamOffloadOptimizer if dtype == "bfloat16" else bmt.optim.AdamOptimizer
        self.optimizer = kind(self.model.parameters(), lr=1e-2, weight_decay=1e-2)
        self.manager = bmt.optim.OptimManager(loss_scale=loss_scale, loss_scale_steps=2)
        self.manager.add_optimizer(self.optimizer)
        self.told: list[str] = []

    def train(self, first: int, last: int, norm_type: float = 2) -> None:
        for step in range(first, last):
            batch = torch.randint(VOCAB, (2 * SHARDS, SEQ), generator=torch.Generator().manual_seed(step))
            self.manager.zero_grad()
            shards, losses = bmt.virtual_shards(step), []
            for shard in shards:
                losses.append(self.model(shard.of(batch)))
                self.manager.backward(losses[-1])
            norm = self.manager.clip_grad_norm(self.optimizer.param_groups, 0.5, norm_type)
            self.manager.step()
            numbers = shards.mean(losses).item(), norm.item(), self.manager.loss_scale
            self.told.append(" ".join(float(number).hex() for number in numbers))

    def state(self) -> dict[str, torch.Tensor]:
        values = dict(self.model.state_dict())
        for index, entry in self.optimizer.state_dict(gather=True)["state"].items():
            values.update({f"{index}.{name}": torch.as_tensor(value) for name, value in entry.items()})
        return values


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name, value in one.items()
    )


def train(
    dtype: str,
    steps: int,
    folder: str,
    save_at: int | None = None,
    loss_scale: float | None = None,
    **policy: Any,
) -> tuple[Any, ...]:
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        run = Run(dtype, loss_scale)
    first = 0
    if save_at is None and checkpoint.latest(folder) is not None:
        first = checkpoint.load(folder, run.model, run.manager).step
    if save_at is not None:
        run.train(0, save_at)
        checkpoint.save(folder, save_at, run.model, run.manager)
        first = save_at
    run.train(first, steps)
    return run.told, run.state(), torch.random.get_rng_state()


def run_on(world: int, *arguments: Any, **options: Any) -> tuple[Any, ...]:
    ranks = run_ranks(world, train, *arguments, init={"virtual_shards": SHARDS}, **options)
    assert all(told == ranks[0][0] and same_bits(state, ranks[0][1]) for told, state, _ in ranks)
    return ranks[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_ranks_has_the_same_bits(dtype, tmp_path):
    """Also after a checkpoint that another number of ranks goes on from."""
    told, state, generator = run_on(2, dtype, STEPS, str(tmp_path), save_at=STEPS // 2)
    assert float.fromhex(told[-1].split()[0]) < float.fromhex(told[0].split()[0])
    for world in (1, 3, 8):
        other = run_on(world, dtype, STEPS, str(tmp_path / str(world)))
        assert other[0] == told
        assert same_bits(other[1], state)
        assert torch.equal(other[2], generator)
    resumed = run_on(4, dtype, STEPS, str(tmp_path))
    assert resumed[0] == told[STEPS // 2 :]
    assert same_bits(resumed[1], state)


def test_parameters_that_travel_in_16_bits_are_rounded_on_any_number_of_ranks(tmp_path):
    policies = [{"gather_dtype": torch.bfloat16}, {}]
    narrow, exact = (run_on(1, "float32", 3, str(tmp_path), **policy)[0] for policy in policies)
    assert narrow != exact
    for world in (2, 3):
        assert run_on(world, "float32", 3, str(tmp_path), **policies[0])[0] == narrow


def test_every_rank_count_skips_the_same_steps(tmp_path):
    """An infinite gradient, and norms of other kinds."""
    runs = [run_on(world, "float16", 8, str(tmp_path), loss_scale=2.0**19) for world in (1, 4)]
    assert runs[0][0] == runs[1][0]
    assert same_bits(runs[0][1], runs[1][1])
    scales = [float.fromhex(line.split()[2]) for line in runs[0][0]]
    assert min(scales) < 2.0**19
    assert any(later > earlier for earlier, later in pairwise(scales))  # steps were taken as well


@pytest.mark.parametrize(
    ("dtype", "loss_scale"), [("float32", None), ("bfloat16", None), ("float16", 2.0**19)]
)
def test_replicas_of_shards_change_no_bit(dtype, loss_scale, tmp_path):
    """Level 0, and blocks that a part of the ranks share."""
    told, state, generator = run_on(1, dtype, 3, str(tmp_path), loss_scale=loss_scale)
    for world, policy in ((2, {"level": 0}), (3, {"level": 0}), (4, {"level": 2, "zero_size": 2})):
        other = run_on(world, dtype, 3, str(tmp_path), loss_scale=loss_scale, **policy)
        assert other[0] == told
        assert same_bits(other[1], state)
        assert torch.equal(other[2], generator)


def sent_by_replicas() -> tuple[dict[str, tuple[int, int]], int]:
    """Reductions of a Block at level 0 in two micro-steps, and bytes of a quarter of its buffer."""
    block = bmt.Block(bmt.nn.Linear(64, 64), policy=bmt.BlockPolicy(level=0))
    for _ in bmt.virtual_shards(0):
        block(torch.ones(2, 64)).sum().backward()
    sent = bmt.global_var.context().world.reduce_comm.traffic()
    return sent, FlatLayout([64 * 64, 64], 4, 1).total


def test_replicas_exchange_pieces_and_gather_their_sums_once():
    for sent, quarter in run_ranks(4, sent_by_replicas, init={"virtual_shards": SHARDS}, fresh=True):
        assert sent == {"all_to_all": (2, 2 * 3 * quarter), "all_gather": (1, 3 * quarter)}


def gradients(dtype: str, virtual: bool) -> list[torch.Tensor]:
    """Of the mean over a batch, with and without virtual shards, on a model without dropout."""
    run = Run(dtype)
    run.model.eval()
    batch = torch.randint(VOCAB, (2 * SHARDS, SEQ), generator=torch.Generator().manual_seed(1))
    called: list[int] = []
    for index, p in enumerate(run.model.parameters()):
        p.register_post_accumulate_grad_hook(lambda p, index=index: called.append(index))
    if virtual:
        for shard in bmt.virtual_shards(0):
            run.manager.backward(run.model(shard.of(batch)))
    else:
        run.manager.backward(run.model(batch.chunk(bmt.world_size())[bmt.rank()]))
    assert sorted(called) == list(range(len(list(run.model.parameters()))))
    norms = [run.manager.clip_grad_norm(run.optimizer.param_groups, 1e9, p) for p in (1, 2, math.inf)]
    return [*norms, *(p._spec.gather(p.grad, p._label) for p in run.model.parameters())]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_those_of_the_whole_batch(dtype):
    virtual = run_ranks(2, gradients, dtype, True, init={"virtual_shards": SHARDS})[0]
    whole = run_ranks(1, gradients, dtype, False)[0]
    for one, other in zip(virtual, whole, strict=True):
        is_double = one.dtype is torch.float64
        torch.testing.assert_close(
            one, other, rtol=1e-12 if is_double else 2e-5, atol=1e-15 if is_double else 1e-7
        )


def of_frozen() -> None:
    run = Run("float32")
    frozen = {name for name, _ in run.model.named_parameters() if name.endswith("up.bias")}
    batch = torch.randint(VOCAB, (2 * SHARDS, SEQ), generator=torch.Generator().manual_seed(0))
    for name, p in run.model.named_parameters():
        p.requires_grad_(name not in frozen)
    for shard in bmt.virtual_shards(0):
        run.manager.backward(run.model(shard.of(batch)))
    assert {name for name, p in run.model.named_parameters() if p.grad is None} == frozen


def test_a_frozen_parameter_among_others_gets_no_gradient() -> None:
    run_ranks(2, of_frozen, init={"virtual_shards": SHARDS})


def misuse() -> None:
    run = Run("float32")
    batch = torch.zeros(2 * SHARDS, SEQ, dtype=torch.long)
    loop = iter(bmt.virtual_shards(0))
    shard = next(loop)
    for wrong in (run.manager.step, bmt.no_sync, lambda: next(iter(bmt.virtual_shards(1)))):
        with pytest.raises(RuntimeError, match="virtual"):
            wrong()
    run.manager.backward(run.model(shard.of(batch)))
    loop.close()  # as `break` does: nothing remains
    assert all(p.grad is None for p in run.model.parameters())
    with pytest.raises(RuntimeError, match=r"of 8 virtual shards gave it a gradient"):
        for shard in bmt.virtual_shards(0):
            if shard.index < bmt.world_size():
                run.manager.backward(run.model(shard.of(batch)))
    with pytest.raises(ValueError, match="multiple of 8 rows"):
        shard.of(batch[1:])
    with pytest.raises(ValueError, match=r"values: expected 4"):
        bmt.virtual_shards(0).mean([1.0])
    with pytest.raises(TypeError, match="step"):
        bmt.virtual_shards(0.5)
    with pytest.raises(ValueError, match="norm_type"):
        run.train(0, 1, norm_type=3)


def repeated() -> list[tuple[int, bool]]:
    shards = [(shard.index, shard.is_repeated) for shard in bmt.virtual_shards(0)]
    assert len(shards) == len(bmt.virtual_shards(0))
    return shards


def test_a_rank_without_a_shard_repeats_its_own():
    assert run_ranks(3, repeated, init={"virtual_shards": 4}) == [
        [(0, False), (3, False)],
        [(1, False), (1, True)],
        [(2, False), (2, True)],
    ]


def test_misuse_raises():
    run_ranks(2, misuse, init={"virtual_shards": SHARDS})


@pytest.mark.parametrize(
    "init",
    [
        {"virtual_shards": 1},
        {"virtual_shards": 8, "pipe_size": 2, "num_micro_batches": 4},
    ],
)
def test_what_cannot_be_is_refused(init):
    run_ranks(2, refused, init, init=False)


def refused(init: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="virtual_shards"):
        bmt.init_distributed(**init)


def not_asked_for() -> None:
    with pytest.raises(RuntimeError, match=r"init_distributed\(virtual_shards="):
        bmt.virtual_shards(0)


def test_needs_their_number():
    run_ranks(1, not_asked_for)


class LargeHead(bmt.DistributedModule):
    """A parameter that is too large for the common message, read twice in a forward by the module that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = bmt.DistributedParameter(
            torch.randn(1100, 64, generator=torch.Generator().manual_seed(1))
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = F.embedding(ids, self.table).tanh() @ self.table.t()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def train_large_head() -> torch.Tensor:
    model = LargeHead()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for step in range(2):
        batch = torch.randint(1100, (SHARDS, SEQ), generator=torch.Generator().manual_seed(step))
        manager.zero_grad()
        for shard in bmt.virtual_shards(step):
            manager.backward(model(shard.of(batch)))
        manager.step()
    return model.table.detach().clone()


def test_a_large_parameter_read_twice_in_a_forward() -> None:
    found = [run_ranks(world, train_large_head, init={"virtual_shards": SHARDS})[0] for world in (1, 2, 3)]
    assert all(torch.equal(table, found[0]) for table in found[1:])


def means_over_tokens() -> None:
    """How many tokens a micro-step has depends on the number of ranks."""
    logits = torch.zeros(4, 3)
    for mean in (
        lambda: bmt.loss.load_balancing_loss(logits, 1),
        lambda: bmt.loss.router_z_loss(logits),
    ):
        mean()
        with pytest.raises(RuntimeError, match="needs the tokens of all virtual shards at once"):
            for _ in bmt.virtual_shards(0):
                mean()


def test_means_over_tokens_are_refused() -> None:
    run_ranks(2, means_over_tokens, init={"virtual_shards": 4})
