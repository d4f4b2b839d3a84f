"""Dropout where ranks divide tokens, experts or features: the masks of one process, or a refusal."""

from __future__ import annotations

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


def between_parallel_layers(drop: nn.Module) -> None:
    up, down = bmt.nn.ColumnParallelLinear(8, 8), bmt.nn.RowParallelLinear(8, 8)
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
    "features": ({"tp_size": 2}, between_parallel_layers, nn.Dropout(0.1), f"dropout.*{FEATURES}"),
    "features of heads": ({"tp_size": 2}, between_parallel_layers, HeadsDropout(), FEATURES),
}


def refuse(case: str) -> None:
    _, run, layer, said = REFUSED[case]
    with pytest.raises(NotImplementedError, match=said):
        run(layer)


@pytest.mark.parametrize("case", REFUSED)
def test_random_numbers_that_would_be_others_are_refused_on_all_ranks(case: str) -> None:
    run_ranks(2, refuse, case, init=REFUSED[case][0])
