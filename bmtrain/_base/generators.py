"""Seeding and restoring all random generators of a process."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

#: Length of a packed state: torch's takes 5 kB, and `random`'s and `numpy`'s at most 7 kB.
PACKED_BYTES = 16_384


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


def packed_generators(device: torch.device) -> torch.Tensor:
    """Returns the state of all generators, in torch for the CPU and ``device``, as bytes on ``device``."""
    states = [state.numpy().tobytes() for state in _torch_states(device)]
    data = pickle.dumps((states, host_state())).ljust(PACKED_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def unpack_generators(packed: torch.Tensor) -> None:
    """Restores a state of `packed_generators`, on the same kind of device."""
    (of_torch, *of_card), of_host = pickle.loads(packed.cpu().numpy().tobytes())
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    for state in of_card:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), packed.device)
    set_host_state(of_host)


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
    numbers, of_numpy = host_state()
    return *(state.numpy().tobytes() for state in _torch_states(device)), numbers, _of_numpy(of_numpy)


def _torch_states(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
