"""Tables of functions with a right call each, and of what is wrong for each kind of argument."""

from __future__ import annotations

from collections.abc import Callable

from .core import classes, operators, updates
from .exchange import collectives
from .files import checkpoints, model_files, objects
from .helpers import helpers
from .inspecting import inspection
from .kinds import WRONG, Calls
from .left_out import LEFT_OUT
from .models import layers, losses, tokens, wrappers
from .planning import conversions, plans
from .storage import storage
from .training import managers, momentum_optimizers, optimizers, schedules

__all__ = ["LEFT_OUT", "TABLES", "WRONG", "Calls"]

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
        tokens,
        model_files,
        objects,
        checkpoints,
        operators,
        updates,
        classes,
        storage,
        inspection,
        helpers,
        plans,
        conversions,
    )
}
