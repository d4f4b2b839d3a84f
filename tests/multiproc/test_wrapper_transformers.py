"""Hugging Face models through the wrapper, where transformers is installed."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

PRELOAD = ("transformers.trainer_seq2seq", "transformers.models.llama.modeling_llama", "peft")
SMALL = {"vocab_size": 50}
NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    "llama": {},
}
SIZES = {
    "gpt2": {"n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2},
    "bert": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2},
}
CLASSES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("family", CLASSES)
def test_wrapped_model_is_the_model(family, world):
    run_ranks(world, check_family, family, timeout=200)


def check_family(family: str) -> None:
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in CLASSES[family])
    plain = model_class(config_class(**SMALL, **SIZES[family], **NO_DROPOUT[family])).train()
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    assert model.__class__ is model_class
    assert [type(m) is bmt.Block for m in model.modules()].count(True) == (4 if family == "t5" else 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + bmt.rank())
        ids = torch.randint(1, 50, (2, 8), generator=generator)
        expected = plain(input_ids=ids, labels=ids, output_hidden_states=True)
        actual = model(input_ids=ids, labels=ids, output_hidden_states=True)
        assert list(actual) == list(expected)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=0)
        losses = []
        for output in (expected, actual):
            states = output.get("hidden_states") or output.decoder_hidden_states
            losses.append(output.loss + 0.01 * sum(state.square().mean() for state in states))
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        compare_gradients(plain, model)
        for optimizer in optimizers:
            optimizer.step()
    model.eval(), plain.eval()
    if family != "bert":
        ids = torch.ones(1, 3, dtype=torch.int64)
        options = {"max_new_tokens": 4, "do_sample": False}
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.slow
def test_router_logits_reach_the_loss():
    run_ranks(2, check_router, timeout=200)


def check_router() -> None:
    """The loss of a mixture holds router logits, which transformers collects by hooks of modules in the Blocks."""
    import transformers

    config = transformers.MixtralConfig(
        **SMALL, **SIZES["llama"], num_key_value_heads=1, num_local_experts=4, output_router_logits=True
    )
    plain = transformers.MixtralForCausalLM(config).train()
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    ids = torch.randint(1, 50, (2, 8), generator=torch.Generator().manual_seed(bmt.rank()))
    expected, actual = (m(input_ids=ids, labels=ids) for m in (plain, model))
    torch.testing.assert_close(actual.aux_loss, expected.aux_loss, rtol=1e-5, atol=0)
    expected.loss.backward(), actual.loss.backward()
    compare_gradients(plain, model)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_is_resized_before_the_wrapper(tied: bool):
    run_ranks(2, check_resizing, tied)


def check_resizing(tied: bool) -> None:
    import transformers

    plain = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, **SIZES["gpt2"], tie_word_embeddings=tied)
    )
    model = bmt.BMTrainModelWrapper(plain)
    assert model.resize_token_embeddings(50) is model.transformer.wte
    for size in (48, 64):
        with pytest.raises(RuntimeError, match=r"resize_token_embeddings\(\) after BMTrainModelWrapper"):
            model.resize_token_embeddings(size)
    with pytest.raises(RuntimeError, match=r"resize_token_embeddings\(\) after"):
        model.resize_token_embeddings(pad_to_multiple_of=8)
    assert model.state_dict()["lm_head.weight"].shape == (50, 16)
    assert isinstance(model.lm_head, bmt.DistributedModule)


@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_checkpointing_of_transformers_may_be_turned_on_and_off(is_wrapped_first: bool):
    run_ranks(2, check_checkpointing, is_wrapped_first)


def check_checkpointing(is_wrapped_first: bool) -> None:
    import transformers

    plain = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, **SIZES["gpt2"], **NO_DROPOUT["gpt2"])
    ).train()
    model = copy.deepcopy(plain)
    if is_wrapped_first:
        bmt.BMTrainModelWrapper(model)
    for each in (plain, model):
        each._set_gradient_checkpointing()  # what the documented names for it call, which change
    bmt.BMTrainModelWrapper(model)
    ids = torch.arange(16).reshape(2, 8)
    for is_on in (True, False):
        for each in (plain, model):
            each._set_gradient_checkpointing(is_on)
            each.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
        for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
            expected = bmt.world_size() * twin.grad.flatten()[param._start_partition : param._end_partition]
            torch.testing.assert_close(param.grad, expected, rtol=1e-4, atol=1e-6)


def compare_gradients(plain: torch.nn.Module, model: torch.nn.Module) -> None:
    """Makes the plain gradients those of the sum over ranks, as sharded parameters have them, and compares."""
    named = list(zip(plain.named_parameters(), model.parameters(), strict=True))
    for (_, expected), _ in named:
        if expected.grad is not None:
            bmt.config["comm"].all_reduce(expected.grad, bmt._C.ReduceOp.SUM).wait()
    largest = max(float(expected.grad.abs().max()) for (_, expected), _ in named if expected.grad is not None)
    for (name, expected), param in named:
        if name.endswith("attention.self.key.bias"):
            # It adds the same number to all scores of a query, and softmax takes it out again: the gradient is 0 but
            # for rounding, which has no reason to be alike.
            assert (
                max(float(g.abs().max()) for g in (expected.grad, param.grad) if g.numel()) < 1e-6 * largest
            )
        elif expected.grad is not None:
            part = expected.grad.flatten()[param._start_partition : param._end_partition]
            torch.testing.assert_close(param.grad, part, rtol=1e-4, atol=1e-5 * largest)
