"""Sequences that ranks divide: attention, training, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from harness.divided import Run, assert_same_run, batch_of, train_divided, train_whole
from harness.divided_model import Layer, Model, make_plain
from harness.twins import full_gradient
from torch import nn

import bmtrain as bmt
from bmtrain import _C
from bmtrain.distributed import checkpoint
from bmtrain.nn._sequences import Sequences, current_sequences
from bmtrain.nn.functional import attention
from bmtrain.nn.sequence import token_mean, whole_sequences

METHODS = ("heads", "ring")
PRELOAD = ("transformers.trainer_seq2seq", "transformers.models.llama.modeling_llama", "peft")


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention in fp64 by its formula."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    allowed = (documents[:, :, None] == documents[:, None, :])[:, None]
    if causal:
        allowed = allowed & torch.ones(length, length).tril().triu(1 - (window or length)).bool()
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def attend(
    method: str,
    heads: int,
    causal: bool,
    packed: bool,
    by_torch: bool,
    window: int | None,
    lengths: tuple[int, ...] = (24, 17),
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> float:
    """The largest error of the result and of three gradients, relative to each one's largest value."""
    torch.use_deterministic_algorithms(True)  # empty tensors are NaN: what has not arrived shows
    worst = 0.0
    for length in lengths:
        torch.manual_seed(length)
        queries, step = (12, 3) if length < 100 else (1, 700)
        whole = [
            torch.randn(2, n, length, features, dtype=torch.float64, requires_grad=True)
            for n, features in ((queries, 4), (heads, 4), (heads, 6))
        ]
        documents = torch.stack([torch.arange(length) // step, torch.arange(length) // (step + 2)]) * packed
        wanted = plain_attention(*whole, documents, causal, window, scale)
        weights = torch.randn(wanted.shape, dtype=wanted.dtype)
        (wanted * weights).sum().backward()
        bmt.shard_sequence({"input_ids": documents, "documents": documents}, method=method)
        sequences = current_sequences()
        assert sequences is not None

        def part(tensor: torch.Tensor, sequences: Sequences = sequences) -> torch.Tensor:
            return sequences.shard(tensor.detach().transpose(1, 2)).transpose(1, 2)

        own = [part(tensor).to(dtype).requires_grad_() for tensor in whole]
        if by_torch:
            got = F.scaled_dot_product_attention(
                *own, is_causal=causal, scale=scale, enable_gqa=heads != queries
            )
        else:
            got = attention(*own, causal=causal, window=window, scale=scale)
        (got * part(weights)).sum().backward()
        real = sequences.own < length
        for have, want in [(got, wanted), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]:
            difference = (have.detach() - part(want))[:, :, real].abs().max()
            worst = max(worst, (difference / want.abs().max()).item())
            assert not have.isnan().any()
    torch.use_deterministic_algorithms(False)
    return worst


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_attention_is_that_of_one_process(world: int, method: str) -> None:
    for heads in (12, 3, 1):
        for causal in (True, False):
            for packed in (False, True):
                scale = 0.3 if heads == 1 else None
                arguments = (method, heads, causal, packed, heads == 1, None, (24, 17), scale)
                worst = max(run_ranks(world, attend, *arguments, init={"sp_size": world}))
                assert worst <= 1e-6, (*arguments, worst)


@pytest.mark.parametrize("method", METHODS)
def test_attention_of_fp64_is_computed_in_fp64(method: str) -> None:
    arguments = (method, 3, True, False, False, None, (24, 17, 7), None, torch.float64)
    assert max(run_ranks(2, attend, *arguments, init={"sp_size": 2})) <= 1e-14


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [1, 2])
def test_windows_are_over_the_whole_sequence(world: int, method: str) -> None:
    for window, scale in ((2, None), (4, 0.1), (9, 0.3)):
        arguments = (method, 12, True, window == 4, False, window, (24, 17), scale)
        assert max(run_ranks(world, attend, *arguments, init={"sp_size": world})) <= 1e-6, window


def attend_undivided() -> None:
    bmt.nn.sequence.whole_sequences()
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64)
    for causal, window, scale in ((True, 4, 0.3), (True, 12, None), (True, 30, 2.0), (False, None, 0.3)):
        wanted = plain_attention(q, k[:, :2], v[:, :2], torch.zeros(2, 12), causal, window, scale)
        got = attention(q, k[:, :2], v[:, :2], causal=causal, window=window, scale=scale)
        torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="window: expected causal=True"):
        attention(q, k, v, causal=False, window=4)


