"""Which Block a parameter is in."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    import torch

    from ..parameter import DistributedParameter
    from .runtime import BlockRuntime

__all__ = ["OWNER", "BlockRef"]

OWNER = "_owner_block"  # in a module's __dict__: BlockRef of the Block that it was in when that was built


class BlockRef(weakref.ref[Any]):
    """How a parameter and its module refer to the Block that they are in. A copy refers to no Block.

    Attributes:
        homes: the storages of the Block's shards, by address: those of now, and of before as long as users hold them.
            No other storage can have such an address: a weak reference keeps it, though not the memory.
        members: the parameters in the Block.
        runtime: the Block's runtime, which a backward to come keeps alive longer than the Block.
    """

    homes: dict[int, StorageWeakRef]
    members: tuple[weakref.ref[DistributedParameter], ...] = ()
    runtime: weakref.ref[BlockRuntime] | None = None

    def __new__(cls, block: Any) -> BlockRef:
        reference = super().__new__(cls, block)
        reference.homes = {}
        return reference

    @property
    def is_bound(self) -> bool:
        """Whether the Block runs now, so that its parameters are full."""
        runtime = None if self.runtime is None else self.runtime()
        return runtime is not None and runtime.is_bound

    def add_home(self, shard: torch.Tensor) -> None:
        """Notes where shards lie now."""
        home = StorageWeakRef(shard.untyped_storage())
        self.homes = {place: known for place, known in self.homes.items() if not known.expired()}
        self.homes[home.cdata] = home

    @property
    def has_shards(self) -> bool:
        """Whether some parameter is a shard by its shape, so that no user has put full tensors in their place."""
        members = (reference() for reference in self.members)
        return any(param is not None and param.shape != param._original_shape for param in members)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return _no_block, ()


def _no_block() -> None:
    return None
