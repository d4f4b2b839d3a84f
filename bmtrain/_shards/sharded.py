"""Protocol of sharded parameters for the functions of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .sharding import ShardSpec


class Sharded(Protocol):
    """The attributes of :class:`bmtrain.DistributedParameter` that describe its shard."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def is_meta(self) -> bool: ...

    @property
    def _spec(self) -> ShardSpec: ...

    @property
    def _block(self) -> Callable[[], Any] | None: ...

    @property
    def _gradient_hooks(self) -> Mapping[int, Any] | None: ...

    def require_data(self, name: str = "") -> None: ...
