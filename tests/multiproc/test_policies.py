"""What blocks may be asked to do, in one table: the messages, bytes and buffers of each policy, with and without
accumulation, and that losses and gradients are those of plain torch under all of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from harness import run_ranks
from harness.kits import TanhLinear
from harness.tanh_model import DIM, LAYERS, MICROS, Model, batches

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain._engine.observer import Observer
from bmtrain.global_var import context


def plain_loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for name in (*(f"layers.{i}" for i in range(LAYERS)), "head"):
        x = torch.tanh(torch.nn.functional.linear(x, values[f"{name}.weight"], values[f"{name}.bias"]))
    return x.square().sum()


def check_against_plain(model, values, inputs, losses) -> None:
    total = sum(plain_loss(values, x) for x in inputs)
    torch.testing.assert_close(sum(losses), total.detach(), rtol=1e-6, atol=0)
    total.backward()
    for name, param in model.named_parameters():
        wanted = bmt.distributed.all_reduce(values[name].grad).flatten()
        part = wanted[param._start_partition : param._end_partition]
        torch.testing.assert_close(param.grad, part, rtol=1e-5, atol=1e-6)


class Counts(NamedTuple):
    gathers: tuple[int, int]  # messages, bytes
    block_reductions: tuple[int, int]
    head_reductions: tuple[int, int]
    buffers_between: int  # of the pool, in use between two micro-batches
    buffers_after: int


def counted_window(policy: dict[str, Any], accumulates: bool) -> tuple[Counts, int, int]:
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pool, group = current_engine(context()).pool, context().world
    for step in range(3):  # the order of blocks is learnt in the first
        values = {n: p.gather().detach() for n, p in model.named_parameters()}
        for name, value in values.items():  # blocks see what has travelled
            if name.startswith("layers") and "gather_dtype" in policy:
                values[name] = value.to(policy["gather_dtype"]).float()
            values[name].requires_grad_()
        optimizer.zero_grad()
        inputs, losses = batches(step), []
        group.comm.reset_traffic()
        group.reduce_comm.reset_traffic()
        for index, x in enumerate(inputs):
            with bmt.no_sync() if accumulates and index < MICROS - 1 else nullcontext():
                loss = model(x)
                loss.backward()
                losses.append(loss.detach())
            if index == 0:
                between = pool.stats()["buffers_in_use"]
        traffic = {**dict(group.comm.traffic()), **dict(group.reduce_comm.traffic())}
        after = pool.stats()["buffers_in_use"]
        check_against_plain(model, values, inputs, losses)
        optimizer.step()
    of_blocks = "all_reduce" if policy.get("level") == 0 else "all_to_all"
    sent = (traffic.get(name, (0, 0)) for name in ("all_gather", of_blocks, "reduce_scatter"))
    counts = Counts(*sent, between, after)
    partition = model.layers[0]._storages[0].shards.layout.partition
    return counts, partition, sum(p._spec.part(0)[1] for p in model.head.parameters())


THROUGH_BF16 = {"gather_dtype": torch.bfloat16}

# policy, whether gradients accumulate: gathers and reductions of blocks, reductions of the head, buffers in use
# between micro-batches and after the last.
TABLE = {
    "3": ({}, False, MICROS * (2 * LAYERS - 1), MICROS * LAYERS, MICROS, 0, 0),
    "3, accumulating": ({}, True, MICROS * (2 * LAYERS - 1), LAYERS, 1, LAYERS, 0),
    "3, kept gathered": ({"keep_gathered": True}, True, LAYERS, LAYERS, 1, 2 * LAYERS, 0),
    "3, activations kept": (
        {"recompute": bmt.Recompute.OFF},
        True,
        MICROS * (2 * LAYERS - 1),
        LAYERS,
        1,
        LAYERS,
        0,
    ),
    "2": ({"level": 2}, False, MICROS * LAYERS, MICROS * LAYERS, MICROS, 0, 0),
    "2, accumulating": ({"level": 2}, True, MICROS * LAYERS, LAYERS, 1, LAYERS, 0),
    "2, gradients sent": (
        {"level": 2, "keep_gradients": False},
        True,
        MICROS * LAYERS,
        MICROS * LAYERS,
        1,
        0,
        0,
    ),
    "2, kept gathered": ({"level": 2, "keep_gathered": True}, True, LAYERS, LAYERS, 1, 2 * LAYERS, 0),
    "0": ({"level": 0}, False, 0, MICROS * LAYERS, MICROS, 0, 0),
    "0, accumulating": ({"level": 0}, True, 0, LAYERS, 1, LAYERS, 0),
    "0, activations kept": (
        {"level": 0, "recompute": bmt.Recompute.OFF},
        False,
        0,
        MICROS * LAYERS,
        MICROS,
        0,
        0,
    ),
    "1": ({"level": 1}, False, MICROS * LAYERS, MICROS * LAYERS, MICROS, LAYERS, LAYERS),
    "1, accumulating": ({"level": 1}, True, LAYERS, LAYERS, 1, 2 * LAYERS, LAYERS),
    "1, activations kept": (
        {"level": 1, "recompute": bmt.Recompute.OFF},
        True,
        LAYERS,
        LAYERS,
        1,
        2 * LAYERS,
        LAYERS,
    ),
    "3, through bf16": (THROUGH_BF16, False, MICROS * (2 * LAYERS - 1), MICROS * LAYERS, MICROS, 0, 0),
    "3, through bf16, kept gathered": (
        {**THROUGH_BF16, "keep_gathered": True},
        True,
        LAYERS,
        LAYERS,
        1,
        2 * LAYERS,
        0,
    ),
    "2, through bf16": (
        {**THROUGH_BF16, "level": 2},
        True,
        MICROS * LAYERS,
        LAYERS,
        1,
        LAYERS,
        0,
    ),
    "1, through bf16": ({**THROUGH_BF16, "level": 1}, True, LAYERS, LAYERS, 1, 2 * LAYERS, LAYERS),
}


@pytest.mark.parametrize("case", TABLE)
def test_policy_sends_and_keeps_what_the_table_says(case):
    world = 2
    policy, accumulates, gathers, reductions, head_reductions, between, after = TABLE[case]
    for counts, partition, head in run_ranks(world, counted_window, policy, accumulates):
        # At level 0 a partition is the whole, and an all-reduce of it 2 (N - 1) / N times that: the same for two ranks.
        block, outside = 4 * (world - 1) * partition, 4 * (world - 1) * head
        gathered = block // 2 if "gather_dtype" in policy else block
        assert counts == Counts(
            gathers=(gathers + MICROS, gathers * gathered + MICROS * outside),
            block_reductions=(reductions, reductions * block),
            head_reductions=(head_reductions, head_reductions * outside),
            buffers_between=between,
            buffers_after=after,
        )


@pytest.mark.parametrize("case", ["3, kept gathered", "1, accumulating", "1, through bf16"])
def test_policies_on_one_rank(case):
    policy, accumulates, *_ = TABLE[case]
    run_ranks(1, counted_window, policy, accumulates)


def kept_always() -> list[int]:
    with bmt.default_policy(bmt.BlockPolicy(level=1)):
        model = Model()
    group = context().world
    x = torch.randn(2, DIM)
    counts = []
    shard = model.layers[0]._storages[0].shards.parameters[0]

    def evaluate() -> float:
        group.comm.reset_traffic()
        with torch.no_grad():
            loss = model(x).item()
        counts.append(dict(group.comm.traffic())["all_gather"][0] - 1)
        return loss

    before = evaluate()
    assert evaluate() == before
    with torch.no_grad():
        shard.add_(1.0)  # on every rank
    assert evaluate() != before
    model.load_state_dict({name: torch.zeros_like(v) for name, v in model.state_dict().items()})
    assert evaluate() == 0.0
    return counts


def test_level_1_gathers_again_what_was_changed():
    assert run_ranks(2, kept_always) == [[LAYERS, 0, 1, LAYERS]] * 2


def arguments() -> None:
    with pytest.raises(ValueError, match="not both"):
        bmt.Block(TanhLinear(DIM), zero_level=2, policy=bmt.BlockPolicy())
    with pytest.raises(ValueError, match="level: expected 0, 1, 2 or 3, got 4"):
        bmt.BlockPolicy(level=4)
    with pytest.raises(ValueError, match="expected 2 or 3, got 1"):
        bmt.Block(TanhLinear(DIM), zero_level=1)
    with bmt.default_policy(bmt.BlockPolicy(level=1, keep_gathered=True)):
        assert bmt.Block(TanhLinear(DIM))._policy == bmt.BlockPolicy(level=1, keep_gathered=True)
        told = bmt.Block(TanhLinear(DIM), use_checkpoint=False, zero_level=2)._policy
        assert told == bmt.BlockPolicy(level=2, keep_gathered=True, recompute=bmt.Recompute.OFF)
        assert bmt.Block(TanhLinear(DIM), policy=bmt.BlockPolicy())._policy == bmt.BlockPolicy()
    assert bmt.Block(TanhLinear(DIM))._policy == bmt.BlockPolicy()


def backward_again(level: int) -> None:
    """Once the order is learnt, the block's backward is expected to follow itself."""
    block = bmt.Block(TanhLinear(DIM), policy=bmt.BlockPolicy(level=level, recompute="off"))
    x = torch.ones(2, DIM, requires_grad=True)
    gradients = []
    for _ in range(3):
        loss = block(x).sum()
        for _ in range(3):
            x.grad = None
            loss.backward(retain_graph=True)
            gradients.append(x.grad)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_graph_that_is_kept_goes_backward_again_at_any_level(level):
    run_ranks(2, backward_again, level)


