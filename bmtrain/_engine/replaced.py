"""Detection of optimizers that hold parameters replaced by the wrapper.

[Note: Optimizers made too early]
The wrapper replaces the model's parameters by distributed ones. An optimizer made before holds the old parameters,
which get no gradients any more: its steps would silently update nothing. The old parameters are marked, and each
optimizer is checked in its first step after a conversion.
"""

from __future__ import annotations

import functools
import warnings
import weakref
import zlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._base.opaque import opaque
from .._ranks import context
from ..global_var import rank

_MARK = "_bmtrain_replaced"


class ReplacedParameters:
    """Parameters replaced by the wrapper, and the optimizers that were found to hold none of them."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._replaced: list[weakref.ref[torch.nn.Parameter]] = []

    def add(self, param: torch.nn.Parameter) -> None:
        """Records that ``param`` was replaced by a distributed parameter."""
        param.__dict__[_MARK] = True
        self._replaced.append(weakref.ref(param))
        self._seen.clear()
        _install_hook()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks an optimizer before its first step.

        Raises:
            RuntimeError: it holds replaced parameters that nothing else trains.
        """
        if optimizer in self._seen:
            return
        self.look(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        stale = [
            p for p in params if _MARK in getattr(p, "__dict__", ()) and p.requires_grad and p.grad is None
        ]
        if stale:
            raise RuntimeError(
                f"{type(optimizer).__name__}: {len(stale)} of its {len(params)} parameters, the first of shape "
                f"{tuple(stale[0].shape)}, are no longer the model's: BMTrainModelWrapper has put distributed "
                "parameters in their places; make the optimizer after the model has been wrapped"
            )
        self._seen.add(optimizer)
        self._warn_of_used(set(map(id, params)))

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Drops checksums of parameters that were written before the first update, of which this is called."""
        if optimizer in self._seen:
            return
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            given_at = getattr(param, "_given_at", None)
            if given_at is not None:
                param._given_at = None
                if _is_written(param, given_at):
                    param._given = None

    def _warn_of_used(self, trained: set[int]) -> None:
        """Warns of replaced parameters that a backward has reached, and that are not in ``trained``."""
        alive = [param for reference in self._replaced if (param := reference()) is not None]
        used = [param for param in alive if param.grad is not None and id(param) not in trained]
        self._replaced = [weakref.ref(param) for param in alive if all(param is not other for other in used)]
        if used and rank() == 0:
            warnings.warn(
                f"the model computes with parameters that BMTrainModelWrapper has replaced ({len(used)}, the first of "
                f"shape {tuple(used[0].shape)}), and this optimizer does not train them: a list, a closure or an "
                "attribute that is no parameter refers to them. Read them from their modules in the forward "
                "(self.layer.weight)",
                stacklevel=6,
            )


def note_given(param: Any, whole: Any) -> None:
    """Records a checksum of elements of the tensor of which ``param`` keeps a part: all ranks must get the same.

    None of what is no tensor, of which ranks read their parts or get them from rank 0.
    """
    param._given, param._given_at = 0, None
    if isinstance(whole, torch.Tensor) and not (whole.is_meta or is_fake(whole)):
        step = max(1, whole.numel() // 64)
        if whole.is_contiguous():
            elements = whole.detach().view(-1)[::step]
        else:  # without a copy of the whole
            numbers = torch.arange(0, whole.numel(), step, device="cpu")
            elements = whole.detach()[torch.unravel_index(numbers, whole.shape)]
        param._given = zlib.crc32(repr(elements.tolist()).encode())


def forget_if_written(param: Any) -> None:
    """Lets later writes to the shard drop what :func:`note_given` has just recorded."""
    param._given_at = _writes(param)


def _writes(param: Any) -> tuple[int, int, int]:
    """Numbers of writes to the shard, of writes through ``.data`` (of all parameters of a Block), of reads of it."""
    data = (param if param._block is None else param._block)._data_version
    return param._version, 0 if data is None else data.num_writes, param._unversioned_writes


def _is_written(param: Any, before: tuple[int, int, int]) -> bool:
    own, through_data, reads = (now != then for now, then in zip(_writes(param), before, strict=True))
    return own or (through_data and reads)


@functools.cache
def _install_hook() -> None:
    """Registers the hook on all optimizers, once per process, independent of the context."""
    register_optimizer_step_pre_hook(_before_step)


@opaque
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    current = context.current()
    if current is not None:
        current.engine.check_optimizer(optimizer)
