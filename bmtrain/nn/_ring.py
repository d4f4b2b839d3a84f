"""Attention with keys and values that visit all ranks, in pieces that are equal work for each rank.

[Note: A ring of keys and values]
Rank r of n has pieces r and 2n - 1 - r of each sequence. In n steps it sees the keys and values of every rank, passing
them on, and merges what its queries find by the log-sum-exp of the scores (M. Milakov, N. Gimelshein, Online
normalizer calculation for softmax, 2018), in fp32. Backward sends keys and values around once more, and behind them
their gradients, to which each rank adds its own: after n steps they are home. A message and the one after it never
share a buffer, so that nothing is read that has not arrived, or has been overwritten. Scores are there for a tile of
queries and a tile of keys at a time, so that memory is linear in the length; tiles without any attention are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.differentiable_once import differentiable_once
from .._C import Work
from .._ranks.context import Group
from .._shards.stage import channel
from ._sequences import Sequences, check_stamp


class Rule(NamedTuple):
    """Arguments of attention: earlier tokens only, factor of the products (None: the default), number of tokens."""

    causal: bool
    scale: float | None
    window: int | None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, rule: Rule) -> Tensor:
    """Returns the attention of this rank's queries ``(batch, heads, tokens, features)``; differentiable."""
    out: Tensor = _Ring.apply(q, k, v, sequences, rule)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, rule: Rule) -> Tensor:
        attend = _Attend(sequences, rule, q, groups=q.shape[1] // k.shape[1])
        queries = attend.fold(q)
        out = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
        largest = queries.new_full(queries.shape[:-1], -torch.inf)
        for source, (keys, values) in _visits(sequences, k, v):
            for pair in attend.pairs(source):
                _merge(out, largest, pair, *attend.forward(queries, keys, values, pair))
        ctx.attend, ctx.dtypes = attend, (q.dtype, k.dtype, v.dtype)
        ctx.save_for_backward(q, k, v, out, largest, sequences.stamp)
        return attend.unfold(out).to(q.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, largest, stamp = ctx.saved_tensors
        attend: _Attend = ctx.attend
        check_stamp(attend.sequences, stamp)
        queries, grad_out = attend.fold(q), attend.fold(gradient)
        inner = (grad_out * out).sum(-1)
        grad_q = torch.zeros_like(queries)
        travelling = _Travelling(attend.sequences)
        for source, (keys, values) in _visits(attend.sequences, k, v):
            grad_k, grad_v = (queries.new_zeros(t.shape) for t in (k, v))
            for pair in attend.pairs(source):
                attend.backward(
                    (queries, keys, values), (grad_out, largest, inner), (grad_q, grad_k, grad_v), pair
                )
            travelling.add(grad_k, grad_v)
        grads = (attend.unfold(grad_q), *travelling.home(k.shape, v.shape))
        return *(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)), None, None


#: Tokens of a tile of queries, and of keys.
_TILE = 512


class _Pair(NamedTuple):
    """A tile of queries and a tile of keys that it attends to."""

    queries: slice  # of this rank's tokens
    keys: slice  # of the tokens of the rank that the keys came from
    mask: Tensor | None  # (batch or 1, queries, keys), where not all of them attend to all


class _Attend:
    """Attention between tiles, over heads of keys: the ``groups`` heads of queries that share one follow each other
    among its tokens."""

    def __init__(self, sequences: Sequences, rule: Rule, queries: Tensor, groups: int) -> None:
        documents = sequences.documents_of(len(queries))
        assert documents is not None
        self.sequences = sequences
        self.documents = documents
        self.device = queries.device
        self.causal, self.window = rule.causal, rule.window
        self.scale: Any = rule.scale  # a number here
        self.groups = groups

    def fold(self, q: Tensor) -> Tensor:
        """``(batch, heads, tokens, features)`` as ``(batch, heads of keys, groups, tokens, features)``, fp32."""
        folded: Tensor = q.unflatten(1, (-1, self.groups))
        return _wide(folded)

    def unfold(self, q: Tensor) -> Tensor:
        """The inverse of :meth:`fold`, in fp32 still."""
        return q.flatten(1, 2)

    def pairs(self, source: int) -> Iterator[_Pair]:
        """Pairs of a tile of this rank's tokens and one of rank ``source``'s in which some token attends to another."""
        piece = self.sequences.num_own // 2
        last = 2 * self.sequences.group.size - 1
        tiles = [slice(start, min(start + _TILE, piece)) for start in range(0, piece, _TILE)]
        for mine, here in enumerate((self.sequences.group.rank, last - self.sequences.group.rank)):
            for theirs, there in enumerate((source, last - source)):
                for q, k in product(tiles, tiles):
                    allowed = self._allowed(_moved(q, here * piece), _moved(k, there * piece))
                    if allowed is not False:
                        mask = None if allowed is True else allowed.to(self.device)
                        yield _Pair(_moved(q, mine * piece), _moved(k, theirs * piece), mask)

    def _allowed(self, q: slice, k: slice) -> Tensor | bool:
        """Which of the tokens ``q`` of the sequence attend to which of the tokens ``k``: all, none, or a mask."""
        is_after = self.causal and k.start >= q.stop
        if is_after or (self.window is not None and q.start - k.stop + 1 >= self.window):
            return False
        own, other = self.documents[:, q], self.documents[:, k]
        masks = []
        if own.min() != own.max() or other.min() != other.max() or own.min() != other.min():
            masks.append(own[:, :, None] == other[:, None, :])
        distance = torch.arange(q.start, q.stop)[:, None] - torch.arange(k.start, k.stop)
        if self.causal and k.stop - 1 > q.start:
            masks.append(distance[None] >= 0)
        if self.window is not None and q.stop - 1 - k.start >= self.window:
            masks.append(distance[None] < self.window)
        if not masks:
            return True
        mask = functools.reduce(torch.logical_and, masks)
        return mask if mask.any() else False

    def _scores(self, queries: Tensor, keys: Tensor, pair: _Pair) -> Tensor:
        scores: Tensor = queries[..., pair.queries, :] @ _piece(keys, pair).transpose(-1, -2) * self.scale
        if pair.mask is not None:
            scores.masked_fill_(~pair.mask[:, None, None], -torch.inf)
        return scores

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, pair: _Pair) -> tuple[Tensor, Tensor]:
        """Returns attention to one tile, and the log-sum-exp of its scores: -inf where a query attends to none."""
        scores = self._scores(queries, keys, pair)
        total = scores.logsumexp(-1)
        return _softmax(scores, total) @ _piece(values, pair), total

    def backward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        saved: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor, Tensor],
        pair: _Pair,
    ) -> None:
        """Adds one pair's contribution to the gradients of queries, keys and values."""
        queries, keys, values = tensors
        grad_out, total, inner = (
            t[..., pair.queries, :] for t in (saved[0], saved[1][..., None], saved[2][..., None])
        )
        grad_q, grad_k, grad_v = grads
        weights = _softmax(self._scores(queries, keys, pair), total.squeeze(-1))
        grad_v[..., pair.keys, :] += (weights.transpose(-1, -2) @ grad_out).sum(2)
        grad_scores = weights * (grad_out @ _piece(values, pair).transpose(-1, -2) - inner) * self.scale
        grad_q[..., pair.queries, :] += grad_scores @ _piece(keys, pair)
        grad_k[..., pair.keys, :] += (grad_scores.transpose(-1, -2) @ queries[..., pair.queries, :]).sum(2)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of computation: fp32, or fp64 for fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _piece(tensor: Tensor, pair: _Pair) -> Tensor:
    """The pair's keys or values, for all heads of queries that share them, in fp32."""
    return _wide(tensor[:, :, None, pair.keys])


