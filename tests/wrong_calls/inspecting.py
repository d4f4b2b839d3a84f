"""Looking into a model."""

from __future__ import annotations

from typing import Any

import torch

import bmtrain as bmt

from .kinds import Calls

__all__ = ["inspection"]


def inspection() -> Calls:
    """`bmtrain.inspect`."""
    model = bmt.Block(bmt.nn.Linear(2, 2))
    line = {"name": "w", "shape": (2, 3), "max": 1.0, "min": 0.0, "std": 0.5, "mean": 0.2}

    def record(x: Any, name: Any) -> None:
        with bmt.inspect.inspect_tensor():
            bmt.inspect.record_tensor(x, name)

    return {
        "inspect_model": (
            bmt.inspect.inspect_model,
            {"model": ("module", model), "param_name": ("text", "*"), "prefix": ("text", "")},
        ),
        "record_tensor": (record, {"x": ("a tensor", torch.ones(2)), "name": ("text", "hidden")}),
        "InspectTensor.get_tensor": (
            lambda index: bmt.inspect.InspectTensor().get_tensor("hidden", index=index),
            {"index": ("optional index", 0)},
        ),
        "format_summary": (
            bmt.inspect.format_summary,
            {"summary": ("lines", [{**line, "grad_std": None, "grad_mean": 0.0}])},
        ),
    }
