"""Inspection of a model during training: parameters, gradients and intermediate tensors."""

from __future__ import annotations

from .format import format_summary
from .model import inspect_model
from .tensor import InspectTensor, InspectTensorManager, inspect_tensor, record_tensor

__all__ = [
    "InspectTensor",
    "InspectTensorManager",
    "format_summary",
    "inspect_model",
    "inspect_tensor",
    "record_tensor",
]