def test_attention_to_tokens_that_are_all_here() -> None:
    run_ranks(1, attend_undivided)


def test_a_ring_computes_tiles_of_long_pieces() -> None:
    for packed, window in ((False, None), (True, 600)):
        arguments = ("ring", 1, True, packed, False, window, (2100,))
        assert max(run_ranks(2, attend, *arguments, init={"sp_size": 2})) <= 1e-6, (packed, window)


def masked() -> None:
    documents = (torch.arange(12) // 5).expand(2, 12)
    bmt.shard_sequence({"input_ids": documents, "documents": documents})
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64)
    wanted = plain_attention(q, k, v, documents, True, 4)
    window = torch.ones(12, 12).tril().triu(-3).bool()
    for mask in (window, torch.zeros(12, 12, dtype=q.dtype).masked_fill(~window, -torch.inf)):
        assert torch.allclose(F.scaled_dot_product_attention(q, k, v, mask), wanted)
        # Without a dimension of heads.
        alone = F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], mask)
        assert torch.allclose(alone, wanted[:, 0])
    seen = F.scaled_dot_product_attention(q, k, torch.eye(12).to(q), dropout_p=0.1, is_causal=True)
    allowed = (documents[0][:, None] == documents[0]).tril()
    assert not seen[..., ~allowed].any()
    assert seen[..., allowed].any(0).any(0).all()


def test_one_rank_has_documents_beside_masks_and_dropout() -> None:
    run_ranks(1, masked)


