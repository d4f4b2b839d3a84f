"""Reads of parameters outside blocks in one forward.

[Note: Reads of one forward]
The outermost forward of a distributed module, and each run of a block's forward, is a *scope* of reads. The first read
in a scope gathers all small parameters below the scope's module that no Block holds, in one message for each dtype and
group of ranks. One autograd node returns them, and its backward sums all their gradients in one message. A parameter
read again in the same scope is the same tensor, so its gradients add before the reduction. The gathered set depends on
the modules alone, never on the code that a rank runs, so all ranks send the same messages. Large parameters are
gathered one by one when they are read; parameters read more than once (tied weights) stay until the scope's end.

A block's run is a scope of its own because its nodes must lie inside its island, and in backward it runs again. So is a
call of a module that is in a block, while the block does not run: there its parameters are gathered one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from .._base.stand_in import StandIn
from .._ranks.context import require_gathering
from .._shards.block_ref import OWNER, BlockRef
from ..parameter import DistributedParameter
from .bundle import gather_together
from .uninitialised import Uninitialised

__all__ = ["SMALL_BYTES", "Reads"]

#: Parameters up to this full size (in bytes) are gathered together.
SMALL_BYTES = 256 * 1024

_Mode = tuple[bool, bool]  # grad mode, inference mode: a tensor read in one cannot be used in another


class _Known(NamedTuple):
    """The result of reading a parameter."""

    param: DistributedParameter  # kept: its identity is the key
    full: torch.Tensor
    versions: tuple[int, int, int, bool]

    def is_current(self) -> bool:
        return self.versions == _versions(self.param, self.full)


def _versions(param: DistributedParameter, full: torch.Tensor) -> tuple[int, int, int, bool]:
    written = 0 if param._data_version is None else param._data_version.value
    return _version(param), written, _version(full), param.requires_grad


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # tensors made in inference mode have none


class _Scope:
    """Reads of one running forward of ``root``.

    Attributes:
        owner: the Block that ``root`` is in.
    """

    __slots__ = ("_known", "_modes", "_outer", "_reads", "_root", "_times", "owner")

    def __init__(self, root: torch.nn.Module, reads: Reads) -> None:
        self._root = root
        self._reads = reads
        self._outer: _Scope | None = None
        self.owner: BlockRef | None = root.__dict__.get(OWNER)
        self._known: dict[tuple[int, _Mode], _Known] = {}
        self._modes: set[_Mode] = set()
        self._times: dict[int, int] = {}

    def __enter__(self) -> None:
        self._outer, self._reads.innermost = self._reads.innermost, self

    def __exit__(self, *_: object) -> None:
        self._reads.innermost, self._outer = self._outer, None

    def read(self, param: DistributedParameter) -> torch.Tensor:
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if mode not in self._modes:
            self._modes.add(mode)
            self._gather_small(mode)
        known = self._known.get((id(param), mode))
        if known is not None and known.is_current():
            return known.full
        full = param.gather()
        self._times[id(param)] = self._times.get(id(param), 0) + 1
        param._is_reread |= self._times[id(param)] > 1
        if param._is_reread or _is_small(param):
            self._keep(param, full, mode)
        return full

    def _keep(self, param: DistributedParameter, full: torch.Tensor, mode: _Mode) -> None:
        self._known[id(param), mode] = _Known(param, full, _versions(param, full))

    def _gather_small(self, mode: _Mode) -> None:
        places: dict[int, int] = {}
        together: dict[tuple[int, torch.dtype], list[DistributedParameter]] = {}
        for param in _outside_blocks(self._root):
            places[id(param)] = places.get(id(param), 0) + 1
            if places[id(param)] > 1:
                param._is_reread = True
            elif _is_small(param) and param._spec.layout is None and param._spec.group.size > 1:
                together.setdefault((id(param._spec.group), param.dtype), []).append(param)
        for members in together.values():
            if len(members) > 1:
                for param, full in zip(members, gather_together(members), strict=True):
                    self._keep(param, full, mode)


def _outside_blocks(root: torch.nn.Module) -> Iterator[DistributedParameter]:
    """Yields the parameters below ``root`` that have values and are in no Block, once for each module with one."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for param in module._parameters.values():
            if isinstance(param, DistributedParameter) and not (param.is_meta or param._is_full()):
                yield param
        waiting += [
            child
            for child in module._modules.values()
            if child is not None and not isinstance(child, StandIn)
        ]


def _is_small(param: DistributedParameter) -> bool:
    return param._original_shape.numel() * param.element_size() <= SMALL_BYTES


class Reads:
    """The open scopes.

    Attributes:
        innermost: the scope of the innermost running forward.
        uninitialised: parameters without values.
    """

    def __init__(self) -> None:
        self.innermost: _Scope | None = None
        self.uninitialised = Uninitialised()

    def belong_to(self, owner: BlockRef) -> bool:
        """Whether the innermost forward belongs to a Block, or to a module in it."""
        return self.innermost is not None and self.innermost.owner is owner

    def scope(self, root: torch.nn.Module) -> AbstractContextManager[None]:
        """Context manager for a forward of ``root``."""
        if self.uninitialised.before_forward and self.innermost is None:
            self.uninitialised.check_forward(root)
        return _Scope(root, self)

    def read(self, param: DistributedParameter) -> torch.Tensor:
        """Returns the full tensor of a parameter that has values. Collective."""
        require_gathering("reading a DistributedParameter")
        return self.innermost.read(param) if self.innermost is not None else param.gather()
