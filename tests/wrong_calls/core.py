"""Operators and classes of the compiled core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bmtrain import _C, _ops

from .kinds import Calls

__all__ = ["classes", "operators", "updates"]


def operators() -> Calls:
    """Sums and reductions."""
    x = torch.ones(4)
    values = {"tensors": ("values", [x])}
    return {
        "ordered_sum_": (
            lambda out, sources, factor: _ops.ordered_sum_(out, sources, factor=factor),
            {"out": ("memory", x.clone()), "sources": ("sources", [x]), "factor": ("a float", 0.5)},
        ),
        "scale_": (
            _ops.scale_,
            {"tensors": ("values", [x.clone()]), "factor": ("one factor", torch.tensor(2.0))},
        ),
        "squared_sum": (_ops.squared_sum, values),
        "abs_max": (_ops.abs_max, values),
        "abs_power_sum": (_ops.abs_power_sum, {**values, "p": ("power", 3.0)}),
    }


def _options(**numbers: float) -> dict[str, tuple[str, Any]]:
    return {name: ("a float", value) for name, value in numbers.items()}


def updates() -> Calls:
    """The optimizers' steps."""

    def arrays(*names: str) -> dict[str, tuple[str, Any]]:
        return {name: ("memories", [torch.ones(4)]) for name in names}

    def step_of(formula: str, lists: dict[str, Any], options: dict[str, Any]) -> Callable[..., None]:
        flags = dict.fromkeys(("decoupled", "maximize", "folded", "hold_steps", "nesterov"), 0)

        def step(*values: Any) -> None:
            operands, (sizes, *numbers) = values[: len(lists)], values[len(lists) :]
            group = {**flags, **dict(zip(options, numbers, strict=True))}
            _ops.step_of_groups(formula, operands, sizes, [group])

        return step

    rounded = {"rounded": ("memories", [torch.ones(4, dtype=torch.bfloat16)])}
    adam = {**arrays("weights"), **rounded, **arrays("grads", "exp_avgs", "exp_avg_sqs")}
    momenta = {**arrays("weights"), **rounded, **arrays("grads", "momenta")}
    rates = _options(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, scale=1.0)
    formulas: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "adam": ({**adam, "steps": ("steps", [1])}, {**rates, **_options(eps=1e-8)}),
        "sgd": (
            {**momenta, "fresh": ("flags", [0])},
            _options(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, scale=1.0),
        ),
        "lion": (momenta, rates),
    }
    steps: Calls = {
        f"step_of_groups {formula}": (
            step_of(formula, lists, options),
            {**lists, "sizes": ("group sizes", [1]), **options},
        )
        for formula, (lists, options) in formulas.items()
    }
    of_16_bits = {"grads": ("memories", [torch.ones(4, dtype=torch.bfloat16)])}
    return {**steps, "adam_move_": (torch.ops.bmtrain.adam_move_, {**adam, **of_16_bits})}


def classes() -> Calls:
    """Layouts, pools and watchdogs."""
    layout = _C.FlatLayout([3, 5], 4, 2)
    return {
        "FlatLayout": (
            _C.FlatLayout,
            {
                "numels": ("sizes", [3, 5]),
                "element_size": ("positive", 4),
                "num_ranks": ("positive", 2),
                "alignment_bytes": ("positive", 512),
            },
        ),
        "FlatLayout.offset": (layout.offset, {"index": ("index", 0)}),
        "FlatLayout.numel": (layout.numel, {"index": ("index", 0)}),
        "FlatLayout.local_part": (layout.local_part, {"index": ("index", 0), "rank": ("index", 0)}),
        "BufferPool": (lambda idle: _C.BufferPool(idle, False), {"idle_per_class": ("count", 2)}),
        "SingleCommunicator": (_C.SingleCommunicator, {"name": ("text", "one")}),
        "Watchdog": (_C.Watchdog, {"timeout_seconds": ("seconds", 1.0)}),
        "Watchdog.report": (
            _C.Watchdog(1.0).report,
            {"kind": ("text", "aborted"), "what": ("text", "a test")},
        ),
        "OffloadUpdate": (_C.OffloadUpdate, {"label": ("text", "block")}),
        "materialize": (
            lambda data: _C.materialize(torch.nn.Parameter(torch.ones(4, device="meta")), data),
            {"data": ("tensor data", torch.ones(4))},
        ),
        "force_cpu_isa": (_C.force_cpu_isa, {"level": ("isa", _C.cpu_isa())}),
    }
