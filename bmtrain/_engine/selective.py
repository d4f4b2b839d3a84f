"""Selective recomputation: results of matrix products and attention are kept.

[Note: Selective recomputation]
In the first run of a forward, a dispatch mode keeps the results of the operators below; in the second run another mode
returns them in place of the same operators, which then do not run. Operators between them (activation functions, norms,
dropout, residual sums) are recomputed. Results after the last saved tensor, which autograd does not need, are dropped
when the first run ends, as the second run stops there.

A result is reused only for the same operator on operands of the same kind (parameters: at the same place in the block),
and only if nothing has written to it since; otherwise the operator runs. Writes are detected at the operators that
write, and not by versions alone: `.data` and `unsafe_chunk`, which GRUs use, return tensors with versions of their own.
So whatever a forward does, kept results can make the second run cheaper, never different. An operator that draws random
numbers always runs, because the numbers after it depend on it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from .host_activations import HostActivations

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.convolution)
_BATCHED = (_aten.bmm, _aten.baddbmm)
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_fused_attention_overrideable,
    _aten._flash_attention_forward,
    _aten._efficient_attention_forward,
)


class _Kept(NamedTuple):
    """Result of an operator."""

    signature: tuple[Any, ...]
    result: Any
    version: int

    def is_unchanged(self) -> bool:
        return self.version == _version_of(self.result)


class KeptResults:
    """The kept results of one forward.

    Args:
        is_parameter: whether a tensor lies in the block's gathered buffers.
    """

    def __init__(self, is_parameter: Callable[[torch.Tensor], bool]) -> None:
        self._is_parameter = is_parameter
        self._kept: list[_Kept | None] = []  # None: to be recomputed
        self._places: dict[int, int] = {}  # indices of kept results, by storage
        self._host: HostActivations | None = None  # holds the results between the runs
        self._num_needed = 0
        self._next = 0
        self._is_lost = False

    def recording(self) -> TorchDispatchMode:
        """Returns the mode for the first run."""
        return uncompiled(_Recording, self)

    def giving_out(self) -> TorchDispatchMode:
        """Returns the mode for a second run."""
        self._next, self._is_lost = 0, False
        return uncompiled(_GivingOut, self)

    def keep(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Keeps the result of the next expensive operator."""
        result = _shared(result)
        for storage in _storages_of(result):
            self._places[storage] = len(self._kept)
        self._kept.append(_Kept(self._signature(func, args), result, _version_of(result)))

    def note_write(self, target: Any) -> None:
        """Records that an operator writes to ``target``: kept results in its memory must be recomputed."""
        for storage in _storages_of(target) if self._places else ():
            if storage in self._places:
                self._kept[self._places[storage]] = None

    def take(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Returns the result of the next operator, or None if it must run."""
        index, self._next = self._next, self._next + 1
        kept = self._kept[index] if index < len(self._kept) and not self._is_lost else None
        if kept is None:
            return None
        if kept.signature != self._signature(func, args):
            self._is_lost = True  # the forward took another path
            return None
        if self._host is not None:
            return self._host.take_all(kept.result)
        return _shared(kept.result) if kept.is_unchanged() else None

    def note_need(self) -> None:
        """Records that autograd saves a tensor: results computed so far may be needed for it."""
        self._num_needed = len(self._kept)

    def drop_unneeded(self) -> None:
        """Drops, at the end of the first run, the results that a second run cannot use."""
        self._kept = [
            kept if kept is not None and kept.is_unchanged() else None
            for kept in self._kept[: self._num_needed]
        ]
        self._places.clear()

    def put_away(self, host: HostActivations) -> None:
        """Moves the kept results to ``host`` until the second run."""
        self._host = host
        self._kept = [
            None if kept is None else kept._replace(result=host.put_all(kept.result)) for kept in self._kept
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Returns all kept tensors."""
        for kept in self._kept:
            if kept is not None:
                yield from (leaf for leaf in tree_leaves(kept.result) if isinstance(leaf, torch.Tensor))

    def drop(self) -> None:
        """Frees all kept results."""
        self._kept = []

    def _signature(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return func, *(
            (arg.shape, arg.dtype, arg.storage_offset() if self._is_parameter(arg) else -1)
            for arg in args
            if isinstance(arg, torch.Tensor)
        )


class _Recording(TorchDispatchMode):
    def __init__(self, results: KeptResults) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for index, name in _written_by(func):
            self._results.note_write(args[index] if index < len(args) else kwargs.get(name))
        if is_expensive(func, args, kwargs):
            self._results.keep(func, args, result)
        return result


class _GivingOut(TorchDispatchMode):
    def __init__(self, results: KeptResults) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._results.take(func, args) if is_expensive(func, args, kwargs) else None
        return func(*args, **kwargs) if result is None else result


def uncompiled(mode: Any, owner: Any) -> TorchDispatchMode:
    """Returns the mode without torch's wrapper, which imports the compiler to keep it away, until that is imported."""
    made: TorchDispatchMode = (mode if "torch._dynamo" in sys.modules else _unwrapped(mode))(owner)
    return made


@functools.cache
def _unwrapped(mode: Any) -> Any:
    made: Any = type(mode.__name__, (mode,), {})
    made.__torch_dispatch__ = getattr(mode.__torch_dispatch__, "__wrapped__", mode.__torch_dispatch__)
    return made


def is_expensive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operator's result is kept rather than recomputed."""
    packet = getattr(func, "overloadpacket", None)
    if _written_by(func):
        return False
    if packet in _PRODUCTS:
        return True
    if packet in _BATCHED:
        one, other = args[-2:]
        # The scores of attention over long sequences are larger than their operands.
        return bool(one.shape[0] * one.shape[1] * other.shape[2] <= one.numel() + other.numel())
    return packet in _ATTENTION and not _dropout_of(func, args, kwargs)


@functools.cache
def _written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Returns the arguments that an operator writes to."""
    schema = getattr(func, "_schema", None)
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(() if schema is None else schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _dropout_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return float(given)
    return 0.0


def _shared(result: Any) -> Any:
    """Returns aliases of the same memory and version counter, without a history."""
    # Below autograd a view shares the version only on request.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _storages_of(tensors: Any) -> list[int]:
    return [
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(tensors)
        if isinstance(leaf, torch.Tensor) and torch._C._has_storage(leaf)
    ]


def _version_of(result: Any) -> int:
    return sum(leaf._version for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
