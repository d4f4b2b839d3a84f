"""Steps of one GPT on a GPU under several policies: time and peak of memory, beside the predictions of ``plan``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._tools.gpt import GPT
from ..global_var import context
from ..plan import MACHINES, Machine, TrainingPolicy, describe_module, estimate
from ._training import clear_card, sharded, stepping
from .plan import OPTIMIZERS

_GIB = 1 << 30
_POLICIES: dict[str, dict[str, Any]] = {  # as TrainingPolicy takes them
    "recompute": {},
    "selective": {"recompute": "selective"},
    "keep": {"recompute": False},
    "fp32 parameters": {"compute_dtype": torch.bfloat16},
    "bf16 state": {"state_dtype": torch.bfloat16},
    "int8 state": {"state_dtype": torch.int8},
    "muon": {"optimizer": "muon"},
}
_Result = dict[str, Any]


def measure_policies(
    arguments: argparse.Namespace, vocab: int, seconds_of: Callable[[Callable[[], Any]], float]
) -> _Result:
    """A row for each policy: milliseconds and peak, and both as predicted for a preset that the card's name has."""
    device = context("bench gpu").device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    machines = [machine for key, machine in MACHINES.items() if key.split("-")[0].upper() in name]
    batch = torch.randint(vocab, (arguments.batch, arguments.seq + 1), device=device)
    found: _Result = {}
    for label, options in _POLICIES.items():
        policy = TrainingPolicy(micro_batch=arguments.batch, **options)
        before = clear_card()
        model, step = _training(arguments, policy, vocab)
        row = {"ms": 1e3 * seconds_of(lambda step=step: step(batch))}  # type: ignore[misc]
        row["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / _GIB
        if machines:
            row |= _predicted(model, batch, machines[0], policy)
        found[label] = row
        del model, step
    return found


def _training(
    arguments: argparse.Namespace, policy: TrainingPolicy, vocab: int
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    with torch.device(context("bench gpu").device):
        gpt: Any = GPT(arguments.layers, arguments.dim, arguments.heads, vocab, arguments.seq)
    if policy.compute_dtype is None:
        gpt.bfloat16()
    model = sharded(gpt, policy.block_policy())
    splits = {"splits": {"*.qkv": 3}} if policy.optimizer == "muon" else {}
    optimizer = OPTIMIZERS[policy.optimizer, policy.offload](
        model.named_parameters(), state_dtype=policy.state_dtype, **splits
    )
    return model, stepping(model, optimizer)


def _predicted(model: nn.Module, batch: Tensor, machine: Machine, policy: TrainingPolicy) -> _Result:
    plan = estimate(describe_module(model, batch), machine.with_devices(1), policy)
    return {"plan ms": 1e3 * plan.time.step, "plan GiB": plan.memory.total / _GIB}


def print_policies(found: _Result) -> None:
    """A table of the result of `measure_policies`."""
    from .._tools.table import print_table

    columns = ("ms", "plan ms", "peak GiB", "plan GiB")
    print_table(
        ["policy", *columns],
        [[name, *(f"{row[c]:.2f}" if c in row else "-" for c in columns)] for name, row in found.items()],
    )
