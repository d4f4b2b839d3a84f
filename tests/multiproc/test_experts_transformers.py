"""Mixtures of transformers with experts divided over ranks, against the plain model in one process.

``BMTRAIN_ALL_MIXTURES=1`` runs every architecture in the tests of further layouts, in place of one.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain
from bmtrain._shards.full_values import full_value
from bmtrain.plan import describe_module

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

PRELOAD = ("transformers.trainer_seq2seq", "transformers.models.llama.modeling_llama", "peft")
COMMON = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
#: Of each architecture: its configuration, and how many of its modules hold experts that are divided.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Mixtral": ({"num_local_experts": 4}, 2),
    "Qwen2Moe": ({"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}, 2),
    "Qwen3Moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}, 2),
    "Olmoe": ({"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}, 2),
    "GptOss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, 2),
    "DeepseekV3": (
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "num_key_value_heads": 2,
        },
        1,
    ),
    "GraniteMoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "Llama": ({}, 0),
}
#: Architectures of the tests of further layouts.
CHOSEN = list(FAMILIES) if os.environ.get("BMTRAIN_ALL_MIXTURES") == "1" else ["Mixtral"]


def make(family: str) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family][0]})
    torch.manual_seed(1)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def inputs(rank: int) -> torch.Tensor:
    return torch.randint(1, 50, (2, 8), generator=torch.Generator().manual_seed(rank))


def train(family: str, divided: int) -> None:
    plain = make(family)
    model = bmtrain.BMTrainModelWrapper(copy.deepcopy(plain))
    assert sum(p._ep_mode for p in model.parameters()) >= divided
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    ids = inputs(bmtrain.rank())
    everybody = torch.cat([inputs(rank) for rank in range(bmtrain.world_size())])
    manager = bmtrain.optim.OptimManager()
    manager.add_optimizer(optimizers[1])
    for _ in range(3):
        manager.zero_grad()
        optimizers[0].zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        manager.backward(loss)
        expected = plain(input_ids=everybody, labels=everybody).loss
        expected.backward()
        mean = bmtrain.distributed.all_reduce(loss.detach(), "avg")
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-6, atol=0)
        norm = manager.clip_grad_norm(optimizers[1].param_groups, 1.0)
        known = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(norm.float(), known, rtol=2e-6, atol=0)
        manager.step()
        optimizers[0].step()
    values = {name: full_value(param) for name, param in model.named_parameters()}
    for name, param in plain.named_parameters():
        torch.testing.assert_close(values[name], param.detach(), rtol=1e-6, atol=1e-6, msg=name)
    state = model.state_dict()
    plain.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_divided_experts_are_the_model(family: str) -> None:
    run_ranks(2, train, family, FAMILIES[family][1], init={"ep_size": 2}, timeout=200)


def train_virtual(family: str) -> dict[str, bytes]:
    model = bmtrain.BMTrainModelWrapper(make(family))
    optimizer = bmtrain.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmtrain.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for step in range(2):
        manager.zero_grad()
        for shard in bmtrain.virtual_shards(step):
            ids = inputs(10 * step + shard.index)
            manager.backward(model(input_ids=ids, labels=ids).loss)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
    return {name: full_value(param).numpy().tobytes() for name, param in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("family", CHOSEN)
def test_any_division_has_the_same_bits_with_virtual_shards(family: str) -> None:
    found = [
        run_ranks(world, train_virtual, family, init={"ep_size": world, "virtual_shards": 4}, timeout=200)
        for world in (1, 2)
    ]
    assert found[1] == found[0] * 2


def described() -> tuple[Any, Any]:
    plain, ep_size = make("Mixtral"), bmtrain.config["ep_size"]
    ids = torch.zeros(2, 8, dtype=torch.long)
    both = [
        describe_module(model, ids) for model in (plain, bmtrain.BMTrainModelWrapper(copy.deepcopy(plain)))
    ]
    assert both[0].num_parameters == both[1].num_parameters
    plain_share, own = (model.sliced(1, 1, 1, ep_size) for model in both)
    return plain_share.blocks, own.blocks


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_plan_describes_the_plain_model_and_the_divided_one_alike(ep_size: int) -> None:
    for both in run_ranks(2, described, init={"ep_size": ep_size}, timeout=200):
        for plain, divided in zip(*both, strict=True):
            for name in ("buffers", "flops", "mixtures", "muon_flops"):
                assert getattr(plain, name) == getattr(divided, name), name
            assert plain.activation_bytes == pytest.approx(divided.activation_bytes, rel=0.1)
