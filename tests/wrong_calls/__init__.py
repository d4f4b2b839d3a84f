"""Tables of functions with a right call each, and of what is wrong for each kind of argument."""

from __future__ import annotations

from collections.abc import Callable

from .core import classes, operators, updates
from .exchange import collectives
from .files import checkpoints, model_files
from .inspecting import inspection
from .kinds import WRONG, Calls
from .models import layers, losses, wrappers
from .storage import storage
from .training import managers, momentum_optimizers, optimizers, schedules

__all__ = ["TABLES", "WRONG", "Calls"]

TABLES: dict[str, Callable[[], Calls]] = {
    table.__name__: table
    for table in (
        collectives,
        optimizers,
        momentum_optimizers,
        managers,
        schedules,
        wrappers,
        layers,
        losses,
        model_files,
        checkpoints,
        operators,
        updates,
        classes,
        storage,
        inspection,
    )
}
