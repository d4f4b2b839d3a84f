"""Checks of values on a drive, before others than transfers read them. See [Note: Blocks on a drive]."""

from __future__ import annotations

from typing import Any

import torch

from .._ranks.agree import failing_together


def show(param: torch.Tensor, *, gradient: bool = False) -> None:
    """Compares the bytes of ``param``, or of its gradient, with the written ones, if they are on a drive. Local.

    Raises:
        DiskError: they differ, or cannot be read.
    """
    reference: Any = getattr(param, "_stored", None)
    stored = None if reference is None else reference()
    if stored is None:
        return
    if gradient:
        stored.show_gradients()
    else:
        stored.show_parameters()


def show_together(param: torch.Tensor, *, gradient: bool = False) -> None:
    """As `show`; all ranks raise the error. Collective for parameters on a drive."""
    if getattr(param, "_stored", None) is not None:
        with failing_together("reading parameters on disk"):
            show(param, gradient=gradient)
