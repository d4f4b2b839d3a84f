"""Replacement of torch's ``scaled_dot_product_attention`` by the attention over divided sequences.

[Note: Attention that torch computes]
A model calls attention by many names: from its own module, imported under another name, inside
``nn.MultiheadAttention``. All lead to one operator of torch's dispatcher, of which this module registers an
implementation once a sequence is divided: without `shard_sequence`, nothing is registered. It takes over where
sequences are divided, and leaves all else to torch's own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._sequences import current_sequences

__all__ = ["install", "original", "replaced_by", "replacement"]

_OPERATOR = "scaled_dot_product_attention"


class _State(threading.local):
    is_original = False
    replacement: Callable[..., Tensor] | None = None


_state = _State()


@contextlib.contextmanager
def original() -> Iterator[None]:
    """Context manager in which torch's own attention is used, in this thread."""
    before, _state.is_original = _state.is_original, True
    try:
        yield
    finally:
        _state.is_original = before


@contextlib.contextmanager
def replaced_by(function: Callable[..., Tensor]) -> Iterator[None]:
    """Context manager in which ``function(q, k, v)`` takes the place of attention, in this thread."""
    before, _state.replacement = _state.replacement, function
    try:
        yield
    finally:
        _state.replacement = before


def replacement() -> Callable[..., Tensor] | None:
    """The function of :func:`replaced_by`."""
    return _state.replacement


@functools.cache
def install(attention: Callable[..., Tensor]) -> Any:
    """Registers ``attention`` over divided sequences; returns the library, which keeps it registered."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA"):
        library.impl(_OPERATOR, functools.partial(_dispatch, attention), key)
    return library


def _dispatch(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    sequences = None if _state.is_original else current_sequences()
    one_rank = sequences is not None and sequences.group.size == 1
    if sequences is None or (one_rank and (attn_mask is not None or dropout_p)):
        operator = torch.ops.aten.scaled_dot_product_attention.default
        plain: Tensor = operator._op_dk(
            torch._C.DispatchKey.CompositeImplicitAutograd,
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return plain
    if attn_mask is not None:
        raise NotImplementedError(
            f"scaled_dot_product_attention: attn_mask of shape {tuple(attn_mask.shape)}: expected None over divided "
            "sequences, whose tokens have other numbers than a mask of this rank's: use is_causal=True, and give "
            "'documents' or 'attention_mask' to shard_sequence()"
        )
    return attention(query, key, value, causal=is_causal, scale=scale, dropout=dropout_p)
