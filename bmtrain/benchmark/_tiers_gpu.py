"""Forward and backward of a GPT with parameters and gradients on the host, against the time of device and bus."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from .._engine.policy import BlockPolicy
from .._tools.gpt import GPT
from ..global_var import context
from ._offload_bound import measure_rates
from ._training import clear_card, sharded

_PLACES = ("device", "host")
_GIB = 1 << 30
_TIMES_TO_DEVICE = 2  # a parameter is copied, for forward and for backward


def measure_tiers(
    arguments: argparse.Namespace, vocab: int, seconds_of: Callable[[Callable[[], Any]], float]
) -> dict[str, Any]:
    """Milliseconds and peak of each place; "of bound": the time of "host" over the longer one of device and bus."""
    device = context("bench gpu").device
    batch = torch.randint(vocab, (arguments.batch, arguments.seq + 1), device=device)
    found: dict[str, Any] = {}
    in_blocks = 0
    for place in _PLACES:
        before = clear_card()
        gpt = GPT(arguments.layers, arguments.dim, arguments.heads, vocab, arguments.seq).bfloat16()
        model = sharded(gpt, BlockPolicy(parameters=place))  # type: ignore[arg-type]
        in_blocks = sum(p.numel() for p in gpt.layers.parameters())

        def step(model: torch.nn.Module = model) -> None:
            model.zero_grad(set_to_none=True)
            model(batch).backward()

        found[f"{place}, ms"] = 1e3 * seconds_of(step)
        found[f"{place}, peak GiB"] = (torch.cuda.max_memory_allocated() - before) / _GIB
        del model, step, gpt
    rates = measure_rates(device, 1 << 26, 5)
    found["to device GB/s"], found["to host GB/s"] = rates.to_device / 1e9, rates.to_host / 1e9
    bus = 2e3 * in_blocks * max(_TIMES_TO_DEVICE / rates.to_device, 1 / rates.to_host)
    found["bus, ms"] = bus
    found["of bound"] = found["host, ms"] / max(bus, found["device, ms"])
    return found
