"""Places of optimizers, one file each: where state lies and updates are computed. None knows the formula."""

from __future__ import annotations

from ..._shards.at_rest import wants_disk
from .device import OnDevice
from .disk import OnDisk
from .host import OnHost
from .owners import OnHostOwners, OnOwners
from .place import Place

__all__ = ["OnDevice", "OnDisk", "OnHost", "OnHostOwners", "OnOwners", "Place", "wants_disk"]
