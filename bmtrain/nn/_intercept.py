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

from .._engine.dropout import KEYS, divided_by, plain, refuse_random
from ._sequences import Sequences, current_sequences

_OPERATOR = "scaled_dot_product_attention"


class _State(threading.local):
    is_original = False
    replacement: Callable[..., Tensor] | None = None
    tokens = 0  # with a replacement


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
def replaced_by(function: Callable[..., Tensor], tokens: int) -> Iterator[None]:
    """Context manager in which ``function(q, k, v)`` takes the place of attention, and dropout returns its input, for
    some tokens of one sequence, in this thread."""
    before, _state.replacement, _state.tokens = _state.replacement, function, tokens
    try:
        yield
    finally:
        _state.replacement = before


def replacement() -> Callable[..., Tensor] | None:
    """The function of :func:`replaced_by`."""
    return _state.replacement


@functools.cache
def install(attention: Callable[..., Tensor]) -> Any:
    """Registers ``attention`` and dropout over divided sequences; returns the library, which keeps it registered."""
    divided_by(lambda: _divided_tokens() is not None, _dropout)
    # Evaluation of `nn.TransformerEncoderLayer` would compute attention without the operator.
    torch.backends.mha.set_fastpath_enabled(False)
    library = torch.library.Library("aten", "IMPL")
    for key in KEYS:
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
    if dropout_p:
        refuse_random(_OPERATOR, query)
    sequences = None if _state.is_original else current_sequences()
    one_rank = sequences is not None and sequences.group.size == 1
    if sequences is None or (one_rank and (attn_mask is not None or dropout_p)):
        if sequences is not None:
            attn_mask, is_causal = _within_documents(sequences, query, key, attn_mask, is_causal)
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        out: Tensor = plain(_OPERATOR, *arguments, scale=scale, enable_gqa=enable_gqa)
        return out
    if attn_mask is not None:
        raise NotImplementedError(
            f"scaled_dot_product_attention: attn_mask of shape {tuple(attn_mask.shape)}: expected None over divided "
            "sequences, whose tokens have other numbers than a mask of this rank's: use is_causal=True, and give "
            "'documents' or 'attention_mask' to shard_sequence()"
        )
    return attention(query, key, value, causal=is_causal, scale=scale, dropout=dropout_p)


def _within_documents(
    sequences: Sequences, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """``mask`` without pairs of tokens of different documents; what is given, if attention is not among sequences."""
    documents = sequences.documents_of(len(query))
    here = documents is not None and {query.shape[-2], key.shape[-2]} == {sequences.length}
    if documents is None or not here or (documents == documents[:, :1]).all():
        return mask, is_causal
    documents = documents.to(query.device).view(len(documents), *(1,) * (query.dim() - 3), -1)
    same = documents[..., None] == documents[..., None, :]
    same = same.tril() if is_causal else same
    if mask is not None:
        same = mask & same if mask.dtype == torch.bool else torch.where(same, mask, -torch.inf)
    return same, False


def _divided_tokens() -> Sequences | None:
    sequences = None if _state.is_original else current_sequences()
    return None if sequences is None or sequences.group.size == 1 else sequences


def _dropout(name: str, x: Tensor, p: float | None) -> Tensor | None:
    """Dropout of divided tokens: their part of the mask that one process draws for all tokens."""
    sequences = _divided_tokens()
    if sequences is None:
        return None
    checks = _state.replacement is not None
    tokens = _state.tokens if checks else sequences.num_own
    if p is None:
        _refuse_tokens(name, x, tokens, sequences)
        return None
    rows, rest = len(x) if x.dim() else 0, x.shape[2:]
    if x.dim() == 2 and not (checks and x.shape[1] == tokens) and rows % tokens == 0:
        rows, rest = rows // tokens, x.shape[1:]  # tokens of all sequences, one after the other
    elif x.dim() not in (2, 3) or x.shape[1] != tokens:
        rows = 0
    fits = rows > 0 and _is_batch(rows, sequences)
    if name.removesuffix("_") != "dropout" or not fits:
        raise NotImplementedError(
            f"{name}: random numbers for shape {tuple(x.shape)} in a model whose tokens are divided: expected "
            f"dropout of (sequences, {tokens} tokens, features), a part of one mask of all tokens; set p to 0"
        )
    if checks:
        return x.clone()
    with original():
        mask = plain("dropout", x.new_ones((rows, sequences.length, *rest)), p, True)
    return x * sequences.shard(mask).view(x.shape)


def _refuse_tokens(name: str, x: Tensor, tokens: int, sequences: Sequences) -> None:
    """Raises NotImplementedError for random numbers that seem to be of divided tokens: other values, such as one for
    each sequence, are the same on ranks that divide them."""
    rows, flat = x.shape[0] if x.dim() else 0, x.shape[0] // tokens if x.dim() == 2 else 0
    of_tokens = tokens in (x.shape[1:2] + x.shape[2:-1]) and _is_batch(rows, sequences)
    if not of_tokens and (name.endswith("_") or not flat or rows % tokens or not _is_batch(flat, sequences)):
        return
    raise NotImplementedError(
        f"{name}: random numbers for shape {tuple(x.shape)} in a model whose tokens are divided: ranks would draw the "
        f"same for different tokens; expected dropout of (sequences, {tokens} tokens, features), or none; for what has "
        "as many numbers by chance, a generator= with the same seed on all ranks"
    )


def _is_batch(rows: int, sequences: Sequences) -> bool:
    return rows == 1 if _state.replacement is not None else sequences.documents_of(rows) is not None
