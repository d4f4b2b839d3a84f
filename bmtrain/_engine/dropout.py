"""Dropout, other random numbers and batch statistics in computations that several ranks divide.

[Note: Dropout in divided computations]
Ranks draw the same random numbers. Where they divide what one process computes, the masks of their parts would be
equal, and the model another one. So torch's operators of dropout are taken over once a computation is divided (its
functions and modules all lead to them): divided tokens take their part of the mask of all tokens (`nn/_intercept.py`),
and dropout of other parts raises an error. So do operators that draw a number for each element, and batch
normalisation, which would be over a part of the batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
#: By operator, the position of the argument that says whether numbers are drawn.
_DRAWS = {
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), 2),
    "rrelu": 3,
}
#: Operators that draw a number for each element, to which torch's functions (`gumbel_softmax`, ...) lead.
#: Not `rand` and `randn`: scripts make data by them.
_NEW = ("bernoulli", "bernoulli.p", "rand_like", "randn_like")
_IN_PLACE = ("bernoulli_.float", "bernoulli_.Tensor", "exponential_", "normal_", "uniform_")
_IN_EXPERTS = "in experts on several ranks, whose rows come from all of them"
_IN_FEATURES = "between tensor-parallel layers, whose ranks have features of their own"

#: Returns the result for divided tokens, if there are any. Arguments: operator's name, ``x``, ``p`` (None: no dropout).
Divided = Callable[[str, Tensor, float | None], Tensor | None]


class _State(threading.local):
    in_experts = False
    #: Of all threads: a backward, which torch runs in a thread of its own, ends it.
    features: tuple[int, torch.Size | None] | None = None
    tokens: tuple[Callable[[], bool], Divided] = (lambda: False, lambda *_: None)


_state = _State()


def divided_by(are_divided: Callable[[], bool], function: Divided) -> None:
    """Has ``function`` compute the dropout of divided tokens, from now on; ``are_divided``: whether there are any."""
    _State.tokens = are_divided, function
    _install()


@contextmanager
def no_random_numbers() -> Iterator[None]:
    """Context manager of experts that several ranks divide: dropout raises NotImplementedError."""
    _install()
    before, _state.in_experts = _state.in_experts, True
    try:
        yield
    finally:
        _state.in_experts = before


def divide_features(out: Tensor | None, whole: Tensor | None = None) -> None:
    """Called with the result of a tensor-parallel layer that has features of this rank only, and its input ``whole``.
    Until the next call, with None, dropout raises an error, except of values with the input's shape; so do other random
    numbers for as many rows as ``out`` has."""
    _State.features = None
    if out is not None and whole is not None:
        _install()
        _State.features = len(out), None if out.shape == whole.shape else whole.shape


def refuse_random(name: str, x: Tensor, is_dropout: bool = True) -> None:
    """Raises NotImplementedError where one process would draw other random numbers for ``x``."""
    where = _IN_EXPERTS if _state.in_experts else ""
    if _state.features is not None and x.dim():
        rows, whole = _state.features
        if x.shape != whole and (is_dropout or len(x) == rows):
            where = _IN_FEATURES
    if where:
        raise NotImplementedError(
            f"{name}: random numbers {where}: ranks would draw the same ones for different values, unlike one process; "
            "expected p=0, or dropout outside of these layers"
        )


def plain(name: str, *args: Any, **options: Any) -> Any:
    """Torch's own operator."""
    return _overload(name)._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **options)


def _overload(operator: str) -> Any:
    name, _, overload = operator.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


@functools.cache
def _install() -> Any:
    """Takes over the operators; returns the library, which keeps them."""
    library = torch.library.Library("aten", "IMPL")
    for name in _DRAWS:
        for operator in (name, f"{name}_"):
            for key in KEYS:
                library.impl(operator, functools.partial(_dispatch, operator), key)
    for key in KEYS:
        library.impl("batch_norm", _batch_norm, key)
    for key in KEYS[:2]:
        for operator in _NEW:
            library.impl(operator, functools.partial(_draw, operator), key)
    for key in KEYS[2:]:
        for operator in _IN_PLACE:
            library.impl(operator, functools.partial(_draw_in_place, operator), key)
    return library


def _dispatch(name: str, x: Tensor, *args: Any) -> Any:
    values = (x, *args)
    position = _DRAWS[name.removesuffix("_")]
    if len(values) > position and values[position] and (name.startswith("rrelu") or args[0]):
        refuse_random(name, x)
        if (out := _state.tokens[1](name, x, args[0])) is not None:
            return x.copy_(out) if name.endswith("_") else out
    return plain(name, *values)


def _batch_norm(x: Tensor, *args: Any) -> Tensor:
    where = _IN_EXPERTS if _state.in_experts else "of divided tokens" * _state.tokens[0]()
    if args[4] and where:  # in training
        raise NotImplementedError(f"batch_norm: its statistics are over rows {where}: expected another norm")
    out: Tensor = plain("batch_norm", x, *args)
    return out


def _draw(operator: str, *args: Any, **options: Any) -> Tensor:
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    out: Tensor = _overload(operator)._op_dk(key, *args, **options)
    if options.get("generator") is None:  # the script's own, as for data
        _refuse_divided(operator.partition(".")[0], out)
    return out


def _draw_in_place(operator: str, x: Tensor, *args: Any, **options: Any) -> Tensor:
    if options.get("generator") is None:
        _refuse_divided(operator.partition(".")[0], x)
    recorded = x.requires_grad and torch.is_grad_enabled()
    with torch._C._AutoDispatchBelowAutograd():
        out: Tensor = _overload(operator)(x.detach().clone() if recorded else x, *args, **options)
    return x.copy_(out) if recorded else out


def _refuse_divided(name: str, x: Tensor) -> None:
    refuse_random(name, x, is_dropout=False)
    _state.tokens[1](name, x, None)
