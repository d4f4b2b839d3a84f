"""References from parameters and modules to the Block that owns them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .data_version import DataVersion

#: Key in a module's `__dict__`, set when a module with an `OWNER` gets parameters that no Block gathers.
GREW = "_got_parameters_since"
#: Key in a module's `__dict__`: the `BlockRef` of the Block that was built around the module.
OWNER = "_owner_block"


class BlockRef(weakref.ref[Any]):
    """Weak reference of a parameter or module to the Block that owns it. A copy refers to no Block.

    Attributes:
        homes: the storages of the Block's shards by address: the current ones, and earlier ones while users hold them.
            A weak reference reserves the address (not the memory), so no other storage can have it.
        members: the parameters in the Block.
        runtime: returns the Block's `BlockState`, which a pending backward keeps alive longer than the Block, or None.
    """

    homes: dict[int, StorageWeakRef]
    members: tuple[weakref.ref[Any], ...] = ()
    runtime: Callable[[], Any]
    #: Version shared by all of these parameters; set when `.data` of one of them is first read.
    _data_version: DataVersion | None = None

    def __new__(cls, block: Any) -> BlockRef:
        reference = super().__new__(cls, block)
        reference.homes = {}
        reference.runtime = _no_block
        return reference

    @property
    def is_bound(self) -> bool:
        """Whether the Block is running, so that its parameters are full."""
        runtime = self.runtime()
        return runtime is not None and runtime.is_bound

    def add_home(self, shard: torch.Tensor) -> None:
        """Records the storage of ``shard`` as one of the Block's."""
        home = StorageWeakRef(shard.untyped_storage())
        self.homes = {place: known for place, known in self.homes.items() if not known.expired()}
        self.homes[home.cdata] = home

    @property
    def has_shards(self) -> bool:
        """Whether a parameter still has the shape of a shard (users have not replaced all by full tensors)."""
        members = (reference() for reference in self.members)
        return any(param is not None and param.shape != param._original_shape for param in members)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return _no_block, ()


def _no_block() -> None:
    return None


def multiplied_from_left(self: Any, other: Any) -> Any:
    """``__rmatmul__`` of parameters and their data, which each product ``x @ weight`` in a Block calls."""
    if torch.Tensor.dim(self) < 2:
        self._refuse_shard("matmul")
    return torch.Tensor.__matmul__(other, self)
