"""Preparation of models that are not written for divided sequences, and the refusal of models that cannot be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._divided_check import check_call
from .functional import attention

_NAME = "bmtrain"  # of the attention, in transformers


def prepare(model: torch.nn.Module) -> None:
    """Makes a model's attention that over divided sequences, and has its first forward checked.

    Raises:
        NotImplementedError: a layer of the model cannot be divided.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise NotImplementedError(
                f"{name} ({type(module).__name__}): its statistics are over tokens, which are divided over ranks"
            )
    if hasattr(model, "set_attn_implementation"):
        _of_transformers(model)
    model.register_forward_pre_hook(check_call, with_kwargs=True)


def _of_transformers(model: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)
    for module in model.modules():
        config = getattr(module, "config", None)
        chosen = getattr(config, "_attn_implementation", _NAME)
        if chosen != _NAME:
            raise NotImplementedError(
                f"{type(module).__name__}: its attention is {chosen!r}, and cannot be chosen: the tokens of a "
                "sequence cannot be divided (by transformers' _can_set_attn_implementation)"
            )


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`attention` with the signature of transformers'."""
    for name in _CHANGE_SCORES:
        if options.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__}: attention with {name} is not implemented for divided sequences"
            )
    if attention_mask is not None and attention_mask.dim() != 0:
        raise NotImplementedError(
            f"{type(module).__name__}: expected no mask made by the model, whose tokens are numbered as if this rank's "
            f"were all, got shape {tuple(attention_mask.shape)}"
        )
    window = sliding_window if attention_mask is None else int(attention_mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = attention(query, key, value, causal=causal, scale=scaling, window=window, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


#: Options of attention that change scores: they are not implemented, and must not be passed over.
_CHANGE_SCORES = ("softcap", "position_bias", "s_aux", "head_mask", "cache", "block_mask", "indices")
#: Masks of transformers, by the function that computes them; documents and padding are known from `shard_sequence`.
_KNOWN_MASKS = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "padding_mask_function.<locals>.inner_mask",
)
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"


def _mask(*args: Any, mask_function: Callable[..., Any], **options: Any) -> Tensor | None:
    """Returns the stand-in for a mask that `_attention` expects: None, or the number of tokens of a window.

    Raises:
        NotImplementedError: a mask that is none of these.
    """
    window = None
    for function in _parts(mask_function):
        name = function.__qualname__
        if name == _WINDOW:
            window = int(_closure(function)["sliding_window"])
        elif name not in _KNOWN_MASKS:
            raise NotImplementedError(
                f"the model makes a mask by {name} of transformers, which is not implemented for divided sequences "
                "(chunked attention, prefixes, images between tokens, and other masks of its own)"
            )
    return None if window is None else torch.tensor(window)


def _parts(function: Any) -> Iterator[Any]:
    """The masks whose intersection a mask is."""
    name = function.__qualname__
    if name == "and_masks.<locals>.and_mask":
        for part in _closure(function)["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        yield from _parts(_closure(function)["mask_function"])
    else:
        yield function


def _closure(function: Any) -> dict[str, Any]:
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))
