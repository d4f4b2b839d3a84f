"""Sequences that ranks divide beside other divisions: virtual shards, tensor parallelism, pipelines."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import rank_outcomes, run_ranks
from harness.divided import Run, assert_same_run, batch_of, train_whole
from harness.divided_model import Model, make_plain
from harness.twins import full_gradient

import bmtrain as bmt
from bmtrain._tools.parity_rank import _whole_gradient
from bmtrain.nn.sequence import token_mean

SHARDS = 4


def train_virtual(method: str, length: int) -> Run:
    """Three clipped steps of virtual shards, each of which the ranks of a sequence group compute together."""
    with bmt.default_policy(bmt.BlockPolicy(recompute="whole")):
        model: Any = bmt.BMTrainModelWrapper(make_plain())
    run, manager = Run(), bmt.optim.OptimManager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.add_optimizer(optimizer)
    batch = equal_rows(length)
    for step in range(3):
        manager.zero_grad()
        shards, losses = bmt.virtual_shards(step), []
        for shard in shards:
            part = bmt.shard_sequence({name: shard.of(rows) for name, rows in batch.items()}, method=method)
            logits = model(part["input_ids"], part["position_ids"]).flatten(0, 1)
            targets = part["shift_labels"].flatten()
            losses.append(token_mean(F.cross_entropy(logits, targets, reduction="none"), targets != -100))
            manager.backward(losses[-1])
        run.losses.append(shards.mean(losses).item())
        if step == 0:
            run.gradients = {name: full_gradient(p) for name, p in model.named_parameters()}
        run.losses.append(manager.clip_grad_norm(optimizer.param_groups, 1.0).item())
        manager.step()
    run.weights = dict(model.state_dict())
    return run


def equal_rows(length: int) -> dict[str, torch.Tensor]:
    """A batch whose virtual shards have equally many tokens that count."""
    batch = batch_of(2 * SHARDS, length)
    return {**batch, "labels": batch["input_ids"]}


@pytest.mark.parametrize("method", ["heads", "ring"])
def test_virtual_shards_have_the_bits_of_their_sequence_ranks(method: str) -> None:
    """On any number of ranks with one ``sp_size``; with another, up to rounding."""
    wanted = train_whole(make_plain, equal_rows(19), 3)
    for sp_size, worlds in ((1, (1,)), (2, (2, 6)), (4, (4, 8))):
        runs = [
            run
            for world in worlds
            for run in run_ranks(
                world, train_virtual, method, 19, init={"sp_size": sp_size, "virtual_shards": SHARDS}
            )
        ]
        assert_same_run(runs[0], wanted)
        for one, other in pairwise(runs):
            assert one.losses == other.losses
            assert all(torch.equal(one.gradients[name], other.gradients[name]) for name in wanted.gradients)
            assert all(torch.equal(one.weights[name], other.weights[name]) for name in wanted.weights)


def whole_tokens(x: torch.Tensor, length: int) -> torch.Tensor:
    """Concatenates the ranks' ``(sequences, tokens, ...)``."""
    return bmt.distributed.all_gather(x.detach().contiguous()).movedim(0, 1).flatten(1, 2)[:, :length]


def bits_of_heads(kept: int, causal: bool, packed: bool) -> list[torch.Tensor]:
    """Attention with its gradients, and the losses of the tokens of a model; of all ranks."""
    length, generator = 19, torch.Generator().manual_seed(1)
    shapes = [(2, length, heads, 8) for heads in (4, kept, kept, 4)]
    batch: dict[str, Any] = batch_of(2, length, packed)
    part = bmt.shard_sequence(
        {**batch, **{f"{n}": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}}
    )
    q, k, v = (part[name].requires_grad_() for name in "012")
    out = bmt.nn.functional.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)
    out.backward(part["3"])
    model: Any = bmt.BMTrainModelWrapper(make_plain())
    logits = model(part["input_ids"], part["position_ids"])
    losses = F.cross_entropy(logits.movedim(-1, 1), part["shift_labels"], reduction="none")
    return [whole_tokens(x, length) for x in (out, q.grad, k.grad, v.grad, logits, losses)]


@pytest.mark.parametrize(("kept", "causal", "packed"), [(4, True, False), (2, False, True), (1, True, True)])
def test_attention_by_heads_has_the_bits_of_one_rank(kept: int, causal: bool, packed: bool) -> None:
    """Also of gradients of repeated heads; products of fewer rows, for logits, may round otherwise."""
    wanted, *others = (
        run_ranks(n, bits_of_heads, kept, causal, packed, init={"sp_size": n}) for n in (1, 2, 4)
    )
    for found in (each for runs in others for each in runs):
        assert [torch.equal(*pair) for pair in zip(found[:4], wanted[0], strict=False)] == [True] * 4
        for pair in zip(found[4:], wanted[0][4:], strict=True):
            torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