def _softmax(scores: Tensor, total: Tensor) -> Tensor:
    weights: Tensor = scores.sub_(total.masked_fill(total == -torch.inf, 0)[..., None]).exp_()
    return weights


def _merge(out: Tensor, largest: Tensor, pair: _Pair, part: Tensor, total: Tensor) -> None:
    """Adds attention to one more tile to the attention so far, both weighted by the sums of their exponentials."""
    old = largest[..., pair.queries]
    new = torch.logaddexp(old, total)
    safe = new.masked_fill(new == -torch.inf, 0)
    weighted = out[..., pair.queries, :] * (old - safe).exp_()[..., None]
    out[..., pair.queries, :] = weighted.add_(part * (total - safe).exp_()[..., None])
    largest[..., pair.queries] = new


def _pass_on(group: Group, flat: Tensor) -> tuple[Tensor, list[Work]]:
    """Sends a tensor to the next rank; returns the one of the previous rank, and what to wait for before reading it."""
    coming = torch.empty_like(flat)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    works = [
        channel(group, group.rank).send(flat, after, "sp.ring"),
        channel(group, before).recv(coming, before, "sp.ring"),
    ]
    return coming, works


def _visits(sequences: Sequences, k: Tensor, v: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yields the keys and values of every rank, beginning with this one's; the next are under way meanwhile."""
    group = sequences.group
    here = torch.cat([k.flatten(), v.flatten()])
    for step in range(group.size):
        is_last = step == group.size - 1
        coming, works = (here, []) if is_last else _pass_on(group, here)
        keys, values = here.split([k.numel(), v.numel()])
        yield (group.rank - step) % group.size, (keys.view(k.shape), values.view(v.shape))
        sequences.wait_for(works)
        here = coming


class _Travelling:
    """Gradients of the visiting keys and values, which travel on with them to the rank that they belong to."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._coming: tuple[Tensor, list[Work]] | None = None

    def add(self, grad_k: Tensor, grad_v: Tensor) -> None:
        """Adds this rank's gradients to the sums that came with the keys and values, and sends these on."""
        flat = torch.cat([grad_k.flatten(), grad_v.flatten()])
        if self._coming is not None:
            flat += self._arrived()
        self._coming = _pass_on(self._sequences.group, flat)

    def _arrived(self) -> Tensor:
        assert self._coming is not None
        self._sequences.wait_for(self._coming[1])
        return self._coming[0]

    def home(self, k_shape: torch.Size, v_shape: torch.Size) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's own keys and values."""
        grad_k, grad_v = self._arrived().split([k_shape.numel(), v_shape.numel()])
        return grad_k.view(k_shape), grad_v.view(v_shape)
