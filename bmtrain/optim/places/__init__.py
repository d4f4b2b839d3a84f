"""Places of optimizers, one file each: where state lies and updates are computed. None knows the formula."""

from __future__ import annotations

from .device import OnDevice
from .host import OnHost
from .owners import OnOwners
from .place import Place

__all__ = ["OnDevice", "OnHost", "OnOwners", "Place"]
