"""The planner: what it is told, what it says, and what it says of the published table."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bmtrain.__main__ import main
from bmtrain._engine.drives import make_queue, measure_both
from bmtrain._tools.gpt import GPT
from bmtrain.errors import DoesNotFitError
from bmtrain.plan import (
    MACHINES,
    TrainingPolicy,
    choose_policy,
    describe_config,
    describe_module,
    estimate,
    gpt2,
    remedies,
)
from bmtrain.plan.estimates import Plan
from bmtrain.plan.estimator import _Run
from bmtrain.plan.machine import GIB, Machine
from bmtrain.plan.model import FlatBuffer, ModelDescription, muon_flops
from bmtrain.plan.network import Network, Wire
from bmtrain.plan.policy import DISK
from bmtrain.plan.published import FITTED, PUBLISHED, compare
from bmtrain.plan.report import format_plan
from bmtrain.plan.scale import CURVES
from bmtrain.plan.scale import _table as table_of_scales

ROOT = Path(__file__).resolve().parents[2]
SMALL = gpt2(6, 256, 4, vocab_size=1000, seq_len=128, dtype=torch.float32, tied=False)
EIGHT = MACHINES["a100-80gb"]


def test_published_table_within_ten_percent_and_fits_told_right() -> None:
    cells = compare(FITTED)
    errors = [abs(cell.error) for cell in cells if cell.error is not None]
    assert len(errors) == sum(value is not None for row in PUBLISHED.values() for value in row) == 11
    assert sum(errors) / len(errors) < 0.08
    assert max(errors) < 0.25
    assert sum(cell.agrees_on_fit for cell in cells) >= 26


def test_a_module_and_its_numbers_are_described_alike() -> None:
    with torch.device("meta"):
        model = GPT(6, 256, 4, 1000, 128)
    described = describe_module(model, torch.zeros(3, 129, dtype=torch.long))
    assert_alike(described, SMALL)
    assert described.blocks[0].input_bytes == SMALL.blocks[0].input_bytes
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("failing", [None, 1])
def test_a_described_module_is_freed(failing: int | None) -> None:
    def fail(*args: Any) -> None:
        raise ArithmeticError

    model = GPT(3, 16, 4, 100, 16)
    if failing is not None:
        model.layers[failing].register_forward_hook(fail)
    with contextlib.suppress(ArithmeticError):
        describe_module(model, torch.zeros(1, 17, dtype=torch.long))
    left = weakref.ref(model.layers[0])
    del model
    gc.collect()
    assert left() is None


def assert_alike(described: ModelDescription, by_numbers: ModelDescription) -> None:
    assert described.num_parameters == by_numbers.num_parameters
    assert described.head_flops == by_numbers.head_flops
    assert described.outside == by_numbers.outside
    ours, wanted = described.blocks[0], by_numbers.blocks[0]
    for name in ("flops", "last_matmul_flops", "attention_bytes", "gradient_bytes", "kept_bytes"):
        assert getattr(ours, name) == getattr(wanted, name), name
    assert ours.flops_between_kept == wanted.flops_between_kept
    assert ours.activation_bytes == pytest.approx(wanted.activation_bytes, rel=0.07)


@pytest.mark.parametrize(("tp", "sp"), [(2, 1), (1, 4), (2, 4)])
def test_a_rank_s_share_of_a_block(tp: int, sp: int) -> None:
    model = gpt2(6, 256, 4, vocab_size=1000, seq_len=128, dtype=torch.float32)
    whole, own = model.blocks[0], model.sliced(tp, 1, sp).blocks[0]
    for name in ("flops", "last_matmul_flops", "flops_between_kept", "gradient_bytes", "kept_bytes"):
        assert getattr(own, name) == getattr(whole, name) / (tp * sp), name
    assert own.attention_bytes == tuple(nbytes / (tp * sp) for nbytes in whole.attention_bytes)
    assert own.input_bytes == whole.input_bytes / sp
    assert own.muon_flops == whole.muon_flops / tp
    assert own.tp_exchange_bytes == 2 * whole.input_bytes / sp


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_and_its_configuration_are_described_alike(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=tied, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    described = describe_module(model, torch.zeros(2, 64, dtype=torch.long, device="meta"))
    by_numbers = describe_config(config, seq_len=64, dtype=torch.float32)
    assert_alike(described, by_numbers)
    assert described.blocks[0].muon_flops == by_numbers.blocks[0].muon_flops


def test_a_hugging_face_configuration_has_the_model_s_parameters() -> None:
    transformers = pytest.importorskip("transformers")
    configs = [
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=8,
            num_key_value_heads=2, vocab_size=1000,
        ),
        transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=1000, n_positions=128),
    ]  # fmt: skip
    for config in configs:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert describe_config(config, seq_len=64).num_parameters == model.num_parameters()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
        {"model_type": "qwen3_moe", "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 48},
        {
            "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 48, "num_key_value_heads": 4,
        },
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_a_configuration_of_a_mixture_is_built_by_transformers(config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    published = {"auto_map": {"AutoConfig": "own.Config"}, "quantization_config": {"quant_method": "fp8"}}
    described = describe_config({**config, **sizes, "vocab_size": 100, **published}, seq_len=16)
    built = transformers.AutoConfig.for_model(**config, **sizes, vocab_size=100)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    assert described.num_parameters == model.num_parameters()
    assert {buffer.element_size for block in described.blocks for buffer in block.buffers} <= {2, 4}
    assert described.seq_len == 16
    assert [number for number, _ in described.blocks[-1].mixtures] == [8]
    assert estimate(described, EIGHT, TrainingPolicy(ep_size=4)).traffic["all_to_all of experts"][1] > 0


def test_a_configuration_of_a_mixture_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "mixtral", "hidden_size": 8, "num_attention_heads": 1, "num_local_experts": 8}
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers, or describe it by a module"):
        describe_config(config, seq_len=4)


def test_what_cannot_be_described_is_told() -> None:
    with pytest.raises(ValueError, match="blocks: expected"):
        describe_module(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="type that transformers knows, or --module, got 'own'"):
        describe_config(
            {"model_type": "own", "num_experts": 8, "hidden_size": 8, "num_attention_heads": 1}, seq_len=4
        )
    with pytest.raises(ValueError, match="hidden_size or n_embd"):
        describe_config({"model_type": "llama"})
    with pytest.raises(ValueError, match="offload: expected 0 to 1"):
        TrainingPolicy(offload=2)
    with pytest.raises(ValueError, match="level: expected 0, 1, 2 or 3"):
        TrainingPolicy(level=4)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_bool_is_the_whole_share_or_none(is_offloaded: bool) -> None:
    policy = TrainingPolicy(offload=is_offloaded)
    assert repr(policy) == repr(TrainingPolicy(offload=float(is_offloaded)))


def test_each_way_of_summing_gradients_is_counted() -> None:
    machine = MACHINES["a100-80gb"].with_devices(32)
    plans = {
        policy.reduce: estimate(SMALL, machine, policy)
        for policy in (
            TrainingPolicy(),
            TrainingPolicy(reduce="direct"),
            TrainingPolicy(reduce="hosts"),
            TrainingPolicy(reduce="ring"),
        )
    }
    assert plans[None].traffic == plans["hosts"].traffic
    messages, nbytes = plans["direct"].traffic["all_to_all"]
    of_others = plans["direct"].traffic["reduce_scatter"]  # parameters outside of blocks
    assert plans["ring"].traffic["reduce_scatter"] == (of_others[0] + messages, of_others[1] + nbytes)
    slices = nbytes // 31  # one of each block
    assert plans["hosts"].traffic["all_to_all"] == (2 * messages, (7 * 4 + 3) * slices)
    network = Network(machine, 32)
    entering = {"direct": 8 * 24, "hosts": 8 * 3}  # partitions that a node receives
    slow = dataclasses.replace(machine, network_bandwidth=1e9)
    seconds = dataclasses.replace(network, machine=slow).seconds(1e9, ring=False)
    assert seconds == pytest.approx(entering["direct"], rel=0.1)
    assert dataclasses.replace(network, machine=slow).seconds_by_hosts(1e9) == pytest.approx(
        entering["hosts"], rel=0.1
    )
    one_node = machine.with_devices(8)
    by_hosts, direct = (
        estimate(SMALL, one_node, TrainingPolicy(reduce="hosts")),
        estimate(SMALL, one_node, TrainingPolicy(reduce="direct")),
    )
    assert by_hosts.traffic == direct.traffic


def test_sums_over_replicas_have_rings_and_what_arrives() -> None:
    machine = dataclasses.replace(EIGHT.with_devices(4), shares_memory=True)
    block = sum(numel * 4 for buffer in SMALL.blocks[0].buffers for numel in buffer.numels)
    inside = dataclasses.replace(SMALL, outside=())
    plain = estimate(inside, machine, TrainingPolicy(level=0)).memory.wire
    assert plain == pytest.approx((1 + 3 / 4) * block, rel=0.01)
    shared = estimate(inside, machine, TrainingPolicy(zero_size=2)).memory.wire
    in_place = estimate(inside, dataclasses.replace(machine, shares_memory=True).with_devices(2)).memory.wire
    assert shared - in_place == pytest.approx((1 + 1 / 2) * block / 2, rel=0.01)
    assert estimate(SMALL, EIGHT.with_devices(4), TrainingPolicy(level=0)).memory.wire == 0
    # Of the largest table, all parts of a gather, and three slices sent and three received.
    table = 1000 * 256 * 4
    with_tables = estimate(SMALL, machine, TrainingPolicy(zero_size=2)).memory.wire
    assert with_tables - shared == pytest.approx(table + 6 * table / 4, rel=0.01)


@pytest.mark.parametrize(("numel", "mib"), [(1 << 20, 4 + 2 + 2), (1 << 21, 4 + 4 + 6)])
def test_shared_gradients_on_other_numbers_of_ranks_count_each(numel: int, mib: int) -> None:
    """Buffers on 4 ranks and on 2, of equal parts and of equal sums of parts, beside gathered parameters."""
    machine = dataclasses.replace(EIGHT.with_devices(4), shares_memory=True)
    buffers = FlatBuffer((1 << 20,), 4), FlatBuffer((numel,), 4, experts=(numel,))
    block = dataclasses.replace(SMALL.blocks[0], mixtures=((2, 1),))
    blocks = tuple(dataclasses.replace(block, buffers=(buffer,)) for buffer in buffers)
    model = dataclasses.replace(SMALL, blocks=blocks, outside=())
    plan = estimate(model, machine, TrainingPolicy(ep_size=2))
    assert plan.memory.wire == mib << 20


def test_collectives_of_two_communicators_share_the_wire() -> None:
    wire = Wire()
    first = wire.start("gather", "a", 1.0)
    second = wire.start("gather", "b", 1.0)
    other = wire.start("reduce", "c", 0.5)
    wire.wait(other)
    assert wire.now == pytest.approx(1.0)  # half of the wire each
    wire.wait(first)
    assert wire.now == pytest.approx(1.5)
    wire.advance(0.25)
    assert second.end is None
    assert wire.wait(second) == pytest.approx(0.75)
    assert wire.busy == pytest.approx(wire.now)


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (lambda n: n.seconds(80, ring=True), 7 * 80 / 10 + 2 * 16 + 6 * 8),
        (lambda n: n.seconds(80, ring=False), 4 * 4 * 80 / 20 + 4 / 8 * 16 + 3 / 8 * 8),
        (lambda n: n.part(4).seconds(80, ring=True), 3 * 80 / 100 * 10 + 3 * 8),
        (lambda n: n.all_reduce_seconds(640), 2 * (7 * 80 / 10 + 2 * 16 + 6 * 8)),
        (lambda n: n.all_reduce_seconds(640, ring=False), 2 * (4 * 4 * 80 / 20 + 4 / 8 * 16 + 3 / 8 * 8)),
        (lambda n: n.seconds_by_hosts(80), 3 * 160 / 10 + 3 / 8 * 8 + 4 * 80 / 20 + 1 / 8 * 16),
        (lambda n: n.gather_in_place_seconds(80), 2 * 80 / 5 + 8),
        (lambda n: n.reduce_in_place_seconds(80), 9 * 80 / 5 + 8),
        (
            lambda n: dataclasses.replace(n, stride=2, size=4).seconds(80, ring=False),
            2 * 2 * 2 * 80 / 20 + 2 / 8 * 16 + 1 / 8 * 8,
        ),
        (lambda n: n.part(1).seconds(80, ring=True), 0),
    ],
)
def test_time_of_a_collective(call: Any, seconds: float) -> None:
    machine = dataclasses.replace(
        EIGHT.sized(num_nodes=2, devices_per_node=4),
        link_bandwidth=10.0,
        network_bandwidth=20.0,
        memory_bandwidth=5.0,
        link_latency=8.0,
        network_latency=16.0,
    )
    assert call(Network(machine, 8)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "options", [{"offload": 0.25}, {"offload": 1.0, "optimizer": "muon"}, {"parameters": "host"}]
)
def test_time_of_an_update_on_the_host(options: dict[str, Any]) -> None:
    """Gradients, masters and moments of fp32 parameters, each read once and written once; Muon has one moment."""
    policy = TrainingPolicy(**options)
    machine = EIGHT.with_devices(2)
    plan = estimate(dataclasses.replace(SMALL, outside=()), machine, policy)
    numel = sum(block.buffers[0].partition(2) for block in SMALL.blocks)
    share = 1.0 if policy.parameters == "host" else policy.offload
    touched = (2 * (4 + (4 if policy.optimizer == "muon" else 8)) + 4) * numel
    assert plan.time.host == pytest.approx(2 * share * touched / machine.host_bandwidth, rel=0.02)
    passing = policy.offload * 4 + (2 if policy.optimizer == "muon" else 0)
    waited = plan.result.waiting_for_bus
    assert plan.time.pcie - waited == pytest.approx(2 * passing * numel / machine.pcie_bandwidth, rel=0.02)
    if policy.optimizer == "adam":
        on_device = (1 - share) * touched / machine.memory_bandwidth
        assert plan.time.optimizer == pytest.approx(on_device, rel=0.02, abs=1e-6)


def test_direct_slices_cross_the_network_once_for_each_device_of_a_node() -> None:
    machine = dataclasses.replace(MACHINES["v100-32gb"], link_latency=0, network_latency=0)
    network = Network(machine, 32)
    ring, direct = network.seconds(1e9, ring=True), network.seconds(1e9, ring=False)
    assert ring == pytest.approx(31e9 / machine.network_bandwidth)
    assert direct == pytest.approx(8 * 24e9 / machine.network_bandwidth)
    here = Network(machine, 8)
    assert here.seconds(1e9, ring=True) == pytest.approx(here.seconds(1e9, ring=False))


def test_the_next_gather_starts_before_the_block_computes() -> None:
    result = estimate(SMALL, EIGHT).result
    starts = {e.block: e.begin for e in reversed(result.events) if e.kind == "gather"}
    computes: dict[str, float] = {}
    for event in result.events:
        computes.setdefault(event.block, event.begin) if event.kind == "compute" else None
    for number in range(1, 5):
        assert starts[f"block {number + 1}"] <= computes[f"block {number}"]


def test_a_slow_wire_is_exposed_and_a_fast_one_is_not() -> None:
    fast = estimate(SMALL, EIGHT, TrainingPolicy(micro_batch=64))
    slow = estimate(SMALL, dataclasses.replace(EIGHT, link_bandwidth=1e9), TrainingPolicy(micro_batch=64))
    assert fast.time.exposed_wire < 0.2 * fast.time.compute
    assert slow.time.bottleneck == "wire"
    assert slow.time.compute == pytest.approx(fast.time.compute)
    assert slow.traffic == fast.traffic


@pytest.mark.parametrize(
    ("change", "purpose"),
    [
        ({"recompute": True}, "activations"),
        ({"level": 3}, "gathered"),
        ({"offload": 1.0}, "optimizer"),
        ({"micro_batch": 4}, "activations"),
    ],
)
def test_each_knob_saves_the_memory_it_is_for(change: dict, purpose: str) -> None:
    base = TrainingPolicy(micro_batch=8, level=2, recompute=False)
    before = estimate(SMALL, EIGHT, base).memory
    after = estimate(SMALL, EIGHT, dataclasses.replace(base, **change)).memory
    assert getattr(after, purpose) < getattr(before, purpose)
    assert after.total < before.total


def test_remedies_fit_and_a_policy_is_chosen() -> None:
    model = gpt2(40, 5120, 40)
    plan = estimate(model, EIGHT.sized(devices_per_node=2), TrainingPolicy(micro_batch=1))
    assert not plan.fits
    found = remedies(plan)
    assert any("offload" in change for change in found)
    assert any("devices instead of 2" in change for change in found)
    chosen = choose_policy(model, plan.machine)
    assert chosen is not None
    assert chosen.fits
    assert chosen.policy.offload > 0
    assert choose_policy(gpt2(400, 5120, 40), MACHINES["v100-32gb"].with_devices(1)) is None


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (40, {"level": 1, "recompute": "off", "micro_batch": 4}),
        (24, {"level": 2, "recompute": "selective", "micro_batch": 16, "zero_size": 2}),
        (40, {"level": 2, "recompute": "selective", "zero_size": 2}),
        (24, {"level": 0, "recompute": "off", "optimizer": "muon"}),
    ],
)
def test_a_remedy_is_the_least_change_of_its_kind(layers: int, options: dict[str, Any]) -> None:
    model, machine = gpt2(layers, 5120, 40), MACHINES["a100-80gb"].with_devices(4)
    policy = TrainingPolicy(**options)
    shares = (0.25, 0.5, 0.75, 1) if policy.optimizer == "adam" else (1,)
    batches = [policy.micro_batch >> n for n in range(1, policy.micro_batch.bit_length())]
    tried: list[tuple[str, dict[str, Any]]] = [
        *((f"--level {level}", {"level": level}) for level in range(policy.level + 1, 4)),
        *((("no --zero-size", {"zero_size": None}),) if policy.zero_size else ()),
        *((("--selective", {"recompute": "selective"}),) if options["recompute"] == "off" else ()),
        ("the default", {"recompute": "whole"}),
        *((f"--micro-batch {batch}", {"micro_batch": batch}) for batch in batches),
        *((f"--offload {share:g}", {"offload": share}) for share in shares),
        *((f"--host-share {share:g}", {"parameters": "host", "host_share": share})
          for share in (0.25, 0.5, 0.75, 1) if policy.level >= 2),
    ]  # fmt: skip
    least: dict[str, str] = {}
    for option, change in tried:
        if estimate(model, machine, dataclasses.replace(policy, **change)).fits:
            least.setdefault(option.split()[0], option)
    nodes = [2**n for n in range(1, 8)]
    fitting = [n for n in nodes if estimate(model, machine.sized(num_nodes=n), policy).fits]
    expected = [*least.values(), *(f"--nodes {n}" for n in fitting[:1])]
    plan = estimate(model, machine, policy)
    assert not plan.fits
    assert not remedies(estimate(SMALL, machine, policy))
    assert [change.rpartition("(")[2].removesuffix(")") for change in remedies(plan)] == expected
    assert len(expected) > 1


#: Options of `TrainingPolicy` that choose_policy() tries.
TRIED = {"level": range(4), "recompute": ("off", "selective", "whole"), "offload": (0, 0.25, 0.5, 0.75, 1)}


@pytest.mark.parametrize(
    "machine", [EIGHT.with_devices(2), MACHINES["v100-32gb"].with_devices(16)], ids=lambda m: m.name
)
def test_the_chosen_policy_is_the_fastest_of_all(machine: Machine) -> None:
    """A share of the optimizer on the host may make room for larger batches, which are faster."""
    model = gpt2(40, 5120, 40)
    speeds = []
    for values in itertools.product(*TRIED.values()):
        options: dict[str, Any] = dict(zip(TRIED, values, strict=True))
        for doubling in range(10):
            plan = estimate(model, machine, TrainingPolicy(**options, micro_batch=2**doubling))
            if not plan.fits:
                break
            speeds.append(plan.samples_per_second)
    chosen = choose_policy(model, machine)
    assert chosen is not None
    assert chosen.fits
    assert chosen.samples_per_second == pytest.approx(max(speeds), rel=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {"zero_size": 2},
        {"gather_dtype": torch.bfloat16},
        {"disk": DISK},
        {"survive": True},
        {"parameters": "host"},
        {"level": 1, "accumulate": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_choices_stay(options: dict[str, Any]) -> None:
    """Where something fits, and where nothing does."""
    machine = MACHINES["v100-32gb"].with_devices(4)
    for layers, dim in ((2, 256), (4, 32768)):
        model = gpt2(layers, dim, 64, dtype=torch.float32)
        chosen = choose_policy(model, machine, TrainingPolicy(**options))
        assert chosen is not None or dim > 256
        for name in options if chosen is not None else ():
            assert name == "level" or getattr(chosen.policy, name) == options[name]


def test_blocks_on_the_host_are_copied_for_each_pass() -> None:
    layers, ranks = 5, 4
    model, machine = gpt2(layers, 512, 8, vocab_size=1000), EIGHT.with_devices(ranks)
    policy = TrainingPolicy(parameters="host")
    plan, without = estimate(model, machine, policy), estimate(model, machine)
    (buffer,) = model.blocks[0].buffers
    shard = 2 * buffer.partition(ranks)
    # The last block stays for its backward.
    assert plan.traffic["to the device"] == (2 * layers - 1, (2 * layers - 1) * shard)
    assert plan.traffic["to the host"] == (layers, layers * shard)
    assert {name: plan.traffic[name] for name in without.traffic} == without.traffic
    # Gradients and parameters, each rounded up to a power of two by torch, and 12 bytes of state for 2 of a parameter.
    rounded = 2 ** math.ceil(math.log2(shard))
    own_state = plan.memory.host / ranks - 2 * layers * rounded
    assert 6 * layers * shard <= own_state <= 6 * layers * shard + 64 * 1024
    assert without.memory.weights - plan.memory.weights == layers * shard
    assert without.memory.gradients - plan.memory.gradients == layers * shard
    two = estimate(model, machine, TrainingPolicy(parameters="host", host_share=0.4))
    assert two.traffic["to the host"] == (2, 2 * shard)
    assert two.memory.host == pytest.approx(0.4 * plan.memory.host, rel=0.002)
    assert without.memory.weights - two.memory.weights == 2 * shard
    assert plan.time.step > without.time.step + layers * shard / machine.pcie_bandwidth / layers
    slow = estimate(model, dataclasses.replace(machine, host_bandwidth=machine.host_bandwidth / 3), policy)
    assert slow.time.host == pytest.approx(3 * plan.time.host)
    assert "(--set host_bandwidth=3e+11)" in format_plan(plan)


def test_blocks_are_on_the_host_where_nothing_else_fits() -> None:
    model, machine = gpt2(6, 16384, 128), MACHINES["a100-80gb"].with_devices(1)
    plan = estimate(model, machine, TrainingPolicy(offload=1.0))
    assert not plan.fits
    for less in (
        plan,
        estimate(model, machine, TrainingPolicy(offload=1.0, parameters="host", host_share=0.25)),
    ):
        assert not less.fits
        assert "50% of the blocks on the host (--host-share 0.5)" in remedies(less)
    on_drives = estimate(model, machine, TrainingPolicy(disk=("optimizer", "parameters"), disk_share=0.1))
    assert "blocks on the host (--parameters host)" in remedies(on_drives)
    chosen = choose_policy(model, machine)
    assert chosen is not None
    assert chosen.fits
    assert chosen.policy.parameters == "host"
    less = dataclasses.replace(chosen.policy, host_share=chosen.policy.host_share - 0.25, micro_batch=1)
    assert not estimate(model, machine, less).fits


def test_time_and_memory_with_blocks_on_the_host_are_near_those_of_a_card() -> None:
    """Against docs/results/gpu.json: forward and backward, with gradients that were dropped, and no optimizer."""
    measured = json.loads((ROOT / "docs/results/gpu.json").read_text())["run"]["tiers"]
    with torch.device("meta"):
        model = GPT(24, 2048, 16, 50304, 1024).bfloat16()
    described = describe_module(model, torch.zeros(8, 1025, dtype=torch.long, device="meta"))
    bus = measured["to host GB/s"] * 1e9
    machine = dataclasses.replace(MACHINES["h100-80gb"].with_devices(1), pcie_bandwidth=bus)
    for place in ("device", "host"):
        plan = estimate(described, machine, TrainingPolicy(micro_batch=8, parameters=place))  # type: ignore[arg-type]
        assert 1e3 * plan.result.seconds == pytest.approx(measured[f"{place}, ms"], rel=0.12)
        peak = plan.memory.total - plan.memory.gradients - plan.memory.optimizer
        assert peak / GIB == pytest.approx(measured[f"{place}, peak GiB"], rel=0.08)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"level": 1}, "level: expected 2 or 3 with parameters='host', got 1"),
        ({"survive": True}, "survive: expected CPU ranks, got devices with parameters='host'"),
        (
            {"disk": ("optimizer",), "parameters": "device"},
            "disk: expected parameters='host', or 'parameters' on",
        ),
        ({"parameters": "disk"}, "parameters: expected 'device' or 'host', got 'disk'"),
        (
            {"host_share": 0.5, "parameters": "device"},
            "host_share: expected 1 without parameters='host', got",
        ),
        (
            {"host_share": 0.5, "disk": ("optimizer",)},
            "host_share: expected 1 with",
        ),
        ({"host_share": 0}, "host_share: expected more than 0, and at most 1, got 0"),
    ],
)
def test_refused_combinations_with_blocks_on_the_host(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        estimate(SMALL, EIGHT, TrainingPolicy(**{"parameters": "host", **options}))


@pytest.mark.parametrize("options", [{}, {"survive": True}, {"disk": ("optimizer",)}])
def test_blocks_of_cpu_ranks_are_on_the_host(options: dict[str, Any]) -> None:
    machine = dataclasses.replace(EIGHT, shares_memory=True)
    plans = [estimate(SMALL, machine, TrainingPolicy(parameters=p, **options)) for p in ("device", "host")]
    assert plans[0].memory == plans[1].memory
    assert (plans[0].time, plans[0].traffic) == (plans[1].time, plans[1].traffic)


def test_tensor_parallel_ranks_and_stages_divide_the_model() -> None:
    model = gpt2(8, 1024, 16)
    whole = estimate(model, EIGHT, TrainingPolicy(micro_batch=2))
    sliced = estimate(model, EIGHT, TrainingPolicy(micro_batch=2, tp_size=2))
    staged = estimate(model, EIGHT, TrainingPolicy(micro_batch=2, pipe_size=2))
    assert 2 * sliced.time.compute == pytest.approx(whole.time.compute, rel=0.4)
    assert 2 * sliced.samples_per_step == whole.samples_per_step == staged.samples_per_step
    assert staged.time.idle == pytest.approx(staged.result.seconds / 2)
    assert staged.traffic["all_to_all"][0] == 4
    layers = 4 * model.blocks[0].num_parameters * 2  # of a stage, full, in bf16
    assert staged.memory.gathered > layers
    assert staged.memory.gradients > layers
    uneven = dataclasses.replace(model, blocks=(*(8 * SMALL.blocks[:1]), *model.blocks))
    largest = [block.num_parameters for block in uneven.sliced(1, 2).blocks]
    assert largest == [
        block.num_parameters for block in model.blocks
    ]  # of the stage that has most parameters
    with pytest.raises(ValueError, match="multiple of tp_size"):
        estimate(model, EIGHT, TrainingPolicy(tp_size=3))
    with pytest.raises(ValueError, match="tp_size: expected a divisor of"):
        model.sliced(3, 1)


@pytest.mark.parametrize(
    ("schedule", "idle", "held"),
    [("gpipe", 3 / 8, 8), ("1f1b", 3 / 8, 4), ("interleaved", 3 / 16, 11 / 2), ("zb1p", 3 / 24, 4)],
)
def test_a_schedule_decides_idle_time_and_kept_activations(schedule: str, idle: float, held: float) -> None:
    """With 4 stages and 8 micro-batches: idle over busy time, and micro-batches that the first stage holds."""
    model = gpt2(8, 1024, 16)
    options: dict[str, Any] = {"micro_batch": 64, "pipe_size": 4, "recompute": False}
    plan = estimate(model, EIGHT, TrainingPolicy(**options, schedule=schedule, num_micro_batches=8))
    assert plan.time.idle == pytest.approx(plan.result.seconds * idle)
    kept = 2 * model.blocks[0].activation_bytes * 64 * 4 / 8  # of a stage's two blocks, for a micro-batch
    logits = model.head_bytes * 64 * 4 / 8
    assert plan.memory.activations == pytest.approx(held * kept + logits, rel=1e-3)


def test_sequence_ranks_divide_work_and_activations() -> None:
    model = gpt2(8, 1024, 16)
    whole, divided = (estimate(model, EIGHT, TrainingPolicy(micro_batch=8, sp_size=sp)) for sp in (1, 4))
    assert 4 * divided.time.compute == pytest.approx(whole.time.compute)
    assert 4 * divided.memory.activations == pytest.approx(whole.memory.activations, rel=0.1)
    assert divided.memory.optimizer == whole.memory.optimizer
    assert 4 * divided.samples_per_step == whole.samples_per_step
    # Forward, second forward and backward; of 4 tensors of a quarter of the tokens, three quarters are sent.
    sent = 3 * 8 * (4 * 8 * model.blocks[0].input_bytes / 4) * 3 // 4
    assert divided.traffic["all_to_all of sequences"] == (2 * 3 * 8, sent)
    with pytest.raises(ValueError, match=r"tp_size \* pipe_size \* sp_size = 2 \* 1 \* 3"):
        estimate(model, EIGHT, TrainingPolicy(tp_size=2, sp_size=3))


def test_expert_ranks_divide_experts_and_exchange_their_rows() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    described = []
    for k in (1, 2):
        config = transformers.MixtralConfig(
            **sizes, num_key_value_heads=2, vocab_size=100, num_local_experts=8, num_experts_per_tok=k
        )
        with torch.device("meta"):
            model = transformers.MixtralModel(config)
        described.append(describe_module(model, torch.zeros(2, 16, dtype=torch.long, device="meta")))
        assert described[-1].num_parameters == model.num_parameters()
    one, two = described
    of_experts = 3 * 64 * 96
    assert two.blocks[0].flops - one.blocks[0].flops == 2 * 16 * of_experts
    assert two.blocks[0].mixtures == ((8, 2 * 16 * 64 * 4),)
    whole, divided = (estimate(two, EIGHT, TrainingPolicy(micro_batch=4, ep_size=ep)) for ep in (1, 4))
    assert divided.memory.weights == pytest.approx(
        whole.memory.weights, rel=0.02
    )  # shards of as many elements
    bytes_of_experts = 8 * of_experts * 4
    assert whole.memory.gathered - divided.memory.gathered > 0.7 * bytes_of_experts
    assert divided.time.compute == pytest.approx(whole.time.compute)
    # There and back in forward, second forward and backward, three quarters of the rows.
    assert divided.traffic["all_to_all of experts"] == (2 * 3 * 3, 2 * 3 * 3 * (4 * 2 * 16 * 64 * 4) * 3 // 4)
    assert divided.traffic["all_gather of experts"] == (2 * 3, 2 * 3 * 3 * 8 * 8)
    assert "experts over 4" in format_plan(divided)
    for model, ep, message in (
        (two, 3, "expected a divisor of 8 devices of a stage, got 3"),
        (SMALL, 2, "expected a divisor of the number of experts, got 2 for no experts in a block"),
        (one, 16, "got 16 for 8 experts"),
    ):
        with pytest.raises(ValueError, match=message):
            estimate(model, EIGHT.with_devices(16 if ep == 16 else 8), TrainingPolicy(ep_size=ep))


def test_a_run_that_cannot_fit_is_refused_before_it_starts() -> None:
    plan = estimate(gpt2(40, 5120, 40), EIGHT.with_devices(1))
    with pytest.raises(DoesNotFitError, match=r"needs \d+\.\d GiB of a device, which has 78\.5 GiB"):
        plan.require_fit(1)
    with pytest.raises(ValueError, match="made for 1 devices, but there are 2 ranks"):
        plan.require_fit(2)
    estimate(SMALL, EIGHT).require_fit(8)


def test_command_prints_a_plan_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    sizes = ["--layers", "40", "--dim", "5120", "--heads", "40"]
    assert main(["plan", *sizes, "--nodes", "4", "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert max(len(line) for line in output.splitlines()) <= 80
    content = json.loads(file.read_text())
    assert content["fits"] is True
    assert content["memory"]["total"] < content["memory"]["usable"]
    assert main(["plan", *sizes, "--devices", "1", "--nodes", "1"]) == 1
    assert "fits: NO" in capsys.readouterr().out


CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 100,
    "n_positions": 64,
}


def write_model(folder: Path) -> Path:
    """A file whose `build` makes a GPT of fp32."""
    script = folder / "model.py"
    script.write_text(
        "import torch\nfrom bmtrain._tools.gpt import GPT\n"
        "def build():\n    with torch.device('meta'):\n"
        "        return GPT(4, 64, 4, 100, 16), torch.zeros(2, 17, dtype=torch.long)\n"
    )
    return script


def test_command_knows_parameters_that_travel_in_16_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"{write_model(tmp_path)}:build"
    sent = []
    for options in ([], ["--gather-dtype", "bfloat16"]):
        file = tmp_path / "plan.json"
        assert main(["plan", "--module", module, "--json", str(file), *options]) == 0
        assert ("gathered in bfloat16" in capsys.readouterr().out) == bool(options)
        content = json.loads(file.read_text())
        sent.append({name: nbytes for name, (_, nbytes) in content["traffic"].items()})
    assert sent[1]["all_to_all"] == sent[0]["all_to_all"]
    assert 0.5 < sent[1]["all_gather"] / sent[0]["all_gather"] < 0.6  # parameters outside blocks as they are
    assert content["policy"]["gather_dtype"] == "bfloat16"
    assert main(["plan", "--module", module, "--gather-dtype", "float16", "--choose"]) == 0
    assert main(["plan", "--module", module, "--gather-dtype", "float16", "--level", "0"]) == 2
    assert "--gather-dtype: at level 0 nothing is gathered" in capsys.readouterr().err


@pytest.mark.parametrize("by_config", [False, True])
def test_command_counts_the_dtypes_that_it_prints(
    by_config: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of models by numbers: parameters of fp32 that blocks compute with, or send, in 16 bits."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    model = ["--config", "config.json"] if by_config else ["--layers", "2", "--dim", "64"]

    def plan(*options: str) -> tuple[dict[str, float], dict[str, list[int]]]:
        assert main(["plan", *model, *options, "--json", "plan.json"]) == 0
        content = json.loads(Path("plan.json").read_text())
        return content["memory"], content["traffic"]

    half, _ = plan()
    single, whole = plan("--dtype", "float32")
    computed, narrow = plan("--compute-dtype", "bfloat16")
    gathered, sent = plan("--gather-dtype", "bfloat16")
    assert single["weights"] == computed["weights"] == gathered["weights"]
    assert single["weights"] == pytest.approx(2 * half["weights"], rel=0.02)  # but for what aligns the shards
    assert computed["activations"] < single["activations"] == gathered["activations"]
    assert narrow["all_to_all"][1] == whole["all_to_all"][1] / 2
    assert sent["all_to_all"][1] == whole["all_to_all"][1]  # gradients travel as they are computed
    assert narrow["all_gather"][1] == sent["all_gather"][1] < whole["all_gather"][1]
    capsys.readouterr()
    assert main(["plan", *model, "--dtype", "bfloat16", "--compute-dtype", "bfloat16"]) == 2
    assert "--compute-dtype: acts on blocks of fp32 parameters" in capsys.readouterr().err


def test_command_describes_a_file_s_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--module", f"{write_model(tmp_path)}:build"]) == 0
    told = capsys.readouterr().out
    assert re.match(r"GPT: [\d,.]+( million)? parameters, \d+ tokens? per sample", told)


def test_inputs_of_a_module_are_the_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Features are no tokens, and the batch of the inputs is planned unless another one is given."""
    (tmp_path / "net.py").write_text(
        "import torch\ndef build():\n    with torch.device('meta'):\n"
        "        layers = torch.nn.ModuleList([torch.nn.Linear(512, 512)])\n"
        "        class Net(torch.nn.Module):\n"
        "            def __init__(self): super().__init__(); self.layers = layers\n"
        "            def forward(self, x): return self.layers[0](x)\n"
        "        return Net(), torch.empty(8, 512)\n"
    )
    place = f"{tmp_path / 'net.py'}:build"
    assert main(["plan", "--module", place]) == 0
    told = capsys.readouterr().out
    assert "Net: 262,656 parameters, 1 token per sample" in told
    assert "micro-batch 8" in told
    assert main(["plan", "--module", place, "--micro-batch", "2"]) == 0
    assert "micro-batch 2" in capsys.readouterr().out


