"""The bytes of host tensors, without unneeded copies."""

from __future__ import annotations

import ctypes

import torch


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose bytes are the values: contiguous, on the host, a conjugate or a negative carried out."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor as :func:`in_host_memory` gives it, to read and to write; valid as long as the tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"expected a contiguous tensor on the host, got one on {tensor.device}")
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() or 1)).cast("B")
