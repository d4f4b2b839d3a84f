"""Operators of the C++ core (``torch.ops.bmtrain.*``): typed wrappers and fake kernels; and steps of optimizers.

They take CPU tensors; in a build with CUDA, `has_kernels` and `has_steps` show which also take GPU tensors.
"""

from __future__ import annotations

from functools import cache

import torch

from .._C import step_of_groups
from . import fakes  # noqa: F401 - registers them
from .cross_entropy import CrossEntropySums, cross_entropy_gradient_, cross_entropy_sums
from .tensors import abs_max, abs_power_sum, ordered_sum_, scale_, squared_sum

__all__ = [
    "CrossEntropySums",
    "abs_max",
    "abs_power_sum",
    "cross_entropy_gradient_",
    "cross_entropy_sums",
    "has_kernels",
    "has_steps",
    "ordered_sum_",
    "scale_",
    "squared_sum",
    "step_of_groups",
]


@cache
def has_kernels(op: str, device: str) -> bool:
    """Whether the core was built with kernels of an operator for a type of device.

    Example:
        >>> has_kernels("squared_sum", "cpu"), has_kernels("squared_sum", "meta")
        (True, False)
    """
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
    return key is not None and bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"bmtrain::{op}", key))


def has_steps(device: str) -> bool:
    """Whether the core was built with kernels of `step_of_groups` for a type of device: with all kernels, or none."""
    return has_kernels("scale_", device)