def test_the_report_says_whose_figures_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--layers", "40", "--dim", "5120", "--heads", "40", "--devices", "2"]) == 1
    told = capsys.readouterr().out
    assert "samples/s on all 2 devices" in told
    assert told.count("sent per rank in a step") == 1
    assert re.search(r"bottleneck: [\w ()]+, \d+% of the step", told)
    assert "(--offload " in told and "(--nodes " in told


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ([], torch.bfloat16),  # of a GPT-2 by numbers
        (["--dtype", "float16"], torch.float16),
        (["--config", "config.json", "--compute-dtype", "float16"], torch.float16),
    ],
)
def test_this_machine_is_measured_in_what_blocks_compute_in(
    options: list[str], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(num_ranks: int, dtype: torch.dtype, directories: list[str]) -> Machine:
        asked.append((num_ranks, dtype, directories))
        return MACHINES["a100-80gb"]

    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr("bmtrain.plan.command.measure_machine", measure)
    model = [] if "--config" in options else ["--layers", "2", "--dim", "64"]
    main(["plan", "--here", "--devices", "4", *model, *options])
    main(["plan", "--here", *model, *options, "--disk", "--tier-directory", "a"])
    assert asked == [(4, dtype, []), (2, dtype, ["a"])]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--machine", "abacus"], "--machine: expected one of"),
        (["--set", "speed=3"], "--set: expected one of"),
        (["--set", "efficiency=3"], "--set efficiency=3: efficiency: expected"),
        (["--config", "/nowhere/config.json"], "/nowhere/config.json"),
        (["--module", "/nowhere/model.py:build"], "of a file that exists"),
        (["--config", "list.json"], "--config: expected a configuration"),
        (["--config", "bytes.json"], "--config: bytes.json is not JSON"),
        (["--module", "numbers.py:LAYERS"], "numbers.py has no function 'LAYERS'"),
        (
            ["--dim", "100", "--heads", "3"],
            "--heads: expected a divisor of --dim = 100, got 3; or give --dim-head",
        ),
        (["--host-share", "0.5", "--disk"], "--host-share: expected 1 with disk, got 0.5"),
        (["--disk-share", "0.5"], "--disk-share: expected 1 without disk, got 0.5"),
        (["--parameters", "host", "--level", "1"], "--level: expected 2 or 3 with --parameters host, got 1"),
        (["--vertical", "--pipe", "2"], "--vertical: expected --pipe 1, got 2"),
        (["--scale", "nowhere", "--layers", "4"], "models of its own (1.3B to 1T); leave out --layers"),
        (["--scale", "64"], "--scale: expected a folder that exists, for the pictures, got '64'"),
        (["--scale", ".", "--json", "a"], "leave out --json"),
        (["--set", "network_bandwidth=25GB"], "expected FIELD=NUMBER, such as network_bandwidth=25e9"),
        (["--set", "memory=80"], "memory: expected more bytes than the 1610612736 of reserved, got 80"),
        (["--published", "--dim", "64", "--machine", "h100-80gb"], "leave out --dim, --machine"),
        (
            ["--config", "config.json", "--layers", "4"],
            "--config: has the numbers of the model; leave out --layers",
        ),
        (["--module", "a.py:f", "--seq", "64"], "leave out --seq"),
        (["--here", "--nodes", "4"], "--here: measures this machine; leave out --nodes"),
        (["--here", "--disk", "--tier-directory", "/nowhere"], "a folder that exists, got '/nowhere'"),
        (["--fit"], "without --published; leave out --fit"),
        (["--num-micro-batches", "4"], "without --pipe; leave out --num-micro-batches"),
        (["--schedule", "1f1b"], "without --pipe; leave out --schedule"),
        (["--tp", "3"], "multiple of --tp * --pipe * --sp = 3 * 1 * 1"),
    ],
)
def test_a_wrong_option_gets_one_sentence(
    options: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, content in (("list.json", b"[]"), ("bytes.json", b"\xd6"), ("numbers.py", b"LAYERS = 3")):
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert problem in told.err
    assert len(told.err.splitlines()) == 1


def test_the_products_of_muon_are_those_that_torch_counts() -> None:
    shapes = ((8, 8), (24, 8), (8, 32))
    matrices = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon(matrices).step()
    assert sum(muon_flops(*shape) for shape in shapes) == counter.get_total_flops()


@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_ranks_divide_the_products_of_muon(offload: float) -> None:
    policy = TrainingPolicy(offload=offload)
    model, machine = gpt2(24, 2048, 16, vocab_size=1000, seq_len=64), MACHINES["h100-80gb"]
    adam, muon = (
        estimate(model, machine.with_devices(8), dataclasses.replace(policy, optimizer=name))
        for name in ("adam", "muon")
    )
    flops = sum(block.muon_flops for block in model.blocks) / 8
    at_full_speed = flops / (machine.flops * machine.efficiency)
    assert muon.time.optimizer >= at_full_speed > 0
    assert muon.time.step > muon.time.optimizer
    assert "Muon for matrices in blocks of 1.21 billion parameters, AdamW for others" in format_plan(muon)
    kept = [plan.memory.host or plan.result.memory.at_peak["optimizer"] for plan in (muon, adam)]
    assert kept[0] < kept[1]
    assert muon.memory.optimizer > muon.result.memory.at_peak["optimizer"]  # the matrices of a step
    with pytest.raises(ValueError, match="offload: expected 0 or 1 with 'muon', got 0.5"):
        TrainingPolicy(optimizer="muon", offload=0.5)


def test_blocks_on_drives_take_what_the_drives_allow() -> None:
    machine = dataclasses.replace(EIGHT.with_devices(2), disk_bandwidth=1e9, shares_memory=True)
    plain = estimate(SMALL, machine, TrainingPolicy())
    plan = estimate(SMALL, machine, TrainingPolicy(disk=("parameters", "gradients", "optimizer")))
    block = plan.disk.stored / 6 / 4  # fp32: parameters, gradients, two moments
    assert plan.disk.read == pytest.approx((2 * 6 - 1 + 4 * 6) * block)
    assert plan.disk.written == pytest.approx((6 + 3 * 6) * block)
    moved = 2 * (plan.disk.read + plan.disk.written)  # by two ranks
    assert plan.time.disk == pytest.approx(moved / 1e9)
    assert plan.time.step == pytest.approx(moved / 1e9, rel=0.1)
    assert plan.time.bottleneck == "drives"
    assert plan.written_per_day == pytest.approx(2 * plan.disk.written * 86_400 / plan.time.step)
    saved = plain.memory.weights - plan.memory.weights
    assert saved == pytest.approx(block * 6, rel=0.01)
    fast = dataclasses.replace(machine, disk_bandwidth=1e15)
    in_update = estimate(SMALL, fast, TrainingPolicy(disk=("optimizer",)))
    assert in_update.time.exposed_disk == 0
    assert in_update.disk.read == in_update.disk.written == pytest.approx(2 * 6 * block)


@pytest.mark.parametrize("recompute", ["off", "selective", "whole"])
@pytest.mark.parametrize(("level", "disk", "reads"), [(3, ("optimizer",), 0), (2, DISK, 6), (3, DISK, 6)])
def test_an_update_from_drives_goes_on_in_the_first_forward(
    recompute: Any, level: int, disk: tuple[str, ...], reads: int
) -> None:
    fast = dict.fromkeys(("memory_bandwidth", "link_bandwidth"), 1e18)
    machine = dataclasses.replace(EIGHT.with_devices(1), shares_memory=True, disk_bandwidth=1e10, **fast)
    plan = estimate(SMALL, machine, TrainingPolicy(recompute=recompute, level=level, disk=disk))
    forward = SMALL.flops / (machine.flops * machine.efficiency)
    assert plan.result.forward == pytest.approx(forward, rel=1e-4)
    block = sum(SMALL.blocks[0].buffers[0].numels) * 4
    in_update = (plan.disk.read_in_update + plan.disk.written_in_update + reads * block) / 1e10
    in_passes = plan.time.disk - in_update
    rest = max(in_passes - (plan.result.seconds - forward), 0)
    assert plan.time.exposed_disk == pytest.approx(in_update - forward + rest, rel=1e-3)


@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("options", [{"optimizer": "muon"}, {"compute_dtype": torch.bfloat16}])
def test_processors_keep_the_kernels_of_products_in_16_bits(
    options: dict[str, Any], shares_memory: bool
) -> None:
    machine = dataclasses.replace(EIGHT, shares_memory=shares_memory)
    wide, narrow = (estimate(SMALL, machine, TrainingPolicy(**some)).memory for some in ({}, options))
    assert wide.kernels == 0
    assert (narrow.kernels > 0) is shares_memory
    difference = (narrow.scratch - narrow.kernels) / narrow.tensors - wide.scratch / wide.tensors
    assert difference == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(("layers", "dim"), [(1, 256), (4, 256), (4, 384), (8, 512), (24, 2048)])
def test_scratch_of_small_models_is_a_share_of_their_tensors(layers: int, dim: int) -> None:
    memory = estimate(gpt2(layers, dim, 4, vocab_size=256, seq_len=256), EIGHT, TrainingPolicy()).memory
    beyond_share = memory.scratch - 0.015 * memory.tensors
    assert 0 < beyond_share <= 4 * 2**20
    assert beyond_share / memory.tensors <= 0.035 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_ranks_read_in_place(dtype: torch.dtype) -> None:
    """A block's sums are made in fp32 before their time; products are computed where gradients are reduced."""
    model = gpt2(4, 512, 8, vocab_size=1000, seq_len=128, dtype=dtype)
    (buffer,) = model.blocks[0].buffers
    apart, in_place = (
        estimate(model, dataclasses.replace(EIGHT.with_devices(2), shares_memory=shares))
        for shares in (False, True)
    )
    states = in_place.result.memory.at_peak["gradients"]
    assert in_place.memory.gradients - states == 4 * buffer.partition(2)
    product = max(buffer.numels) * dtype.itemsize
    assert apart.memory.activations - in_place.memory.activations == product


class Gated(nn.Module):
    """Two inner maps that are multiplied, each four times as wide as the input."""

    def __init__(self, takes: bool) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
        self.takes = takes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = (
            self.up(x) * nn.functional.silu(self.gate(x)) if self.takes else nn.functional.gelu(self.up(x))
        )
        return x + self.down(inner)


@pytest.mark.parametrize(("block", "widths"), [(Gated(True), 64), (Gated(False), 32), (nn.Linear(8, 8), 8)])
def test_gradients_take_the_places_of_saved_tensors(block: nn.Module, widths: int) -> None:
    described = describe_module(nn.Sequential(block), torch.zeros(2, 5, 8), blocks=[block])
    assert described.blocks[0].gradient_bytes == 5 * widths * 4


@pytest.mark.parametrize("forward", [lambda x: x.relu_(), lambda x: x.add_(1)])
def test_a_block_may_change_its_input_in_place(forward: Any) -> None:
    class InPlace(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(forward(x))

    class Copied(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(forward(x.clone()))

    one, other = (
        describe_module(nn.Sequential(nn.Linear(8, 8), block), torch.zeros(2, 5, 8), blocks=[block])
        for block in (InPlace(8, 8), Copied(8, 8))
    )
    assert one.blocks[0].gradient_bytes == other.blocks[0].gradient_bytes
    assert one.blocks[0].flops == other.blocks[0].flops


def test_a_block_that_is_not_called_has_no_work() -> None:
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers[0](x)

    called, left = describe_module(Model(), torch.zeros(2, 5, 8)).blocks
    assert (called.flops > 0, left.flops, left.gradient_bytes, left.num_parameters) == (True, 0, 0, 36)


def test_arguments_of_blocks_do_not_keep_the_graph() -> None:
    nodes, kept = [], []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            nodes.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    class Last(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(nodes[0]() is not None)
            return super().forward(x)

    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](Same.apply(self[0](x))).detach()

    model = Model(nn.Linear(8, 8), Last(8, 8))
    describe_module(model, torch.zeros(2, 5, 8), blocks=[model[1]])
    assert kept == [True, False]


def test_a_block_of_an_embedding_has_its_gradient_beside_the_buffer() -> None:
    layers = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    described = describe_module(layers, torch.zeros(1, 2, dtype=torch.long), blocks=list(layers))
    assert [block.has_products_only for block in described.blocks] == [False, True]


def test_matrices_of_muon_from_drives_are_in_memory_block_by_block() -> None:
    held = []
    for disk, share in (((), 1.0), (("optimizer",), 1.0), (("optimizer",), 0.5)):
        policy = TrainingPolicy(optimizer="muon", disk=disk, disk_share=share)
        held.append(_Run(SMALL, EIGHT, policy).matrix_bytes())
    blocks = [(whole - held[1]) / (held[0] - held[1]) * 5 + 1 for whole in held]  # of the six
    assert blocks == pytest.approx([6, 1, 3])


def test_vertical_order_reads_parameters_twice_a_step() -> None:
    machine = dataclasses.replace(EIGHT.with_devices(2), disk_bandwidth=1e9)
    policy = TrainingPolicy(disk=("parameters", "gradients", "optimizer"), micro_batch=2)
    one, four = (
        estimate(SMALL, machine, dataclasses.replace(policy, accumulate=n, vertical=True)) for n in (1, 4)
    )
    usual = estimate(SMALL, machine, dataclasses.replace(policy, accumulate=4))
    assert four.disk == one.disk == estimate(SMALL, machine, policy).disk
    assert (one.traffic, usual.disk.written_in_passes) == (four.traffic, 4 * one.disk.written_in_passes)
    assert one.time == estimate(SMALL, machine, policy).time
    assert four.time.compute == pytest.approx(usual.time.compute)
    assert four.time.compute == pytest.approx(4 * one.time.compute)
    assert four.samples_per_second > usual.samples_per_second
    inputs = sum(block.input_bytes for block in SMALL.blocks) * 2 * 3  # of the other micro-batches
    assert four.memory.activations - usual.memory.activations >= inputs
    assert four.memory.gradients == usual.memory.gradients
    assert "4 micro-batches per step, in vertical order" in format_plan(four)
    with pytest.raises(ValueError, match="vertical: expected pipe_size=1, got 2"):
        TrainingPolicy(vertical=True, pipe_size=2)


def test_what_drives_cannot_hold_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        ({"disk": ("state",)}, "disk: expected some of parameters, gradients, optimizer, got state"),
        ({"disk_share": 0.5}, "disk_share: expected 1 without disk, got 0.5"),
        (
            {"disk": ("optimizer",), "disk_share": 0.0},
            "disk_share: expected more than 0, and at most 1, got 0.0",
        ),
        ({"disk": ("optimizer",), "state_dtype": torch.int8}, "disk: expected float32 or bfloat16 moments"),
        ({"disk": ("optimizer",), "survive": True}, "without survive"),
        ({"disk": ("parameters",)}, "expected optimizer='disk' as well"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            TrainingPolicy(**options)
    for option in ("--disk", "--here"):
        assert main(["plan", "--layers", "2", option, "--tier-directory", "."]) == 2
        assert "--tier-directory: expected --disk and --here" in capsys.readouterr().err


def test_sizes_in_the_readme() -> None:
    machine = dataclasses.replace(EIGHT.with_devices(1), memory=24 * GIB, reserved=0.0)

    def plan(num_layers: int, **policy: Any) -> Plan:
        model = gpt2(num_layers, 2048, 16, vocab_size=256, seq_len=256, dtype=torch.float32)
        return estimate(model, machine, TrainingPolicy(**policy))

    largest, with_drive = plan(30), plan(1000, disk=DISK)
    assert largest.fits and not plan(31).fits
    assert with_drive.memory.total < 4 * GIB
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    said = r"24 GiB on one rank train (\S+) billion .* with it (\S+) billion .* and (\S+) GiB of"
    (sizes,) = re.findall(said, readme)
    sizes_now = (
        f"{largest.model.num_parameters / 1e9:.1f}",
        f"{with_drive.model.num_parameters / 1e9:.0f}",
        f"{math.ceil(with_drive.disk.stored / GIB)}",
    )
    assert sizes == sizes_now


SCALE = {
    page: re.findall(r"^\| [\d.]+[BT]\b.*$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    for page in ("docs/explanation/scale.md", "docs/zh/explanation/scale.md")
}


@pytest.mark.parametrize("row", SCALE["docs/explanation/scale.md"])
def test_the_page_of_simulated_scales_has_this_plan(row: str) -> None:
    label, devices, batch, *_ = (cell.strip() for cell in row.strip("|").split("|"))
    (curve,) = (curve for curve in CURVES if curve.label == label)
    machine = MACHINES["h100-80gb"].with_devices(int(devices.replace(",", "")))
    policy = dataclasses.replace(curve.policy, micro_batch=int(batch))
    ring, direct = (
        estimate(curve.model, machine, dataclasses.replace(policy, reduce=way)) for way in ("ring", "direct")
    )
    assert table_of_scales({label: [(ring, direct)]})[-1] == row
    assert all(row in rows for rows in SCALE.values())


def test_a_drive_is_measured_by_reads_and_writes_of_equal_size(tmp_path: Path) -> None:
    queue = make_queue()
    assert measure_both(queue, str(tmp_path), 16 << 20) > 0
    # Written, read, and both.
    assert (queue.bytes_written, queue.bytes_read) == (24 << 20, 24 << 20)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        (["--disk"], "parameters and gradients and optimizer on drives"),
        (["--disk", "optimizer", "gradients"], "optimizer and gradients on drives"),
        (["--disk", "optimizer", "--choose"], "optimizer on drives"),
        (["--disk", "--choose"], "parameters and gradients and optimizer on drives"),
    ],
)
def test_drives_are_in_the_report(
    options: list[str], stored: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = dataclasses.replace(EIGHT.with_devices(2), shares_memory=True)
    monkeypatch.setattr("bmtrain.plan.command.measure_machine", lambda *_: measured)
    assert main(["plan", "--here", "--layers", "2", "--set", "disk_bandwidth=7e9", *options]) == 0
    text = capsys.readouterr().out
    rows = (
        "on drives per rank; a node's drives move 7 GB/s",
        "read in a step",
        "written in a day",
        "disk buffers",
        "drives  ",
    )
    for words in (stored, *rows):
        assert words in text
    assert all(len(line) <= 80 for line in text.splitlines()[2:])
