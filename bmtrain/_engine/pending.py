"""Parameters with a pending optimizer update.

[Note: Updates that overlap]
`AdamOffloadOptimizer.step` hands the updates to workers of the core and returns. No code may see an unfinished one:

- A block waits for its own parameters before it is gathered: `BlockState.pending`.
- Any other access reaches the parameter object. While its update is pending the object's class is a subclass whose
  ``__torch_function__`` runs before every operation and attribute of torch; it waits, restores the object's class, and
  continues with the access. So an access costs nothing without a pending update.
- A backward through a graph recorded before the step changes gradients without touching the parameter object; its
  accumulation node waits (`OffloadUpdate.guard_gradients`).
- Accesses through other tensors of the same memory (a detached alias, a gradient) cannot be detected; the optimizer
  counts such references before it posts an update, and computes it at once if there are any
  (`optim/places/overlap/references.py`). Every rank decides by itself: no message and no bit depends on the answer,
  only the time of the computation.
"""

from __future__ import annotations

import atexit
import copy
import os
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from .block_state import BlockState


class PendingUpdate:
    """The pending update of one block's parameters, or of parameters outside blocks.

    Args:
        update: the computation, about to be posted; an `OffloadUpdate` or alike.
        parameters: the parameters that it changes.
        tensors: other tensors that must live until it has ended.
        runtime: runtime of the block, or None outside blocks.
    """

    __slots__ = ("_runtime", "_tensors", "parameters", "update")

    def __init__(
        self, update: Any, parameters: Sequence[torch.Tensor], tensors: Any, runtime: BlockState | None
    ) -> None:
        self.update = update
        self.parameters = tuple(parameters)
        self._tensors = tensors
        self._runtime = runtime
        for p in parameters:
            p.__dict__["_pending"] = self
            p.__class__ = _pending_class(type(p))
        if runtime is not None:
            runtime.pending.append(self)

    def finish(self) -> None:
        """Waits for the update (and helps to compute it), then restores the parameters' class.

        Raises:
            RuntimeError: a worker failed; the parameters hold a mixture of old and new values.
        """
        if self.is_finished:
            return
        try:
            self.update.wait()
        finally:
            for p in self.parameters:
                if p.__dict__.pop("_pending", None) is not None:
                    p.__class__ = type(p)._class_at_rest  # type: ignore[attr-defined]
            if self._runtime is not None and self in self._runtime.pending:
                self._runtime.pending.remove(self)
            self._tensors = None

    def finish_together(self) -> None:
        """As `finish`, for the block; a failure that all ranks raise soon is not raised."""
        self.finish()

    def end(self) -> None:
        """Ends it as the process exits."""
        self.finish()

    def __del__(self) -> None:
        """Waits, because the workers write to memory that this object owns."""
        if not self.is_finished:
            self.finish()

    @property
    def is_finished(self) -> bool:
        return self._tensors is None

    @property
    def is_done(self) -> bool:
        """Whether `finish_together` is known not to wait."""
        return self.is_finished

    def zero_gradients_afterwards(self) -> bool:
        """Zeroes the gradients once they have been used; returns False if the update has begun."""
        begins_later: bool = self.update.zero_gradients_afterwards()
        return begins_later


class PendingUpdates:
    """The pending updates of one owner, in order of computation."""

    def __init__(self) -> None:
        self._updates: list[PendingUpdate] = []
        _finish_before_exit_and_fork()
        _owners.add(self)

    def __del__(self) -> None:
        """Completes the updates: a block with a pending update is in a cycle that the garbage collector cannot see."""
        self.finish()

    def __iter__(self) -> Any:
        return iter(tuple(self._updates))

    def add(self, updates: Iterable[PendingUpdate]) -> None:
        """Takes over updates that have been posted."""
        self._updates = [u for u in self._updates if not u.is_finished]
        self._updates += updates

    def finish(self) -> None:
        """Waits for all updates, then raises the first error."""
        error: BaseException | None = None
        while self._updates:
            try:
                self._updates[0].finish()
            except RuntimeError as failure:
                error = error or failure
            del self._updates[:1]
        if error is not None:
            raise error

    def end(self) -> None:
        """Ends all updates as the process exits."""
        while self._updates:
            self._updates.pop(0).end()


_owners: weakref.WeakSet[PendingUpdates] = weakref.WeakSet()


@cache
def _finish_before_exit_and_fork() -> None:
    """Registers waits: a forked child has no workers, and an exiting process frees memory that they write to."""
    atexit.register(_end_all)
    os.register_at_fork(before=_finish_all)


def _end_all() -> None:
    for owner in tuple(_owners):
        owner.end()


def _finish_all() -> None:
    for owner in tuple(_owners):
        owner.finish()


#: Attributes and methods that tell nothing about values, which an update leaves as they are.
_SIZES = ("shape", "size", "numel", "dim", "ndim", "stride", "itemsize", "element_size", "is_contiguous")
_KINDS = ("dtype", "device", "layout", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_floating_point")
_LOOKS = {*_SIZES, *_KINDS, "is_leaf", "requires_grad"}


def _name_of(func: Any) -> str:
    """Returns the name of a function of torch, or of the attribute that it gets."""
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


class _Pending:
    """Base class added to a parameter's class while its update is pending."""

    _class_at_rest: type

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _name_of(func) in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _finish_all_in(args)
        _finish_all_in(kwargs)
        return func(*args, **kwargs)

    @property
    def _spec(self) -> Any:  # the first that a gather reads, on all ranks
        self.__dict__["_pending"].finish_together()
        return self._spec

    @_spec.setter
    def _spec(self, value: Any) -> None:
        _at_rest(self)._spec = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_at_rest(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _at_rest(self).__reduce_ex__(protocol)

    def __hash__(self) -> int:  # torch's own would wait; hashing reads no values
        return id(self)


@cache
def _pending_class(cls: type) -> type:
    attributes = {"_class_at_rest": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (_Pending, cls), attributes)


def _at_rest(param: Any) -> Any:
    param.__dict__["_pending"].finish()
    return param


def _finish_all_in(value: Any) -> None:
    """Waits for every pending parameter in (nested) arguments of a function of torch."""
    if isinstance(value, _Pending):
        _at_rest(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _finish_all_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            _finish_all_in(item)
