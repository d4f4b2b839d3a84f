"""Dropout, other random numbers and batch norm where ranks divide tokens, experts, features or layers: values as in one
process, or a refusal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from harness.divided import assert_same_run, batch_of, train_divided, train_whole
from harness.divided_model import Model
from torch import nn

import bmtrain as bmt


class Flat(nn.Module):
    """Dropout of tokens of all sequences, one after the other, as mixtures have them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.flatten(0, 1), 0.3, self.training).view_as(x)


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * 1, 0.3, self.training, inplace=True)


def make() -> nn.Module:
    torch.manual_seed(5)
    return Model(nn.Dropout(0.2), Flat(), InPlace())


def train(length: int, method: str, recompute: str) -> Any:
    return train_divided(make, batch_of(2, length), method, 3, recompute)


@pytest.mark.parametrize(("method", "recompute"), [("heads", "whole"), ("ring", "off")])
@pytest.mark.parametrize("sp_size", [2, 4])
def test_divided_tokens_have_the_masks_of_one_process(sp_size: int, method: str, recompute: str) -> None:
    for length in (16, 19):
        wanted = train_whole(make, batch_of(2, length), 3)
        for found in run_ranks(sp_size, train, length, method, recompute, init={"sp_size": sp_size}):
            assert_same_run(found, wanted)


class Noise(nn.Module):
    """Random numbers in training that are not torch's dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) if self.training else x


class TokensFirst(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.transpose(0, 1), 0.1, self.training).transpose(0, 1)


def after_evaluation(layer: nn.Module) -> None:
    model = bmt.BMTrainModelWrapper(Model(layer))
    part = bmt.shard_sequence({"input_ids": batch_of(2, 16)["input_ids"]})
    model.eval()(part["input_ids"], part["position_ids"])
    model.train()(part["input_ids"], part["position_ids"])


def in_experts(act: Any) -> None:
    layer = bmt.Block(bmt.nn.MoE(8, 8, 4, act=act))
    bmt.init_parameters(layer)
    layer(torch.ones(1 - bmt.rank(), 8))


class Calls(bmt.DistributedModule):
    """A layer by hand, which no first forward checks."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.scale = bmt.DistributedParameter(torch.ones(8))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.function(x * self.scale)
        return y


def by_hand(function: Any) -> None:
    part = bmt.shard_sequence({"inputs_embeds": torch.randn(2, 16, 8)})["inputs_embeds"]
    Calls(lambda x: x * torch.rand(len(x), 1, 1) + torch.rand(8))(part)  # the same for all tokens
    bmt.Block(Calls(function))(part)


def a_batch(x: torch.Tensor) -> torch.Tensor:
    return torch.batch_norm(x.flatten(0, -2), None, None, None, None, True, 0.1, 1e-5, False).view_as(x)


def a_written_copy(x: torch.Tensor) -> torch.Tensor:
    return x * x.clone().bernoulli_(0.5)


def between_parallel_layers(drop: nn.Module, **options: bool) -> None:
    up, down = bmt.nn.ColumnParallelLinear(8, 8, **options), bmt.nn.RowParallelLinear(8, 8)
    block = bmt.Block(bmt.BMTrainModelWrapper(nn.Sequential(up, drop, down)))
    bmt.init_parameters(block)
    assert drop(torch.ones(2, 8)).shape == (2, 8)
    try:
        block(torch.ones(2, 8))
    finally:
        down(torch.ones(4, 4))
        assert drop(torch.ones(4, 4)).shape == (4, 4)  # values of one rank again


class HeadsDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(len(x), 2, 1, -1)
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.1).view_as(x)


