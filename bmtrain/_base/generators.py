"""Seeding and restoring all random generators of a process."""

from __future__ import annotations

import hashlib
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


def seed_of(*values: int | bytes) -> int:
    """Returns a hash of values as a seed of 63 bits."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int) -> None:
    """Seeds ``torch`` (all its devices), ``random`` and, where there is one, ``numpy``."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def host_state() -> tuple[Any, Any]:
    """Returns the state of the generators of ``random`` and, where there is one, ``numpy``."""
    numpy = _numpy()
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_host_state(state: tuple[Any, Any]) -> None:
    """Restores a state of `host_state`."""
    numpy = _numpy()
    random.setstate(state[0])
    if numpy is not None and state[1] is not None:
        numpy.random.set_state(state[1])


def is_same_host_state(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether two states of `host_state` are equal."""
    return bool(one[0] == other[0]) and _of_numpy(one[1]) == _of_numpy(other[1])


def _of_numpy(state: Any) -> tuple[Any, ...]:
    return () if state is None else (state[1].tobytes(), *state[2:])


def generator_state() -> tuple[Any, Any, Any]:
    """Returns the state of the generators of ``torch`` on the CPU, ``random``, and ``numpy`` where there is one."""
    return torch.get_rng_state(), *host_state()


def set_generator_state(state: tuple[Any, Any, Any]) -> None:
    """Restores a state of `generator_state`."""
    torch.set_rng_state(state[0])
    set_host_state(state[1:])


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restores the state of the generators at the end; of torch, the generators of the CPU and of ``device``."""
    state = host_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            set_host_state(state)


@contextmanager
def own_numbers(place: int, device: torch.device) -> Iterator[None]:
    """Has the generators draw other numbers for each ``place``, which follow from torch's state on the CPU.

    At the end they have the state from before, but that torch's is one number on, if any was drawn.
    """
    with kept_generators(device):
        seed_generators(seed_of(torch.get_rng_state().numpy().tobytes(), place))
        before = _all_states(device)
        yield
        has_drawn = _all_states(device) != before
    if has_drawn:
        torch.rand(())


def _all_states(device: torch.device) -> tuple[Any, ...]:
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    numbers, of_numpy = host_state()
    return *(state.numpy().tobytes() for state in states), numbers, _of_numpy(of_numpy)
