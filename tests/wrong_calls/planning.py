"""What is called before a run: plans, and conversions of files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from bmtrain import plan
from bmtrain.convert import convert

from .kinds import Calls

__all__ = ["conversions", "plans"]

_FOLDER = tempfile.TemporaryDirectory(prefix="bmtrain-wrong-conversions-")


def plans() -> Calls:
    """`bmtrain.plan`."""
    model, machine, policy = plan.gpt2(2, 8, 2, seq_len=4), plan.MACHINES["a100-80gb"], plan.TrainingPolicy()
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    module = torch.nn.Sequential(*layers)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
    count = ("positive count", 2)
    decoder = dict.fromkeys(
        (
            *("num_layers", "dim_model", "num_heads", "num_kv_heads", "dim_head", "dim_ff"),
            *("vocab_size", "seq_len"),
        ),
        count,
    )
    described: dict[str, tuple[str, Any]] = {
        "model": ("a description", model),
        "machine": ("a description", machine),
    }
    numbers = {
        "memory": 8e9,
        "flops": 1e12,
        "memory_bandwidth": 1e9,
        "link_bandwidth": 1e9,
        "efficiency": 0.5,
    }
    rest = {"network_bandwidth": 1e9, "pcie_bandwidth": 1e9, "host_memory": 1e9, "host_bandwidth": 1e9}

    def made(*values: Any) -> plan.Machine:
        return plan.Machine("own", **dict(zip(machine_arguments, values, strict=True)), **rest)

    machine_arguments: dict[str, tuple[str, Any]] = {
        "num_nodes": count,
        "devices_per_node": count,
        **{name: ("positive", value) for name, value in numbers.items()},
    }
    choices: dict[str, tuple[str, Any]] = {
        **dict.fromkeys(("micro_batch", "accumulate", "tp_size", "sp_size", "ep_size"), count),
        "level": ("level", 3),
        "offload": ("share", 0.5),
        "disk_share": ("positive", 1.0),
        "optimizer": ("mode", "adam"),
        "parameters": ("mode", "device"),
        "schedule": ("mode", "gpipe"),
    }
    return {
        "gpt2": (
            lambda num_layers, dim_model, num_heads, length: plan.gpt2(
                num_layers, dim_model, num_heads, seq_len=length
            ),
            {"num_layers": count, "dim_model": count, "num_heads": count, "seq_len": count},
        ),
        "transformer": (
            lambda *values: plan.transformer(
                **dict(zip(decoder, values, strict=True)),
                name="own",
                gated=False,
                num_positions=4,
                bias=True,
                tied=True,
                element_size=2,
                scores=False,
            ),
            decoder,
        ),
        "describe_module": (
            lambda module, inputs: plan.describe_module(module, inputs, blocks=list(layers)),
            {"module": ("module", module), "inputs": ("a tensor", torch.ones(2, 4))},
        ),
        "describe_config": (
            lambda config, seq_len, dtype: plan.describe_config(config, seq_len=seq_len, dtype=dtype),
            {
                "config": ("state", sizes),
                "seq_len": ("optional positive", 4),
                "dtype": ("floating dtype", torch.bfloat16),
            },
        ),
        "estimate": (plan.estimate, {**described, "policy": ("optional policy", policy)}),
        "choose_policy": (plan.choose_policy, {**described, "base": ("optional policy", policy)}),
        "remedies": (plan.remedies, {"plan": ("a description", plan.estimate(model, machine, policy))}),
        "model_state_bytes": (
            lambda model, num_ranks, dtype, optimizer: plan.model_state_bytes(
                model, num_ranks, state_dtype=dtype, optimizer=optimizer
            ),
            {
                "model": ("a description", model),
                "num_ranks": count,
                "state_dtype": ("a dtype", torch.float32),
                "optimizer": ("mode", "adam"),
            },
        ),
        "Machine": (made, machine_arguments),
        "Machine.with_devices": (machine.with_devices, {"num_devices": ("positive count", 8)}),
        "TrainingPolicy": (
            lambda *values: plan.TrainingPolicy(
                **dict(zip(choices, values, strict=True)), disk=("optimizer",)
            ),
            choices,
        ),
    }


def conversions() -> Calls:
    """`bmtrain.convert`."""
    source, target = (Path(_FOLDER.name, name) for name in ("source.pt", "target.pt"))
    torch.save({"weight": torch.ones(2, 2)}, source)
    return {
        "convert": (
            lambda source, target, to, layout, size, report: convert(
                source, target, to, layout=layout, max_shard_size=size, overwrite=True, report=report
            ),
            {
                "source": ("path", source),
                "target": ("path", target),
                "to": ("optional choice", "pt"),
                "layout": ("optional choice", None),
                "max_shard_size": ("optional positive", 1000),
                "report": ("callable", lambda done, total: None),
            },
        )
    }
