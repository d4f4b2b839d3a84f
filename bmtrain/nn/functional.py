"""Attention over sequences that are divided over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._base.arguments import require_callable, require_integer, require_tensor
from .._base.differentiable_once import differentiable_once
from .._base.opaque import opaque
from . import _intercept
from ._ring import Rule, ring_attention
from ._sequences import Method, Sequences, check_stamp, current_sequences

__all__ = ["attention", "tiled"]


@opaque
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Scaled dot product attention of this rank's tokens to the tokens of all ranks of the sequence group.

    Tokens attend to their own document only, as the last :func:`bmtrain.shard_sequence` has them; before one, all
    tokens of this rank are one document. Collective over the sequence group.

    Args:
        q: ``(batch, heads, tokens, features)``.
        k: the same, with a divisor of the heads.
        v: as ``k``, perhaps with another number of features.
        causal: tokens attend to themselves and to earlier ones.
        scale: factor of the products; default ``1 / sqrt(features)``.
        window: with ``causal``, the number of tokens that a token attends to, itself included; default all.
        dropout: must be 0: a mask that does not depend on the number of ranks would need random numbers by position.

    Returns:
        ``(batch, heads, tokens, features of v)``, in the dtype of ``q``.

    Raises:
        TypeError, ValueError: an argument does not fit, or the heads do not divide.
        NotImplementedError: dropout.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 5, 4)
        >>> torch.equal(attention(x, x, x)[:, :, 0], x[:, :, 0])  # the first token sees itself only
        True
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tensor(name, tensor)
    if (replacement := _intercept.replacement()) is not None:
        return replacement(q, k, v)
    sequences = current_sequences()
    if dropout:
        raise NotImplementedError(
            f"attention: dropout={dropout}: expected 0; a mask that is the same on any number of ranks needs random "
            "numbers by position, which there are none of (set the model's attention dropout to 0)"
        )
    if window is not None and (require_integer("window", window, 1) and not causal):
        raise ValueError("window: expected causal=True with a window, got causal=False")
    if sequences is None:
        with _intercept.original():
            return _whole(q, k, v, Rule(causal, scale, window))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        sequences.check(name, tensor)
    _check_heads(q, k, v)
    rule = Rule(causal, 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale), window)
    with _intercept.original():
        if sequences.group.size == 1:
            return _by_document(q, k, v, sequences, rule)
        if sequences.method is Method.HEADS:
            return _by_heads(q, k, v, sequences, rule)
        return ring_attention(q, k, v, sequences, rule)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "attention: expected equally many heads of k and v, a divisor of the heads of q, and q and k of the same "
            f"features, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )


def _whole(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """Attention among the tokens that are here."""
    groups = q.shape[1] // k.shape[1]
    k, v = _repeated(k, groups), _repeated(v, groups)
    mask = None
    if rule.window is not None and rule.window < q.shape[2]:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask.triu(1 - rule.window)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=rule.causal and mask is None, scale=rule.scale
    )


def _repeated(x: Tensor, times: int) -> Tensor:
    """Repeats heads, by twos: gradients are sums of pairs, whether one rank or several have the copies."""
    while times > 1:
        factor = 2 if times % 2 == 0 else times
        x, times = x.repeat_interleave(factor, 1), times // factor
    return x


def _by_document(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, rule: Rule) -> Tensor:
    """Attention among all tokens of some heads, document by document: no mask of all pairs of tokens is made."""
    rows = sequences.runs(len(q))
    parts = []
    for number, runs in enumerate(rows):
        here = slice(None) if len(rows) == 1 else slice(number, number + 1)
        outs = []
        for start, end in runs:
            own = (here, slice(None), slice(start, end))
            outs.append(_whole(q[own], k[own], v[own], rule))
        parts.append(outs[0] if len(outs) == 1 else torch.cat(outs, dim=2))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_heads(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, rule: Rule) -> Tensor:
    """Attention with all tokens of this rank's share of the heads, and back."""
    size, heads = sequences.group.size, q.shape[1]
    if heads % size:
        raise ValueError(
            f"attention: expected a multiple of sp_size {size} heads of each tensor-parallel rank, got {heads}: "
            "choose another sp_size, or shard_sequence(batch, method='ring')"
        )
    # Heads of keys that do not divide are repeated as often as needed: their gradients are summed again.
    kept = k.shape[1]
    times = next(n for n in range(1, heads // kept + 1) if kept * n % size == heads % (kept * n) == 0)
    k, v = _repeated(k, times), _repeated(v, times)
    q, k, v = _Exchange.apply(sequences, True, q, k, v)
    out = _by_document(q, k, v, sequences, rule)
    own: tuple[Tensor] = _Exchange.apply(sequences, False, out)
    return own[0]


class _Exchange(torch.autograd.Function):
    """Exchanges some tokens of all heads for all tokens of some heads, or back; backward is the other one."""

    @staticmethod
    def forward(ctx: Any, sequences: Sequences, gathers_tokens: bool, *tensors: Tensor) -> Any:
        ctx.sequences, ctx.gathers_tokens = sequences, gathers_tokens
        ctx.save_for_backward(sequences.stamp)
        return _exchange(sequences, gathers_tokens, tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        check_stamp(ctx.sequences, ctx.saved_tensors[0])
        return None, None, *_exchange(ctx.sequences, not ctx.gathers_tokens, gradients)


def _exchange(sequences: Sequences, gathers_tokens: bool, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One all-to-all of all tensors."""
    size, dim = sequences.group.size, 1 if gathers_tokens else 2
    pieces = [torch.stack(tensor.chunk(size, dim)) for tensor in tensors]
    sent = torch.cat([piece.reshape(size, -1) for piece in pieces], dim=1)
    received = torch.empty_like(sent)
    sequences.wait_for([sequences.group.comm.all_to_all(received, sent, "sp.heads")])
    results = []
    for piece, flat in zip(pieces, received.split([p[0].numel() for p in pieces], dim=1), strict=True):
        results.append(torch.cat(flat.reshape(piece.shape).unbind(), dim=2 if gathers_tokens else 1))
    return tuple(results)


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, tiles: int) -> Tensor:
    """Returns ``function(x)`` of a function of each token alone, computed tile by tile.

    Activations inside ``function`` are there for one tile at a time: backward computes them again. With the tiles of an
    MLP and ``chunk=`` of :func:`bmtrain.loss.fused_linear_cross_entropy`, only what all tokens have at once grows with
    the length: inputs and results of layers. Gradients of parameters are sums over tiles.

    Args:
        function: from ``(batch, n, features)`` to ``(batch, n, other features)``, such as an MLP.
        x: ``(batch, tokens, features)``.
        tiles: number of tiles, which differ by one token at most.

    Raises:
        TypeError, ValueError: an argument does not fit, or ``function`` returns another number of tokens.

    Example:
        >>> import torch
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        >>> tiled(mlp, torch.ones(2, 6, 4), tiles=3).shape
        torch.Size([2, 6, 4])
    """
    require_callable("function", function)
    require_tensor("x", x)
    if x.dim() < 2:
        raise ValueError(f"x: expected (batch, tokens, ...), got shape {tuple(x.shape)}")
    number = min(require_integer("tiles", tiles, 1), max(x.shape[1], 1))
    outs = []
    for tile in x.tensor_split(number, dim=1):
        out = checkpoint(function, tile, use_reentrant=False)
        if not isinstance(out, Tensor) or out.shape[:2] != tile.shape[:2]:
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"function: expected a tensor {tuple(tile.shape[:2])} and features, got {got}")
        outs.append(out)
    return torch.cat(outs, dim=1)
