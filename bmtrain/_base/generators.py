"""Seeding and restoring all random generators of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


def _numpy() -> ModuleType | None:
    try:
        import numpy
    except ImportError:
        return None
    module: ModuleType = numpy
    return module


def seed_generators(seed: int) -> None:
    """Seeds ``torch`` (all its devices), ``random`` and, where there is one, ``numpy``."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def generator_state() -> tuple[Any, Any, Any]:
    """Returns the state of the generators of ``torch`` on the CPU, ``random``, and ``numpy`` where there is one."""
    numpy = _numpy()
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def set_generator_state(state: tuple[Any, Any, Any]) -> None:
    """Restores a state of `generator_state`."""
    numpy = _numpy()
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if numpy is not None and state[2] is not None:
        numpy.random.set_state(state[2])


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restores the state of the generators at the end; of torch, the generators of the CPU and of ``device``."""
    numpy, python = _numpy(), random.getstate()
    arrays = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)
