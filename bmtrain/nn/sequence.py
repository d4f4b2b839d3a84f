"""Division of the tokens of a batch over the ranks of a sequence group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from .._base.arguments import require_tensor
from .._engine.engine import current_engine
from .._engine.tokens import tokens_of_a_loss
from .._ranks.context import Group
from ..global_var import context
from . import _intercept
from ._divided_check import belong_to, check_call
from ._sequences import Method, Sequences, set_current, whole_sequences
from .functional import attention

__all__ = ["shard_sequence", "token_mean", "whole_sequences"]


def shard_sequence(batch: Mapping[str, Any], *, method: str = "heads") -> dict[str, Any]:
    """Returns this rank's tokens of a batch. Collective if there are labels, and with other divisions of the ranks.

    Until the next call, :func:`bmtrain.nn.functional.attention`, torch's ``scaled_dot_product_attention`` and the
    attention of transformers models made distributed by the wrapper are over the whole sequences.
    On one rank, or without ``sp_size``, the batch stays whole: a script is the same for all layouts.

    Args:
        batch: the same on all ranks of a sequence group (:func:`bmtrain.data.loader` gives that). Tensors are
            ``(sequences, tokens, ...)`` and are divided; other values stay as they are. These names have a meaning:

            - ``input_ids`` or ``inputs_embeds``: one of them is needed.
            - ``labels``: the tokens themselves, as transformers models take them: shifted here, before division, into
              ``shift_labels`` (and ``labels``, the same).
            - ``position_ids``: default 0, 1, ...; where they do not rise by one, another document begins.
            - ``documents``: number of each token's document; tokens attend to their own only. Not in the result.
            - ``attention_mask``: 0 where a sequence is padded, at one of its ends or both. Not in the result.
        method: ``"heads"``: in attention each rank gets all tokens of some heads, a multiple of ``sp_size``.
            ``"ring"``: keys and values visit all ranks; any number of heads, computed in fp32.

    Returns:
        A dict with the divided tensors, ``position_ids``, and with labels ``num_items_in_batch``: the divisor with
        which the summed loss of this rank has the mean over all tokens of the step as its mean over ranks; within
        :func:`bmtrain.virtual_shards`, over the tokens of the virtual shard.

    Raises:
        TypeError, ValueError: a value makes no sense, or cannot be divided.
        RuntimeError: before :func:`bmtrain.init_distributed`.

    Example:
        >>> import torch
        >>> part = bmtrain.shard_sequence({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])})
        >>> part["shift_labels"], part["position_ids"]
        (tensor([[   6,    7, -100]]), tensor([[0, 1, 2]]))
    """
    ctx = context("shard_sequence")
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batch: expected a dict of tensors by name, got {batch!r:.80} ({type(batch).__name__})"
        )
    values = dict(batch)
    shape = _shape(values)
    documents = _documents(values, shape)
    sequences = _divide(ctx.groups["sp"], _method(method), shape, documents)
    if values.get("position_ids") is None:
        values["position_ids"] = torch.arange(shape[1], device=_device(values)).expand(shape)
    if values.get("labels") is not None and values.get("shift_labels") is None:
        values["shift_labels"] = torch.nn.functional.pad(values["labels"][:, 1:], (0, 1), value=_IGNORED)
        values["labels"] = values["shift_labels"]
    divided = {name: _divided(sequences, name, value) for name, value in values.items()}
    if divided.get("shift_labels") is not None:
        counted = (divided["shift_labels"] != _IGNORED).sum()
        divided["num_items_in_batch"] = tokens_of_a_loss(counted, "shard_sequence")
    set_current(sequences)
    _intercept.install(attention)
    current_engine(ctx).reads.check_call = check_call
    belong_to(sequences, divided.values())
    return divided


def token_mean(losses: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Returns this rank's share of the mean over all tokens of all ranks. Collective.

    The mean of the ranks' results is the mean over all tokens, however many each rank has, and
    :meth:`OptimManager.backward <bmtrain.optim.OptimManager.backward>` gives its gradient.

    Within :func:`bmtrain.virtual_shards` the mean is over the tokens of the virtual shard. Tensor-parallel ranks that
    have tokens of their own divide the result by ``tp_size``, as any loss.

    Args:
        losses: of this rank's tokens, any shape.
        weights: of the tokens, same shape: 0 for tokens that do not count; default 1 for all.

    Returns:
        A scalar of the dtype of ``losses``.

    Example:
        >>> import torch
        >>> token_mean(torch.tensor([1.0, 2.0, 9.0]), weights=torch.tensor([1, 1, 0]))
        tensor(1.5000)
    """
    require_tensor("losses", losses)
    if weights is None:
        weights = torch.ones_like(losses)
    require_tensor("weights", weights)
    if weights.shape != losses.shape:
        raise ValueError(f"weights: expected shape {tuple(losses.shape)}, got {tuple(weights.shape)}")
    weights = weights.to(torch.promote_types(losses.dtype, torch.float32)).detach()  # fp16 has no 70,000
    # Not a product: the loss of a token that does not count may be inf or NaN.
    total = torch.where(weights == 0, 0, losses * weights).sum()
    return (total / tokens_of_a_loss(weights.sum(), "token_mean").to(total.dtype)).to(losses.dtype)


