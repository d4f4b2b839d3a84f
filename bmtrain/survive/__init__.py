"""Interface of scripts to a job that continues without lost ranks, ``init_distributed(survive=1)``.

Without ``survive=1`` the functions here do nothing, so that a script is the same with and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .._base.arguments import require_callable, require_integer
from ..global_var import context

__all__ = ["exceptions", "register", "steps"]


def exceptions() -> None:
    """Lets the other ranks continue after an exception that one rank does not catch, as after its death.

    The rank prints its traceback and ends with status 1. Without this call an exception ends the job: all ranks may be
    about to raise it. All ranks call this.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`.

    Example:
        >>> bmtrain.survive.exceptions()
    """
    survival = context("survive.exceptions").survival
    if survival is not None:
        survival.exceptions_are_losses = True


def register(name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
    """Registers state of the script that a repeated step, or a process that joins, must find as it was.

    Before each loop over virtual shards ``get`` is called. If a rank is lost and the loop starts again, ``set`` gets
    that value, so that a change by the body happens once. A process that takes a lost rank's place gets the
    value of rank 0. Parameters, optimizers, schedules and random generators need no registration.

    Args:
        name: of the state; registering it again replaces the functions.
        get: returns the state, which is copied: anything that can be pickled.
        set: takes a state.

    Raises:
        TypeError: ``get`` or ``set`` cannot be called.
        RuntimeError: before :func:`bmtrain.init_distributed`.

    Example:
        >>> counts = {"tokens": 0}
        >>> bmtrain.survive.register("counts", counts.copy, counts.update)
    """
    for what, function in (("get", get), ("set", set)):
        require_callable(what, function)
    survival = context("survive.register").survival
    if survival is not None:
        survival.user_state[str(name)] = get, set


def steps(stop: int, start: int = 0) -> Iterator[int]:
    """Yields the numbers of the steps, between which a process may take the place of a lost rank.

    On the ranks of the job these are the numbers from ``start``. A process that waits for a place (``bmtrain launch
    --survive 1 --restarts N`` starts it, or the environment variable ``BMTRAIN_JOIN``) has run the script up to here as
    the only rank of its own; here it waits, gets everything from the other ranks, and continues with their next step.
    Before this call the script adds all groups of parameters, and sets options that need arrays (momentum, amsgrad).

    Args:
        stop: number of steps.
        start: the first one, for instance the step of a loaded checkpoint.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`; or in a process that waits, without an optimizer.
        CommunicationError: a rank was lost while another one joined, or the process has other parameters or groups.

    Example:
        >>> list(bmtrain.survive.steps(3, start=1))
        [1, 2]
    """
    survival = context("survive.steps").survival
    stop, start = require_integer("stop", stop), require_integer("start", start)
    return iter(range(start, stop)) if survival is None else survival.steps(start, stop)
