"""Global modes of a forward: autocast, random-number state, the default device, ``requires_grad``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

if TYPE_CHECKING:
    from .runtime import BlockRuntime

__all__ = ["ModeSnapshot", "NoAutocastCache", "trainable_as"]


class NoAutocastCache:
    """Disables autocast's cache, whose casts, keyed by parameter object, would be of an earlier gather."""

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._was_enabled)


@contextmanager
def trainable_as(runtime: BlockRuntime, trains: list[list[bool]]) -> Iterator[None]:
    """Restores the ``requires_grad`` that the parameters had in the first run."""
    changed = [
        (param, flag)
        for group, flags in zip(runtime.groups, trains, strict=True)
        if group.requires_grad() != flags
        for param, flag in zip(group.parameters, flags, strict=True)
        if param.requires_grad != flag
    ]
    for param, flag in changed:
        param.requires_grad_(flag)
    try:
        yield
    finally:
        for param, flag in changed:
            param.requires_grad_(not flag)


class ModeSnapshot:
    """Random-number and autocast state, and the default device, at the start of a forward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu_rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._autocast = _autocast_state(device)
        self._default_device = _default_device()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that restores the state of the snapshot, and afterwards the current one."""
        cpu_rng = torch.get_rng_state()
        cuda_rng = torch.cuda.get_rng_state(self._device) if self._cuda_rng is not None else None
        autocast = _autocast_state(self._device)
        default = self._default_device
        placing = nullcontext() if default == _default_device() else (default or torch.device("cpu"))
        try:
            torch.set_rng_state(self._cpu_rng)
            if self._cuda_rng is not None:
                torch.cuda.set_rng_state(self._cuda_rng, self._device)
            _set_autocast(self._autocast)
            with placing:
                yield
        finally:
            _set_autocast(autocast)
            torch.set_rng_state(cpu_rng)
            if cuda_rng is not None:
                torch.cuda.set_rng_state(cuda_rng, self._device)


def _default_device() -> torch.device | None:
    """Returns the default device of this thread, or None if none was set."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


_Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def _autocast_state(device: torch.device) -> _Autocast:
    kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _set_autocast(state: _Autocast) -> None:
    for kind, enabled, dtype in state:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