def encode() -> None:
    whole_sequences()
    plain = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x, documents = torch.randn(2, 16, 32), (torch.arange(16) // 5).expand(2, 16)
    with torch.no_grad():
        wanted = plain(x, src_mask=documents[0][:, None] != documents[0])
        (layer,) = bmt.BMTrainModelWrapper(nn.ModuleList([plain]))
        found = layer(bmt.shard_sequence({"inputs_embeds": x, "documents": documents})["inputs_embeds"])
    sequences = current_sequences()
    assert sequences is not None and torch.allclose(found, sequences.shard(wanted), atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_an_encoder_of_torch_is_evaluated_over_divided_sequences(world: int) -> None:
    run_ranks(world, encode, init={"sp_size": world})


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def attend_eagerly() -> None:
    plain = make_llama()
    plain.set_attn_implementation("eager")  # type: ignore[operator]
    model: Any = bmt.BMTrainModelWrapper(plain)
    ids = torch.arange(12).expand(2, 12)
    model(bmt.shard_sequence({"input_ids": ids})["input_ids"])
    for name in ("documents", "attention_mask"):
        part = bmt.shard_sequence({"input_ids": ids, name: (ids > 4).long()})
        with pytest.raises(NotImplementedError, match="Llama.*: its attention is 'eager', .*\"sdpa\""):
            model(part["input_ids"])
        model.set_attn_implementation("sdpa")
        model(part["input_ids"])
        model.set_attn_implementation("eager")


def test_one_rank_refuses_documents_in_eager_attention() -> None:
    run_ranks(1, attend_eagerly)


MODELS = {"plain": make_plain, "llama": make_llama}


def trained(model: str, length: int, packed: bool, method: str, recompute: str, delays: int = 0) -> Any:
    if delays:
        _C.set_random_delays(delays * bmt.world_size() + bmt.rank(), 3000)
    try:
        return train_divided(MODELS[model], batch_of(4, length, packed), method, 3, recompute)
    finally:
        if delays:
            _C.set_random_delays(0, 0)


@pytest.mark.parametrize("recompute", ["whole", "off"])
@pytest.mark.parametrize(("world", "sp_size"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_training_is_that_of_one_process(world: int, sp_size: int, recompute: str) -> None:
    pytest.importorskip("transformers")
    for model, length, packed in (("llama", 16, False), ("llama", 19, True), ("plain", 19, False)):
        wanted = train_whole(MODELS[model], batch_of(4, length, packed), 3)
        for method in METHODS:
            arguments = (model, length, packed, method, recompute)
            first, *others = run_ranks(world, trained, *arguments, init={"sp_size": sp_size})
            assert_same_run(first, wanted)
            for other in others:
                assert other.losses == first.losses
                assert all(torch.equal(other.weights[name], first.weights[name]) for name in first.weights)


@pytest.mark.parametrize("method", METHODS)
def test_random_delays_change_no_bit(method: str) -> None:
    first = run_ranks(4, trained, "plain", 19, False, method, "whole", init={"sp_size": 4})[0]
    for seed in (1, 2):
        late = run_ranks(4, trained, "plain", 19, False, method, "whole", seed, init={"sp_size": 4})[0]
        assert late.losses == first.losses
        assert all(torch.equal(late.weights[name], first.weights[name]) for name in first.weights)


def saved_and_resumed(folder: str, saves: bool) -> list[torch.Tensor]:
    """Weights after a further step, of a run that is saved or resumed here."""
    model: Any = bmt.BMTrainModelWrapper(make_plain())
    manager, optimizer = (
        bmt.optim.OptimManager(),
        bmt.optim.SGDOptimizer(model.parameters(), lr=0.1, momentum=0.9),
    )
    manager.add_optimizer(optimizer)
    if not saves:
        checkpoint.load(folder, model, manager)
    for step in range(2 if saves else 1):
        if step == 1:
            checkpoint.save(folder, 1, model, manager)
        part = bmt.shard_sequence(batch_of(1, 17))
        logits = model(part["input_ids"], part["position_ids"]).flatten(0, 1)
        targets = part["shift_labels"].flatten()
        manager.zero_grad()
        losses = F.cross_entropy(logits, targets, reduction="none")
        manager.backward(token_mean(losses, targets != -100))
        manager.step()
    return list(model.state_dict().values())


def test_a_checkpoint_continues_in_another_layout(tmp_path: Path) -> None:
    wanted = run_ranks(2, saved_and_resumed, str(tmp_path), True, init={"sp_size": 2})[0]
    for world in (1, 4):
        found = run_ranks(world, saved_and_resumed, str(tmp_path), False, init={"sp_size": world})[0]
        for have, want in zip(found, wanted, strict=True):
            assert (have - want).abs().max() <= 1e-6


def loss_over_all() -> tuple[float, float]:
    """Means over tokens where ranks have unequally many."""
    own = torch.arange(bmt.rank() + 1.0, requires_grad=True)
    mean = token_mean(own)
    bmt.optim.OptimManager().backward(mean)
    return bmt.sum_loss(mean.detach()).item(), own.grad[0].item()


def test_the_mean_is_over_all_tokens() -> None:
    assert run_ranks(4, loss_over_all, init={"sp_size": 2}) == [(1.0, pytest.approx(0.1))] * 4


def weighted_mean(dtype: torch.dtype, num_tokens: int) -> None:
    torch.manual_seed(0)
    of_ranks = [torch.rand(num_tokens + rank).to(dtype) for rank in range(2)]
    weights = [torch.rand(len(losses)).mul(3).floor() for losses in of_ranks]  # 0, 1 or 2
    own = of_ranks[bmt.rank()].clone()
    own[weights[bmt.rank()] == 0] = torch.inf
    own.requires_grad_()
    mean = token_mean(own, weights[bmt.rank()])
    assert mean.dtype == dtype
    bmt.optim.OptimManager().backward(mean)
    every, factors = torch.cat(of_ranks).double(), torch.cat(weights).double()
    rounding = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}[dtype]
    found = bmt.distributed.all_reduce(mean.detach().double(), "avg")
    torch.testing.assert_close(found, (every * factors).sum() / factors.sum(), rtol=rounding, atol=0)
    expected = weights[bmt.rank()].double() / factors.sum()
    torch.testing.assert_close(own.grad.double(), expected, rtol=4 * rounding, atol=2.0**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_is_weighted_and_counts_more_tokens_than_the_dtype(dtype: torch.dtype) -> None:
    for num_tokens in (5, 100_000):
        run_ranks(2, weighted_mean, dtype, num_tokens)


LENGTHS = (19, 7, 12)
SMOOTHING = 0.1


def micro_batches(rank: int) -> list[torch.Tensor]:
    """Of ranks that share a batch: micro-batches of unequally many tokens."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(50, (2 + rank, length), generator=generator) for length in LENGTHS]


def accumulated(method: str) -> dict[str, torch.Tensor]:
    """Gradients of a mean over all tokens of a step, as the page has it."""
    model = bmt.BMTrainModelWrapper(make_plain())
    manager = bmt.optim.OptimManager(accumulate=len(LENGTHS))
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    own = micro_batches(bmt.config["dp_rank"])
    tokens = torch.tensor(float(sum(ids[:, 1:].numel() for ids in own)))
    tokens = bmt.distributed.all_reduce(tokens, "avg") / bmt.config["sp_size"]
    for ids in own:
        part = bmt.shard_sequence({"input_ids": ids, "labels": ids}, method=method)
        logits = model(part["input_ids"], part["position_ids"]).flatten(0, 1)
        labels = part["shift_labels"].flatten()
        total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHING)
        manager.backward(len(LENGTHS) * total / tokens)
    return {name: full_gradient(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("world", "sp_size"), [(2, 1), (2, 2), (4, 2)])
def test_accumulation_may_have_the_mean_over_all_tokens(world: int, sp_size: int) -> None:
    plain: Any = make_plain()
    batch = [ids for rank in range(world // sp_size) for ids in micro_batches(rank)]
    for ids in batch:
        logits = plain(ids, torch.arange(ids.shape[1]).expand_as(ids))[:, :-1].flatten(0, 1)
        total = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum", label_smoothing=SMOOTHING)
        (total / sum(ids[:, 1:].numel() for ids in batch)).backward()
    wanted = Run(gradients={name: p.grad for name, p in plain.named_parameters()})
    for found in run_ranks(world, accumulated, METHODS[world == 4], init={"sp_size": sp_size}):
        assert_same_run(Run(gradients=found), wanted)


def labels_as_they_are() -> None:
    """Of a collate function that has shifted them, and perhaps left some out."""
    ids = torch.arange(16).view(1, 16)
    shifted = torch.where(ids % 3 == 0, -100, ids + 1)
    part = bmt.shard_sequence({"input_ids": ids, "labels": ids, "shift_labels": shifted})
    assert torch.equal(part["shift_labels"], shifted.chunk(2, dim=1)[bmt.rank()])
    assert part["num_items_in_batch"].item() == 5.0  # of 10 tokens, on 2 ranks


def test_labels_that_are_shifted_already_stay_as_they_are() -> None:
    run_ranks(2, labels_as_they_are, init={"sp_size": 2})


def batches() -> list[list[int]]:
    return [batch.tolist() for batch in bmt.data.loader(range(8), batch_size=2, shuffle=False)]


def test_ranks_that_share_a_sequence_have_the_same_samples() -> None:
    one, other = [[0, 2], [4, 6]], [[1, 3], [5, 7]]
    assert run_ranks(4, batches, init={"sp_size": 2}) == [one, one, other, other]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mixer(x.transpose(1, 2)).transpose(1, 2)
        return x + y


class OwnAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ x.transpose(1, 2) / 32).softmax(-1) @ x


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask)[:, 0]


class CountsPositions(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[1])[:, None]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(32, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.gru(x)[0]
        return y


class Cross(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[:, None]
        return x + F.scaled_dot_product_attention(y, y[:, :, :1], y[:, :, :1])[:, 0]


class ByHand(bmt.DistributedModule):
    """A convolution that is distributed before the model is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = bmt.DistributedParameter(torch.randn(32, 32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.conv1d(x.transpose(1, 2), self.kernel, padding=1).transpose(1, 2)


LAYERS = {
    "by hand": (lambda: bmt.Block(ByHand()), "layers.2.*mixes tokens"),
    "convolution": (Convolution, "layers.2 .*mixes tokens"),
    "attention": (OwnAttention, "layers.2 .*mixes tokens"),
    "positions": (CountsPositions, "layers.2 .*counts positions"),
    "recurrence": (Recurrent, "layers.2.gru|layers.2 .*recurrence"),
    "cross": (Cross, "attention of 8 to 1 tokens"),
    "norm": (lambda: nn.BatchNorm1d(8), "statistics are over tokens"),
    "masked": (Masked, "attn_mask of shape"),
}


def refuse(layer: str) -> str:
    with pytest.raises(NotImplementedError) as caught:
        model = bmt.BMTrainModelWrapper(Model(LAYERS[layer][0]()))
        part = bmt.shard_sequence({"input_ids": batch_of(2, 16)["input_ids"]})
        model(part["input_ids"], part["position_ids"])
    return str(caught.value)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_cannot_be_divided_is_named(layer: str) -> None:
    for said in run_ranks(2, refuse, layer, init={"sp_size": 2}):
        assert re.search(LAYERS[layer][1], said)


class Alone(bmt.DistributedModule):
    """A function of hidden states, in a model that is not wrapped."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.scale = bmt.DistributedParameter(torch.ones(32))
        self.function = function

    def forward(self, x: torch.Tensor, *tables: torch.Tensor) -> Any:
        return self.function(x * self.scale, *tables)


ALONE = {
    "block": (lambda: bmt.Block(ByHand()), "mixes tokens"),
    "module": (lambda: Alone(OwnAttention()), "function .OwnAttention.*mixes tokens"),
    "positions": (lambda: bmt.Block(Alone(CountsPositions())), "function .CountsPositions.*counts positions"),
}


def call_alone(function: Any, *arguments: Any) -> None:
    function(bmt.shard_sequence({"inputs_embeds": torch.randn(2, 16, 32)})["inputs_embeds"], *arguments)


def refuse_alone(layer: str) -> str:
    with pytest.raises(NotImplementedError) as caught:
        call_alone(ALONE[layer][0]())
    return str(caught.value)


@pytest.mark.parametrize("layer", ALONE)
def test_a_layer_by_hand_that_cannot_be_divided_is_refused(layer: str) -> None:
    for said in run_ranks(2, refuse_alone, layer, init={"sp_size": 2}):
        assert re.search(ALONE[layer][1], said)


def layers_by_hand() -> None:
    call_alone(bmt.Block(Alone(lambda x, table: x * table)), torch.randn(8, 32))  # one of its positions
    call_alone(bmt.Block(Alone(lambda x: (x, x.flatten(0, 1), x.square().mean()))))
    call_alone(Alone(lambda x: x.view(2, 8, 4, 8)))  # not for a part of its tokens
    whole_sequences()
    Alone(OwnAttention())(torch.randn(2, 8, 32))


def test_a_layer_by_hand_may_return_other_values_beside_tokens() -> None:
    run_ranks(2, layers_by_hand, init={"sp_size": 2})


def wrong_calls() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    with pytest.raises(ValueError, match="method: expected 'heads' or 'ring', got 'tokens'"):
        bmt.shard_sequence({"input_ids": ids}, method="tokens")
    with pytest.raises(ValueError, match="batch: expected 'input_ids'"):
        bmt.shard_sequence({"labels": ids})
    for mask in ([1, 0] * 8, [1, 0] + [1] * 14, [1] * 14 + [0, 1]):
        with pytest.raises(ValueError, match="attention_mask: expected padding at the ends"):
            bmt.shard_sequence({"input_ids": ids, "attention_mask": torch.tensor([mask] * 2)})
    for mask in ([0] + [1] * 15, [1] * 15 + [0], [0] + [1] * 14 + [0]):
        bmt.shard_sequence({"input_ids": ids, "attention_mask": torch.tensor([mask] * 2)})
    with pytest.raises(ValueError, match="features: expected .* what is not one value for each token"):
        bmt.shard_sequence({"input_ids": ids, "features": torch.zeros(2, 3)})
    bmt.shard_sequence({"input_ids": ids})
    x = torch.randn(2, 3, 8, 4)
    with pytest.raises(ValueError, match="multiple of sp_size 2 heads of each tensor-parallel rank, got 3"):
        attention(x, x, x)
    with pytest.raises(NotImplementedError, match="dropout=0.1: expected 0"):
        attention(x, x, x, dropout=0.1)
    with pytest.raises(ValueError, match="this rank's part of the last shard_sequence"):
        F.scaled_dot_product_attention(x[:, :, :2], x, x)
    whole_sequences()
    assert F.scaled_dot_product_attention(x[:, :, :2], x, x).shape == (2, 3, 2, 4)


def test_wrong_calls_are_named() -> None:
    run_ranks(2, wrong_calls, init={"sp_size": 2})


def other_documents() -> None:
    batches = [
        {"inputs_embeds": torch.zeros(1, 16, 32), "documents": (torch.arange(16) // n).expand(1, 16)}
        for n in (16, 16, 5)
    ]
    layers = bmt.TransformerBlockList([Alone(lambda x: x)])
    one, other, packed = (bmt.shard_sequence(batch)["inputs_embeds"] for batch in batches)
    layers(packed)
    with pytest.raises(ValueError, match="Block: called after a shard_sequence.. with other documents"):
        layers(one)
    with pytest.raises(ValueError, match="micro-batches that pass the whole model one after the other"):
        layers.vertical([packed, packed])
    one, other = (bmt.shard_sequence(batch)["inputs_embeds"] for batch in batches[:2])
    layers.vertical([one, other])  # with the same documents


@pytest.mark.parametrize("world", [1, 2])
def test_tokens_of_other_documents_are_refused(world: int) -> None:
    run_ranks(world, other_documents, init={"sp_size": world})


def stale(method: str) -> None:
    block = bmt.BMTrainModelWrapper(nn.ModuleList([Layer(32, 4, 2)]))[0]
    x = torch.randn(1, 8, 32, requires_grad=True)
    bmt.shard_sequence({"inputs_embeds": torch.zeros(1, 16, 32)}, method=method)
    out = block(x)
    bmt.shard_sequence({"inputs_embeds": torch.zeros(1, 16, 32)}, method=method)
    with pytest.raises(RuntimeError, match="backward\\(\\) before the next shard_sequence"):
        out.sum().backward()


@pytest.mark.parametrize("method", METHODS)
def test_recomputation_with_other_sequences_is_refused(method: str) -> None:
    run_ranks(2, stale, method, init={"sp_size": 2})


def sizes(**options: int) -> str:
    with pytest.raises(ValueError) as caught:
        bmt.init_distributed(**options)
    return str(caught.value)


def test_sizes_that_cannot_be_are_refused() -> None:
    assert (
        "divisible by pipe_size * tp_size * sp_size = 1 * 1 * 2"
        in run_ranks(3, sizes, sp_size=2, init=False)[0]
    )
    few = run_ranks(4, sizes, sp_size=2, virtual_shards=1, init=False)[0]
    assert "at least the number of groups of 2 ranks that share a batch (2), got 1" in few
    assert "survive" in run_ranks(2, sizes, sp_size=2, virtual_shards=2, survive=1, init=False)[0]