class Head(bmt.DistributedModule):
    """Mean loss over all tokens of the step that count, from micro-batches that have unequally many."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(linear.weight.detach().clone())
        self.bias = bmt.DistributedParameter(linear.bias.detach().clone())

    def forward(self, x: torch.Tensor, targets: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, self.weight, self.bias).flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.view(targets.shape).sum(1).mean() * share


def train_pipeline(schedule: str, method: str, packed: bool = False) -> Run:
    """Three clipped steps of a pipeline whose ranks divide sequences."""
    plain: Model = make_plain()
    front = bmt.BMTrainModelWrapper(torch.nn.ModuleList([plain.tokens, plain.positions]))
    layers = bmt.PipelineTransformerBlockList(map(bmt.BMTrainModelWrapper, plain.layers), schedule=schedule)
    head = Head(plain.head)
    names = {front: "front.", layers: "layers.", head: "head."}
    named = [(names[part] + name, p) for part in names for name, p in part.named_parameters()]
    run, manager = Run(), bmt.optim.OptimManager()
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    manager.add_optimizer(optimizer)
    batch = batch_of(8, 19)
    if packed:  # two documents in each sequence, of other lengths than in the others
        batch["position_ids"] = torch.stack(
            [torch.arange(19) - n * (torch.arange(19) >= n) for n in range(3, 18, 2)]
        )
    for step in range(3):
        own = {
            name: value.chunk(bmt.config["dp_size"])[bmt.config["dp_rank"]] for name, value in batch.items()
        }
        part = bmt.shard_sequence(own, method=method)
        hidden = front[0](part["input_ids"]) + front[1](part["position_ids"])
        share = len(hidden) / part["num_items_in_batch"]
        loss = layers.loss(hidden, head=head, labels=(part["shift_labels"], share))
        manager.zero_grad()
        manager.backward(loss)
        run.losses.append(bmt.distributed.all_reduce(loss.detach(), "avg").item())
        if step == 0:
            run.gradients = {name: _whole_gradient(p).view(p.full_shape) for name, p in named}
        run.losses.append(manager.clip_grad_norm(optimizer.param_groups, 1.0).item())
        manager.step()
    run.weights = {name: p._spec.gather(p.data, p._label).view(p.full_shape) for name, p in named}
    return run


@pytest.mark.parametrize(("schedule", "method"), [("1f1b", "heads"), ("zb1p", "ring")])
def test_a_pipeline_trains_as_one_process(schedule: str, method: str) -> None:
    wanted = train_whole(make_plain, batch_of(8, 19), 3)
    names = {"tokens.weight": "front.0.weight", "positions.weight": "front.1.weight"}
    for kind in ("gradients", "weights"):
        values = getattr(wanted, kind)
        setattr(wanted, kind, {names.get(name, name): value for name, value in values.items()})
    init = {"sp_size": 2, "pipe_size": 2, "num_micro_batches": 3}
    for run in run_ranks(4, train_pipeline, schedule, method, init=init):
        assert_same_run(run, wanted)


@pytest.mark.parametrize(("schedule", "method"), [("1f1b", "ring"), ("zb1p", "heads")])
def test_each_sequence_in_a_pipeline_has_its_own_documents(schedule: str, method: str) -> None:
    [wanted] = run_ranks(1, train_pipeline, schedule, method, True)
    init = {"sp_size": 2, "pipe_size": 2, "num_micro_batches": 3}
    for run in run_ranks(4, train_pipeline, schedule, method, True, init=init):
        assert_same_run(run, wanted)


def unequal(rows: int, method: str) -> None:
    own = torch.zeros(rows if bmt.rank() < 2 else 2, 16, dtype=torch.long)
    with pytest.raises(ValueError, match="as many sequences, of one length, and one method on ranks"):
        bmt.shard_sequence({"input_ids": own}, method=method if bmt.rank() == 3 else "heads")


class TokenMean(torch.nn.Module):
    def forward(self, x: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        return token_mean(x)


@pytest.mark.parametrize(("rows", "method"), [(3, "heads"), (2, "ring")])
def test_batches_that_do_not_fit_are_named(rows: int, method: str) -> None:
    run_ranks(4, unequal, rows, method, init={"sp_size": 2, "pipe_size": 2})


def mean_in_a_head() -> None:
    layers = bmt.PipelineTransformerBlockList([torch.nn.Tanh(), torch.nn.Tanh()])
    layers.loss(torch.ones(2, 2, 4), head=TokenMean())


def test_a_mean_over_all_tokens_inside_a_pipeline_is_named() -> None:
    outcomes = rank_outcomes(2, mean_in_a_head, init={"pipe_size": 2}, grace=1)
    assert "token_mean needs the tokens of all micro-batches at once" in outcomes[1].message
