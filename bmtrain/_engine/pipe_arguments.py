"""Distribution of the arguments of a pipeline call to stages and micro-batches."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch

from .._base.deprecate import warn_once
from .._base.tree import attributes_of, tensors_of, with_items
from .._C import ReduceOp
from .._ranks.context import Group
from .._shards.stage import collect_batches, hand_out
from ..global_var import context
from .engine import Engine, current_engine

_NUM_COMPARED = 3  # calls, since a comparison makes the host wait; the first batch may be one without padding
_compared: Counter[str] = Counter()  # arguments that are not split, by name


class PipeArgument:
    """One tensor argument: either split with the batch, or the first stage's value for every micro-batch.

    Args:
        pipe: the group with one rank of each stage.
        value: this rank's tensor.
        is_cut: it is split.
        num_micros: number of micro-batches.
        suspect: name of an argument that is not split and has the batch's size in dimension 0; else None.
    """

    def __init__(
        self, pipe: Group, value: torch.Tensor, is_cut: bool, num_micros: int, suspect: str | None = None
    ) -> None:
        self._pipe = pipe
        self._is_cut = is_cut
        self._num_micros = num_micros
        self._shape = value.shape
        requires_grad = value.requires_grad and torch.is_grad_enabled()
        if is_cut:
            whole = collect_batches(pipe, value)
            pieces = whole.tensor_split(num_micros) if whole is not None else ()
        else:
            shared = value.detach().contiguous().clone()
            pipe.comm.broadcast(shared, 0, "pipe.argument").wait()
            if suspect is not None and _compared[suspect] < _NUM_COMPARED:
                _compared[suspect] += 1
                _warn_if_unused(pipe, suspect, value, shared)
            pieces = (shared,) * num_micros
        #: One tensor for each micro-batch.
        self.pieces = [piece.detach().requires_grad_(requires_grad) for piece in pieces]

    def gradient(self) -> torch.Tensor:
        """Returns this rank's gradient from all stages and micro-batches. Collective over the pipe group.

        The gradient of a shared argument goes to the ranks of the batches that it came from; where a micro-batch mixes
        the batches of several ranks, they get equal parts of the sum.
        """
        size = self._pipe.size
        gradients = [torch.zeros_like(piece) if piece.grad is None else piece.grad for piece in self.pieces]
        for piece in self.pieces:
            piece.grad = None
        if self._is_cut:
            by_rank = torch.cat(gradients)
        elif self._num_micros % size == 0:
            per_rank = self._num_micros // size
            sums = [torch.stack(gradients[r * per_rank : (r + 1) * per_rank]).sum(0) for r in range(size)]
            by_rank = torch.stack(sums)
        else:
            by_rank = (torch.stack(gradients).sum(0) / size).expand(size, *self._shape).contiguous()
        own = by_rank.new_empty(self._shape)
        self._pipe.reduce_comm.reduce_scatter(own, by_rank, ReduceOp.SUM, "pipe.argument").wait()
        return own


def _warn_if_unused(pipe: Group, name: str, value: torch.Tensor, shared: torch.Tensor) -> None:
    """Warns on the first rank if one has other values, which are not used. Collective over the pipe group."""
    differs = (~torch.isclose(value.detach(), shared, 0, 0, equal_nan=True)).any().float().reshape(1)
    pipe.comm.all_reduce(differs, ReduceOp.MAX, "pipe.argument").wait()
    if pipe.rank == 0 and differs.item():
        entry = name[5:-1] if name.startswith("args[") else repr(name)
        warn_once(
            f"pipeline.batch_related.{name}",
            f"{name}: a tensor of shape {tuple(value.shape)} has the batch's size in dimension 0 and differs between "
            "the ranks of a pipeline, but is not split, since it has not as many dimensions as the hidden state: all "
            f"micro-batches get the first stage's values; to split it, add batch_related=[{entry}] to the call",
            stacklevel=3,
            category=UserWarning,
        )


class ShardArgument:
    """A tensor argument in a loop over virtual shards: each micro-batch gets the value of the rank whose shard it is.

    Gradients of the layers add up from the last one to the first, in the order of one process: the sum follows the
    gradient of the hidden state from stage to stage, and is there before the next layer adds its own.
    """

    def __init__(self, pipe: Group, value: torch.Tensor) -> None:
        self._pipe = pipe
        whole = collect_batches(pipe, value[None])
        assert whole is not None
        requires_grad = value.requires_grad and torch.is_grad_enabled()
        self._leaves = [piece.detach().requires_grad_(requires_grad) for piece in whole.unbind()]
        self.pieces = list(map(alias, self._leaves))
        self._sums: list[torch.Tensor | None] = [None] * pipe.size

    def take(self, micro: int) -> torch.Tensor:
        """Returns the gradient that a backward has left."""
        leaf = self._leaves[micro]
        self._sums[micro] = own = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
        leaf.grad = None
        return own

    def gradient(self, source: int = 0) -> torch.Tensor:
        """Returns the gradient of this rank's value, which stage ``source`` has. Collective over the pipe group."""
        sums = [self.take(micro) if own is None else own for micro, own in enumerate(self._sums)]
        return hand_out(self._pipe, sums, source, sums[0].new_empty(sums[0].shape))


