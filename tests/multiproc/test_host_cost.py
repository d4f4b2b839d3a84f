"""What a step asks of the host: how many calls of Python a block makes, whatever it is made of."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from harness import run_ranks

import bmtrain as bmt

LAYERS = 3
NOT_IN_A_STEP = {"item", "tolist", "numpy", "dumps", "dump", "loads", "load"}


class Sum(bmt.DistributedModule):
    """A block of many parameters, of which the forward reads the first."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(
            [bmt.DistributedParameter(torch.ones(4)) for _ in range(num_parameters)]
        )
        self.first = self.all[0]

    def forward(self, x):
        return x * self.first


def calls_of_a_step(num_parameters: int, options: dict[str, Any]) -> tuple[int, list[str]]:
    """How many calls of Python a steady forward and backward makes for each block, and which of those of C are bad."""
    layers = bmt.TransformerBlockList([bmt.Block(Sum(num_parameters), **options) for _ in range(LAYERS)])
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, function: Any) -> None:
        calls[event if event == "call" else getattr(function, "__name__", "")] += 1

    for step in range(4):
        calls.clear()
        if step == 3:
            sys.setprofile(note)
        try:
            layers(torch.ones(4)).sum().backward()
        finally:
            sys.setprofile(None)
    return calls["call"] // LAYERS, sorted(NOT_IN_A_STEP & set(calls))


def test_a_block_costs_the_host_the_same_whatever_it_holds():
    for options, most in (({"use_checkpoint": False}, 165), ({}, 320), ({"zero_level": 2}, 320)):
        few, many = run_ranks(2, calls_of_a_step, 2, options), run_ranks(2, calls_of_a_step, 40, options)
        assert few == many
        for calls, bad in few:
            assert calls <= most, options
            assert bad == []
