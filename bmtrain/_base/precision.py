"""Computation in a dtype other than the parameters'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .tree import data_fields, replace_arguments


def as_autocast_has_it(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the dtype of a matrix product under the active autocast; without autocast, the tensor itself.

    For products in autograd functions of their own, whose backward runs without autocast.
    """
    kind = tensor.device.type
    if kind == "meta" or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def computing_in(dtype: torch.dtype, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with its floating-point arguments converted to ``dtype``. fp64 stays as it is.

    The conversion is a part of the forward, so gradients of the arguments have the arguments' own dtype. It reaches
    into tuples, lists, dicts and other mappings, and the fields of dataclasses, see [Note: Conversions in containers].
    The attributes of other objects, such as caches, stay as they are.
    """

    def converted(*args: Any, **kwargs: Any) -> Any:
        conversions = _Conversions(dtype)
        inner_args, inner_kwargs = replace_arguments(args, kwargs, conversions.convert, data_fields)
        try:
            return forward(*inner_args, **inner_kwargs)
        finally:
            conversions.undo(args, kwargs)

    return converted


class _Conversions:
    """The arguments that one call has converted.

    [Note: Conversions in containers]
    Mutable containers keep their identity, so that the caller sees changes that the forward makes to them. They hold
    converted tensors during the forward only: afterwards the caller's tensors are back, with values that the forward
    wrote in place (a key-value cache of fixed size). Items that the forward replaced stay replaced.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[
            int, torch.Tensor
        ] = {}  # by identity of the original: what is given twice is one object
        self._originals: dict[
            int, tuple[torch.Tensor, int]
        ] = {}  # by identity of the converted, with its version

    def convert(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the dtype of the computation."""
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) or tensor.dtype == self._dtype:
            return tensor
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = self._copy(tensor)
            self._originals[id(known)] = tensor, known._version
        return known

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not torch.is_inference_mode_enabled():
            return tensor.to(self._dtype)
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode have no version
            return tensor.to(self._dtype)

    def undo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Puts the caller's tensors back into the mutable containers among the arguments."""
        if self._known:
            replace_arguments(args, kwargs, self._original, data_fields)

    def _original(self, tensor: torch.Tensor) -> torch.Tensor:
        original, version = self._originals.get(id(tensor), (tensor, None))
        if version is not None and tensor._version != version:
            self._originals[id(tensor)] = original, tensor._version
            is_same = tensor == original.to(self._dtype)
            original.copy_(torch.where(is_same, original, tensor.to(original.dtype)))
        return original