def alias(value: Any) -> Any:
    """Returns other nodes of the graph for tensors that require grad, in which their gradients are summed first."""
    if not torch.is_grad_enabled():
        return value
    return _replaced(value, torch.Tensor, lambda x: x.view_as(x) if x.requires_grad else x)


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Returns the items of a container that is traversed, in the same order on all ranks; none of others."""
    if isinstance(value, tuple) or type(value) is list:
        return list(enumerate(value))
    if type(value) in (dict, OrderedDict, defaultdict):
        return sorted(value.items(), key=lambda item: repr(item[0]))
    is_plain = is_dataclass(value) and not isinstance(value, (list, dict))
    return sorted(attributes_of(value)) if is_plain else []


def _replaced(value: Any, kind: Any, function: Callable[[Any], Any]) -> Any:
    """Returns ``value`` with all objects of a kind replaced, in containers too, which are copied then."""
    if isinstance(value, kind):
        return function(value)
    found = [(key, item, _replaced(item, kind, function)) for key, item in _entries(value)]
    if all(new is item for _, item, new in found):
        return value
    if isinstance(value, tuple):
        return with_items(value, [new for _, _, new in found])
    copied = copy(value)
    put = type(value).__setitem__ if isinstance(value, (list, dict)) else object.__setattr__
    for key, _, new in found:
        put(copied, key, new)
    return copied


def _require_containers(name: str, value: Any) -> None:
    """Raises TypeError for objects that hold tensors and are not traversed."""
    entries = _entries(value)
    for _, item in entries:
        _require_containers(name, item)
    if not entries and not isinstance(value, torch.Tensor) and next(tensors_of(value), None) is not None:
        raise TypeError(
            f"{name}: expected tensors in tuples, lists, dicts and dataclasses, got a {type(value).__name__} that "
            "holds tensors, which a pipeline cannot split; pass these as arguments"
        )


class PipeArguments:
    """All arguments of a call after the hidden state.

    Args:
        pipe: the group with one rank of each stage.
        hidden: this rank's batch.
        args: positional arguments.
        kwargs: keyword arguments.
        batch_related: positions in ``args`` of the tensors, or containers of them, to cut with the batch; no positions:
            all tensors with as many dimensions as ``hidden`` and its size in dimension 0. Names of ``kwargs`` to cut
            as well.
        num_micros: number of micro-batches.
        name: what the caller calls ``args``.
    """

    def __init__(
        self,
        pipe: Group,
        hidden: torch.Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batch_related: Sequence[int | str],
        num_micros: int,
        name: str = "args",
    ) -> None:
        named = {f"{name}[{index}]": value for index, value in enumerate(args)} | kwargs
        for key, value in named.items():
            _require_containers(key, value)
        listed = set(batch_related)
        if not listed <= {*range(len(args)), *kwargs}:
            raise ValueError(
                f"batch_related: expected indices below {len(args)}, the number of further arguments, or names of "
                f"keywords {sorted(kwargs)}, got {list(batch_related)}"
            )
        positions = listed.intersection(range(len(args)))

        def wrap(key: int | str, value: torch.Tensor) -> PipeArgument | ShardArgument:
            has_rows = value.shape[:1] == hidden.shape[:1]
            is_guessed = has_rows and not (positions and isinstance(key, int))
            is_cut = value.dim() > 0 and (key in listed or (is_guessed and value.dim() == hidden.dim()))
            suspect = None
            if is_guessed and not is_cut:
                suspect = key if isinstance(key, str) else f"{name}[{key}]"
            argument: PipeArgument | ShardArgument
            if is_virtual:
                argument = ShardArgument(pipe, value)
            else:
                argument = PipeArgument(pipe, value, is_cut, num_micros, suspect)
            if value.requires_grad:
                self.trained.append((value, argument))
            return argument

        is_virtual = current_engine(context()).virtual.is_open
        #: The tensors of the caller that require grad, with their `PipeArgument`.
        self.trained: list[tuple[torch.Tensor, Any]] = []
        self._args = [
            _replaced(value, torch.Tensor, partial(wrap, index)) for index, value in enumerate(args)
        ]
        self._kwargs = {
            key: _replaced(value, torch.Tensor, partial(wrap, key)) for key, value in sorted(kwargs.items())
        }
        self._followers: list[ShardArgument] = (
            [argument for _, argument in self.trained] if is_virtual else []
        )
        self._received: dict[int, list[torch.Tensor]] = {}

    def of_micro(self, index: int) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments of the layers for one micro-batch."""

        def unwrap(value: Any) -> Any:
            return _replaced(value, (PipeArgument, ShardArgument), lambda argument: argument.pieces[index])

        return [unwrap(value) for value in self._args], {
            name: unwrap(value) for name, value in self._kwargs.items()
        }

    def to_receive(self, micro: int) -> list[torch.Tensor]:
        """Returns memory for the sums of gradients that come from the next stage behind a micro-batch."""
        self._received[micro] = [torch.empty_like(argument.pieces[micro]) for argument in self._followers]
        return self._received[micro]

    def roots(self, micro: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns further roots of the backward of a micro-batch, and their gradients, which have come."""
        sums = self._received.pop(micro, [])
        return [argument.pieces[micro] for argument in self._followers][: len(sums)], sums

    def to_send(self, micro: int) -> list[torch.Tensor]:
        """Returns the sums of gradients, for the previous stage or for the ranks."""
        return [argument.take(micro) for argument in self._followers]


@contextmanager
def on_rows(engine: Engine, first: int, number: int) -> Iterator[None]:
    """Context manager in which a pipeline's layers run on these rows of the batches of all stages' ranks."""
    before, engine.rows = engine.rows, slice(first, first + number)
    try:
        yield
    finally:
        engine.rows = before
