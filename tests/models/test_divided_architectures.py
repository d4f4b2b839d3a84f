"""Architectures of transformers whose sequences are divided: each trains as in one process, or is refused by name.

``BMTRAIN_ALL_LAYOUTS=1`` runs every architecture in every layout, not only in the two of sequences on two ranks.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.divided import assert_same_run, batch_of, train_divided, train_whole

import bmtrain

transformers = pytest.importorskip("transformers")

PRELOAD = ("transformers.trainer_seq2seq", "transformers.models.llama.modeling_llama", "peft")
_SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_BASE = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
_HEAD = {**_BASE, "head_dim": 8}
_BERT = {**_SIZES, "intermediate_size": 48, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
_GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
_MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_NOT_CHOSEN = "its attention is '(eager|sdpa)', and cannot be chosen"

#: Architecture -> its sizes, and the sentences of both methods; empty: it trains.
ARCHITECTURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "llama": (_BASE, "", ""),
    "mistral": ({**_BASE, "sliding_window": 6}, "", ""),
    "qwen2": (_BASE, "", ""),
    "qwen3": (_HEAD, "", ""),
    "gemma": (_HEAD, "", ""),
    "gemma2": (_HEAD, "attention with softcap", "attention with softcap"),
    "gemma3_text": ({**_HEAD, "sliding_window": 6}, "", ""),
    "phi": (_BASE, "", ""),
    "phi3": (_BASE, "", ""),
    "olmo": (_BASE, "", ""),
    "olmo2": (_BASE, "", ""),
    "starcoder2": ({**_BASE, "residual_dropout": 0, "embedding_dropout": 0}, "", ""),
    "stablelm": (_BASE, "", ""),
    "cohere": (_BASE, "", ""),
    "cohere2": ({**_HEAD, "sliding_window": 6}, "", ""),
    "granite": (_BASE, "", ""),
    "glm": (_HEAD, "", ""),
    "helium": (_HEAD, "", ""),
    "smollm3": (_BASE, "", ""),
    "nemotron": (_BASE, "", ""),
    "mixtral": ({**_BASE, "num_local_experts": 4}, "", ""),
    "qwen2_moe": ({**_BASE, **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 16}, "", ""),
    "qwen3_moe": ({**_HEAD, **_MOE, "num_experts": 4}, "", ""),
    "deepseek_v3": ({**_BASE, **_MOE, **_DEEPSEEK}, "", ""),
    "gpt2": ({**_GPT2, **_NO_DROPOUT}, "", ""),
    "gpt2 with dropout": (_GPT2, *["attention: dropout=0.1: expected 0"] * 2),
    "gpt2 with dropout of layers": ({**_GPT2, "attn_pdrop": 0}, "", ""),
    "gpt_neox": ({**_BASE, "hidden_dropout": 0}, "", ""),
    "opt": (
        {**_BASE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0, "max_position_embeddings": 64},
        "",
        "",
    ),
    "bert": (_BERT, "", ""),
    "roberta": ({**_BERT, "max_position_embeddings": 64}, "", ""),
    "modernbert": (
        {**_BASE, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        *["makes a mask"] * 2,
    ),
    "llama4_text": (
        {**_HEAD, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
        *["chunked_overlay"] * 2,
    ),
    "gpt_oss": (
        {**_HEAD, **_MOE, "num_local_experts": 4, "sliding_window": 6},
        *["attention with s_aux"] * 2,
    ),
    "gptj": ({**_GPT2, **_NO_DROPOUT, "rotary_dim": 4}, *[_NOT_CHOSEN] * 2),
    "bloom": ({"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}, *[_NOT_CHOSEN] * 2),
    "falcon": (_BASE, *[_NOT_CHOSEN] * 2),
    "mpt": ({"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4}, *[_NOT_CHOSEN] * 2),
    "mamba": ({**_SIZES, "state_size": 4}, *["mixes tokens"] * 2),
    "rwkv": ({**_SIZES, "attention_hidden_size": 32}, *[_NOT_CHOSEN] * 2),
    "recurrent_gemma": ({**_BASE, "lru_width": 32}, *["mixes tokens"] * 2),
    "lfm2": ({**_BASE, "layer_types": ["conv", "full_attention"]}, *["mixes tokens"] * 2),
}
#: Number of ranks, arguments of `init_distributed`, and how sequences are divided.
LAYOUTS = [
    (2, {"ep_size": 2}, "heads"),
    (2, {"tp_size": 2}, "heads"),
    (2, {"pipe_size": 2}, "heads"),
    (2, {"tp_size": 2, "ep_size": 2}, "heads"),
    (2, {"sp_size": 2, "ep_size": 2}, "heads"),
    (4, {"sp_size": 4}, "heads"),
    (4, {"sp_size": 2}, "ring"),
    (4, {"sp_size": 2, "ep_size": 4}, "heads"),
    (4, {"sp_size": 2, "tp_size": 2}, "ring"),
    (4, {"sp_size": 2, "pipe_size": 2}, "heads"),
]
_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
_MASKED = ("bert", "roberta", "modernbert")


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    kind = name.split()[0]
    config = transformers.AutoConfig.for_model(kind, **ARCHITECTURES[name][0])
    auto = transformers.AutoModelForMaskedLM if kind in _MASKED else transformers.AutoModelForCausalLM
    model: torch.nn.Module = auto.from_config(config)
    # fp64 compares without rounding; the grouped products of experts have no fp64.
    return model.train() if kind in _EXPERTS else model.train().double()


def in_layout(name: str, methods: tuple[str, ...]) -> list[Any]:
    results: list[Any] = []
    for method in methods:
        try:
            results.append(train_divided(partial(make, name), batch_of(2, 19), method))
        except NotImplementedError as error:
            results.append(str(error))
    bmtrain.nn.sequence.whole_sequences()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_or_is_refused(name: str) -> None:
    trains_or_is_refused(name, ARCHITECTURES[name][1:], 2, {"sp_size": 2}, "heads", "ring")


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("BMTRAIN_ALL_LAYOUTS"), reason="BMTRAIN_ALL_LAYOUTS=1 runs it")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_architecture_in_other_layouts(name: str, layout: tuple[int, dict[str, int], str]) -> None:
    world, init, method = layout
    sentence = ARCHITECTURES[name][1 + (method == "ring")] if "sp_size" in init else ""
    if "dropout" in name and not sentence and init.get("sp_size") != world:
        pytest.skip(
            "ranks that divide sequences of a batch draw equal masks for different ones, unlike one process"
        )
    trains_or_is_refused(name, (sentence,), world, init, method)


@pytest.mark.parametrize(("name", "other"), [("mixtral", "tp_size"), ("deepseek_v3", "sp_size")])
def test_experts_beside_another_division(name: str, other: str) -> None:
    trains_or_is_refused(name, ("",), 2, {"ep_size": 2, other: 2}, "heads")


def trains_or_is_refused(
    name: str, sentences: tuple[str, ...], world: int, init: dict[str, int], *methods: str
) -> None:
    wanted = train_whole(partial(make, name), batch_of(2, 19)) if "" in sentences else None
    for results in run_ranks(world, in_layout, name, methods, init=init):
        for sentence, result in zip(sentences, results, strict=True):
            if sentence:
                assert isinstance(result, str) and re.search(sentence, result), result
            else:
                assert not isinstance(result, str), result
                assert_same_run(result, wanted)


def losses(name: str) -> Any:
    model = bmtrain.BMTrainModelWrapper(make(name))
    try:
        loss = model(**bmtrain.shard_sequence(batch_of(2, 19))).loss
    except NotImplementedError as error:
        return str(error)
    return bmtrain.distributed.all_reduce(loss.detach(), "avg").item()


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_loss_inside_the_model_is_the_mean_over_all_tokens(name: str) -> None:
    """Masked models read labels as they are, and divide by the tokens of their rank."""
    batch = batch_of(2, 19)
    wanted = make(name)(**batch).loss.item()
    for found in run_ranks(2, losses, name, init={"sp_size": 2}):
        if name == "bert":
            assert "'loss': not the sum of the losses of 'shift_labels'" in found
        else:
            assert abs(found - wanted) < 1e-6
