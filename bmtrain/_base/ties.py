"""Detection of tied tensors: the same elements of the same memory."""

from __future__ import annotations

from collections.abc import Hashable

import torch


def place_of(tensor: torch.Tensor) -> Hashable:
    """A key, equal for dense tensors with the same elements and strides (tied weights) while one of them lives."""
    storage = tensor.untyped_storage()._cdata
    layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return storage, layout, tensor.is_conj(), tensor.is_neg()
