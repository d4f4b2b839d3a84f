"""The bytes of host tensors, without copies."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["bytes_of"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, to read and to write; valid as long as the tensor is."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous tensor on the host, got one on {tensor.device}")
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() or 1)).cast("B")