_stamps = itertools.count()
_IGNORED = -100
#: Values of tokens that make a length divisible.
_FILL = {"labels": _IGNORED, "shift_labels": _IGNORED}


def _method(method: str) -> Method:
    try:
        return Method(method)
    except ValueError:
        raise ValueError(f"method: expected 'heads' or 'ring', got {method!r}") from None


def _device(values: Mapping[str, Any]) -> torch.device:
    return next(value.device for value in values.values() if isinstance(value, torch.Tensor))


def _shape(values: Mapping[str, Any]) -> torch.Size:
    tokens = next(
        (values[name] for name in ("input_ids", "inputs_embeds") if values.get(name) is not None), None
    )
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        raise ValueError(
            "batch: expected 'input_ids' of shape (sequences, tokens) or 'inputs_embeds', got "
            f"{', '.join(map(repr, values)) or 'an empty dict'}"
        )
    return tokens.shape[:2]


def _documents(values: dict[str, Any], shape: torch.Size) -> torch.Tensor:
    """Numbers the documents by the boundaries that ``values`` describe, and removes what only serves for that."""
    given, mask, positions = values.pop("documents", None), values.pop("attention_mask", None), None
    for name, value in (("documents", given), ("attention_mask", mask)):
        if value is not None and (not isinstance(value, torch.Tensor) or value.shape != shape):
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{name}: expected a tensor of shape {tuple(shape)}, got {found}")
    if given is None and mask is None:
        positions = values.get("position_ids")
    begins = torch.zeros(shape, dtype=torch.bool)
    if given is not None:
        begins[:, 1:] |= (given[:, 1:] != given[:, :-1]).cpu()
    if positions is not None and positions.dim() == 2:
        begins[:, 1:] |= (positions.diff(dim=1) != 1).cpu()
    if mask is not None:
        changes = (mask[:, 1:] != 0) != (mask[:, :-1] != 0)
        if ((mask[:, 1:] != 0) & changes).sum(1).add((mask[:, 0] != 0).int()).max() > 1:
            raise ValueError(
                "attention_mask: expected padding at the ends of sequences only, got a gap between tokens that "
                "attend to each other"
            )
        begins[:, 1:] |= changes.cpu()
    return begins.cumsum(1)


def _divide(group: Group, method: Method, shape: torch.Size, documents: torch.Tensor) -> Sequences:
    batch_size, length = shape
    # In a ring, a rank has one piece from each half of the sequence: causal attention is equal work for all.
    num_pieces = group.size if method is Method.HEADS or group.size == 1 else 2 * group.size
    piece = -(-length // num_pieces)
    padded = piece * num_pieces
    if padded > length:
        documents = torch.nn.functional.pad(documents, (0, padded - length), value=length)
    documents = _of_layers(documents, method)
    pieces = torch.arange(padded).view(num_pieces, piece)
    mine = [group.rank] if num_pieces == group.size else [group.rank, num_pieces - 1 - group.rank]
    own = pieces[mine].flatten()
    stamp = torch.tensor([next(_stamps)])
    return Sequences(group, method, batch_size, length, padded, own, documents, stamp)


def _of_layers(documents: torch.Tensor, method: Method) -> torch.Tensor:
    """Returns the documents of all batches that this rank's layers see, see :class:`Sequences`. Collective with tensor
    parallelism or a pipeline."""
    ctx = context("shard_sequence")
    pipe, tp = ctx.groups["pipe"], ctx.groups["tp"]
    if pipe.size * tp.size == 1:
        return documents[None]
    own = torch.tensor([*documents.shape, list(Method).index(method)], device=ctx.device)
    sizes = own.new_empty((ctx.world.size, len(own)))
    ctx.world.comm.all_gather(sizes, own, "shard_sequence").wait()
    for ranks in (*ctx.topology.groups("pipe"), *ctx.topology.groups("tp"), *ctx.topology.groups("sp")):
        found = sizes[list(ranks)]
        if (found != found[0]).any():
            raise ValueError(
                f"batch: expected as many sequences, of one length, and one method on ranks {ranks}, whose layers see "
                f"each other's tokens, got (sequences, tokens, number of the method) {found.tolist()}"
            )
    for group in (pipe, tp):
        documents = documents.to(ctx.device).contiguous()
        every = documents.new_empty((group.size, *documents.shape))
        group.comm.all_gather(every, documents, "shard_sequence").wait()
        documents = every.flatten(0, 1) if group is pipe else every
    return documents.cpu()


def _divided(sequences: Sequences, name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    shape = (sequences.batch_size, sequences.length)
    if value.dim() == 2 and value.shape == (1, sequences.length):
        value = value.expand(shape)
    if tuple(value.shape[:2]) != shape:
        raise ValueError(
            f"{name}: expected (sequences, tokens, ...) = {shape} as input_ids, got shape {tuple(value.shape)}; what "
            "is not one value for each token cannot be divided over ranks"
        )
    return sequences.shard(value, _FILL.get(name, 0)).contiguous()