class ScoresDropout(nn.Module):
    """Of heads and sequences one after the other, as for products by ``bmm``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(-1, 1, 2)
        return (F.dropout((y @ y.mT).softmax(-1), 0.1) @ y).view_as(x)


after_whole_rows = partial(between_parallel_layers, gather_input=False)
TOKENS, EXPERTS, FEATURES = (
    "tokens are divided",
    "in experts on several ranks",
    "between tensor-parallel layers",
)
REFUSED = {
    "noise": ({"sp_size": 2}, after_evaluation, Noise(), f"rand_like.*{TOKENS}"),
    "other axes": ({"sp_size": 2}, after_evaluation, TokensFirst(), f"dropout.*{TOKENS}"),
    "alpha": ({"sp_size": 2}, after_evaluation, nn.AlphaDropout(0.1), f"alpha_dropout.*{TOKENS}"),
    "channels": ({"sp_size": 2}, after_evaluation, nn.Dropout1d(0.1), f"feature_dropout.*{TOKENS}"),
    "slopes": ({"sp_size": 2}, after_evaluation, nn.RReLU(), f"rrelu.*{TOKENS}"),
    "expert": ({"ep_size": 2}, in_experts, nn.Dropout(0.1), EXPERTS),
    "expert's slopes": ({"ep_size": 2}, in_experts, nn.RReLU(inplace=True), EXPERTS),
    "noise by hand": ({"sp_size": 2}, by_hand, lambda x: x + torch.rand_like(x), f"rand_like: .*{TOKENS}"),
    "scores by hand": ({"sp_size": 2}, by_hand, F.gumbel_softmax, f"exponential_.*{TOKENS}"),
    "mask by hand": ({"sp_size": 2}, by_hand, a_written_copy, f"bernoulli_.*{TOKENS}"),
    "flat tokens": ({"sp_size": 2}, by_hand, lambda x: torch.randn_like(x.flatten(0, 1)), TOKENS),
    "batch by hand": ({"sp_size": 2}, by_hand, a_batch, "batch_norm: .*over rows of divided tokens"),
    "expert's noise": ({"ep_size": 2}, in_experts, torch.rand_like, EXPERTS),
    "expert's batch": ({"ep_size": 2}, in_experts, a_batch, f"batch_norm.*{EXPERTS}"),
    "features' noise": ({"tp_size": 2}, between_parallel_layers, Noise(), f"rand_like.*{FEATURES}"),
    "features": ({"tp_size": 2}, between_parallel_layers, nn.Dropout(0.1), f"dropout.*{FEATURES}"),
    "features of heads": ({"tp_size": 2}, between_parallel_layers, HeadsDropout(), FEATURES),
    "features of whole rows": ({"tp_size": 2}, after_whole_rows, HeadsDropout(), FEATURES),
    "scores of heads": ({"tp_size": 2}, between_parallel_layers, ScoresDropout(), FEATURES),
    "scores of whole rows": ({"tp_size": 2}, after_whole_rows, ScoresDropout(), FEATURES),
}


def refuse(case: str) -> None:
    _, run, layer, said = REFUSED[case]
    with pytest.raises(NotImplementedError, match=said):
        run(layer)


@pytest.mark.parametrize("case", REFUSED)
def test_random_numbers_that_would_be_others_are_refused_on_all_ranks(case: str) -> None:
    run_ranks(2, refuse, case, init=REFUSED[case][0])


def a_head_alone() -> None:
    head, drop = bmt.nn.ColumnParallelLinear(8, 8), nn.Dropout(0.1)
    bmt.init_parameters(head)
    for rows in (2, 4):  # the second has as many as the first had in the head
        logits = head(drop(torch.ones(rows, 8)))
        drop(torch.ones(rows, 8))  # the next sequences, before backward
        logits.sum().backward()
    head.eval()(torch.ones(4, 8))
    drop(torch.ones(8, 8))


def test_dropout_is_free_again_behind_a_head() -> None:
    run_ranks(2, a_head_alone, init={"tp_size": 2})


def written(x: torch.Tensor) -> torch.Tensor | None:
    """The gradient of what random numbers are written over."""
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.normal_()
    y = x * 2
    seen = y.sum()
    (y.uniform_().sum() + seen).backward()
    return x.grad


def draw_as_torch() -> None:
    x = torch.ones(3, requires_grad=True)
    expected, x.grad = written(x), None
    drawn = []
    for divided in (False, True):
        if divided:
            bmt.shard_sequence({"input_ids": torch.zeros(2, 16, dtype=torch.long)})
        torch.manual_seed(0)
        probabilities = torch.full((5,), 0.5)
        values = [torch.rand(5), torch.randn(5), torch.rand_like(x), torch.bernoulli(probabilities)]
        values += [torch.rand(5, generator=torch.Generator().manual_seed(1)), torch.randn_like(x)]
        drawn.append([*values, torch.empty(5).bernoulli_(probabilities), torch.empty(5).exponential_(2.0)])
    assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))
    assert torch.equal(written(x), expected)


def test_other_random_numbers_are_those_of_torch() -> None:
    run_ranks(2, draw_as_torch, init={"sp_size": 2})


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def drop_in_stages(is_loss_inside: bool) -> None:
    layers = bmt.PipelineTransformerBlockList([nn.Dropout(0.5) for _ in range(4)])
    kept = []
    for _ in range(2):
        x = torch.ones(4, 1024, requires_grad=True)
        out = layers.loss(x, head=Sum()) if is_loss_inside else layers(x)
        out.sum().backward()
        assert x.grad is not None
        kept.append(x.grad != 0)
        assert is_loss_inside or torch.equal(x.grad, out)  # also where layers ran again
    for each in kept:  # 1/16; 1/4 if the layers of one stage have the masks of those of the other
        assert each.float().mean() < 0.1
    assert not torch.equal(*kept)
    assert len(set(bmt.distributed.all_gather(torch.rand(1)).flatten().tolist())) == 1
    state = torch.get_rng_state()
    layers.eval()(torch.ones(4, 8))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("is_loss_inside", [False, True])
def test_layers_of_several_stages_have_masks_of_their_own(is_loss_inside: bool) -> None:
    run_ranks(2, drop_in_stages, is_loss_inside, init={"pipe_size": 2, "num_micro_batches": 4})


OF_WHOLE_ROWS: dict[str, dict[str, Any]] = {
    "ColumnParallelLinear": {"gather_input": False},
    "VPProjection": {},
}


def replicas(kind: str, own_seed: bool, first: float) -> None:
    layer: Any = getattr(bmt.nn, kind)(8, 8, dtype=torch.float32, **OF_WHOLE_ROWS[kind])
    bmt.init_parameters(layer)
    torch.manual_seed(bmt.rank() if own_seed else 0)
    layer.eval()(torch.ones(8, 8) * bmt.rank())  # nothing is trained
    layer.train()
    x = F.dropout(torch.ones(8, 8))
    x[0, 0] = first
    if own_seed:
        with pytest.raises(RuntimeError, match="expected the same input on all tensor-parallel ranks"):
            layer(x)
    else:
        layer(x).sum().backward()


@pytest.mark.parametrize("first", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("own_seed", [False, True])
@pytest.mark.parametrize("kind", OF_WHOLE_ROWS)
def test_ranks_with_the_same_rows_need_the_same_masks(kind: str, own_seed: bool, first: float) -> None:
    run_ranks(2, replicas, kind, own_seed, first, init={"tp_size": 2})


def rows_of_their_own() -> None:
    x, kept = torch.ones(2, 64), []
    for seed in (0, bmt.config["tp_rank"]):
        torch.manual_seed(seed)
        one, other = bmt.distributed.all_gather(F.dropout(x))
        kept.append(torch.equal(one, other))
    assert kept == [True, False]


def test_ranks_with_rows_of_their_own_need_other_seeds() -> None:
    """As the page on tensor parallelism says."""
    run_ranks(2, rows_of_their_own, init={"tp_size": 2})
