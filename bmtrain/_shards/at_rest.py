"""Checks of values on a drive, before others than transfers read them. See [Note: Blocks on a drive]."""

from __future__ import annotations

from typing import Any

import torch

from .._ranks.agree import failing_together


def finish_update(param: torch.Tensor) -> None:
    """Waits for a pending update of ``param``."""
    pending: Any = param.__dict__.get("_pending")
    if pending is not None:
        pending.finish()


def show(param: torch.Tensor, *, gradient: bool = False) -> None:
    """Waits for a pending update of ``param``, and compares its bytes on a drive, or its gradient's. Local.

    Raises:
        DiskError: they differ, or cannot be read; an update has failed.
    """
    finish_update(param)
    if wants_disk(param):
        param._block()._runtime.engine.drives.check()  # type: ignore[attr-defined]
    stored = stored_shard_of(param)
    if stored is None:
        return
    if gradient:
        stored.show_gradients()
    else:
        stored.show_parameters()


def stored_shard_of(param: Any) -> Any:
    """Returns the `StoredShard` on a drive that ``param`` is in, or None."""
    reference: Any = getattr(param, "_stored", None)
    return None if reference is None else reference()


def lacks_gradient(param: torch.Tensor) -> bool:
    """Whether an update inside backward has consumed the gradient, of which a drive has no copy."""
    stored = stored_shard_of(param)
    return stored is not None and bool(stored.lacks_gradients)


def zero_consumed(param: torch.Tensor) -> None:
    """Makes such gradients zeros: a conversion of the module reads them."""
    if lacks_gradient(param):
        finish_update(param)
        stored = stored_shard_of(param)
        stored.zero_gradients(stored.members)


def show_together(param: torch.Tensor, *, gradient: bool = False) -> None:
    """As `show`; all ranks raise the error. Collective for parameters on a drive, or whose state is."""
    if wants_disk(param):
        with failing_together("reading parameters on disk"):
            show(param, gradient=gradient)


def wants_disk(param: Any) -> bool:
    """Whether the policy of the parameter's Block, on any stage, puts optimizer state, at least, on a drive."""
    reference: Any = getattr(param, "_block", None)
    block = None if reference is None else reference()
    return block is not None and block._policy.optimizer == "disk"