def test_policy_arguments():
    run_ranks(1, arguments)


# ---- overlap

EVENTS: list[tuple[str, int]] = []


class Noted(TanhLinear):
    def __init__(self, number: int) -> None:
        super().__init__(DIM)
        self.number = number

    def forward(self, x):
        EVENTS.append(("compute", self.number))
        return super().forward(x)


def noted_step(options: dict[str, Any]) -> list[tuple[str, int]]:
    layers = bmt.TransformerBlockList([bmt.Block(Noted(i), **options) for i in range(LAYERS)])
    numbers = {block._runtime: index for index, block in enumerate(layers)}

    class Gathers(Observer):
        def gathering(self, block: Any) -> None:
            if block in numbers:
                EVENTS.append(("gather", numbers[block]))

    engine = current_engine(context())
    engine.observer = Gathers()
    try:
        for _ in range(3):
            EVENTS.clear()
            layers(torch.randn(2, DIM)).sum().backward()
    finally:
        engine.observer = None
    return list(EVENTS)


@pytest.mark.parametrize("options", [{}, {"zero_level": 2}])
def test_the_next_gather_is_issued_before_the_present_compute(options):
    """In both directions, for every block but the first, whose gather nothing can hide."""
    for events in run_ranks(2, noted_step, options):
        turn = events.index(("compute", LAYERS - 1)) + 1
        forward, backward = events[:turn], events[turn:]
        for block in range(1, LAYERS):
            assert forward.index(("gather", block)) < forward.index(("compute", block - 1))
        order = [number for what, number in backward if what == "compute"]
        assert order == list(reversed(range(LAYERS)))
        gathered_again = [number for what, number in backward if what == "gather"]
        assert gathered_again == ([] if options else list(reversed(range(LAYERS - 1))))
        for block in gathered_again:
            assert backward.index(("gather", block)) < backward.index(("compute", block + 1))
