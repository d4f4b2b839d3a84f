"""The arguments of `init_distributed` and their checks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from .._base.arguments import require_integer
from .._base.deprecate import warn_once
from ..topology import Topology


@dataclass(frozen=True)
class InitOptions:
    """The arguments of `init_distributed`, checked and normalised."""

    seed: int
    sizes: dict[str, int]
    pipe_enabled: bool
    micros: int
    zero_level: int
    loss_scale: tuple[float, int]
    backend: str
    timeout: float
    virtual_shards: int
    survive: int
    tier_directories: tuple[str, ...]

    @classmethod
    def check(
        cls,
        *,
        seed: int,
        pipe_size: int,
        num_micro_batches: int | None,
        tp_size: int,
        ep_size: int,
        sp_size: int,
        zero_level: int | None,
        loss_scale: tuple[float, int],
        backend: str | None,
        timeout: float | timedelta,
        virtual_shards: int | None,
        survive: int,
        tier_directories: Sequence[str | os.PathLike[str]] | None,
    ) -> InitOptions:
        """Raises TypeError or ValueError, naming the argument."""
        stages = require_integer("pipe_size", pipe_size)
        sizes = {
            "pipe_size": max(stages, 1),
            "tp_size": max(require_integer("tp_size", tp_size), 1),
            "ep_size": require_integer("ep_size", ep_size, least=1),
            "sp_size": require_integer("sp_size", sp_size, least=1),
        }
        micros = sizes["pipe_size"]
        if num_micro_batches is not None:
            given = require_integer("num_micro_batches", num_micro_batches, least=1)
            micros = given if stages >= 1 else 1
        backend = _choose_backend(backend)
        shards = _check_virtual_shards(virtual_shards, sizes, micros)
        may_lose = _check_survive(survive, shards, sizes)
        return cls(
            seed=_check_seed(seed),
            sizes=sizes,
            pipe_enabled=stages >= 1,
            micros=micros,
            zero_level=_check_level(zero_level),
            loss_scale=_check_loss_scale(*loss_scale),
            backend=backend,
            timeout=_seconds(timeout),
            virtual_shards=shards,
            survive=may_lose,
            tier_directories=_check_directories(tier_directories, may_lose),
        )

    def topology(self, rank: int, world_size: int) -> Topology:
        """The place of a rank. Raises ValueError for a number of ranks that the sizes do not allow."""
        place = Topology(rank, world_size, **self.sizes)
        if self.virtual_shards and self.virtual_shards < place.dp_size:
            sharing = world_size // place.dp_size
            number = "ranks" if sharing == 1 else f"groups of {sharing} ranks that share a batch"
            raise ValueError(
                f"virtual_shards: expected at least the number of {number} ({place.dp_size}), got {self.virtual_shards}"
            )
        return place

    def to_compare(self) -> dict[str, object]:
        """The arguments that must be equal on all ranks."""
        return {
            **self.sizes,
            "pipe_enabled": self.pipe_enabled,
            "num_micro_batches": self.micros,
            "zero_level": self.zero_level,
            "backend": self.backend,
            "virtual_shards": self.virtual_shards,
            "survive": self.survive,
            "number of tier_directories": len(self.tier_directories),
        }


def _check_virtual_shards(count: int | None, sizes: dict[str, int], micros: int) -> int:
    """The number of virtual shards, 0 for None."""
    if count is None:
        return 0
    number = require_integer("virtual_shards", count, least=1)
    if sizes["pipe_size"] > 1 and micros != sizes["pipe_size"]:
        raise ValueError(
            f"num_micro_batches: expected pipe_size ({sizes['pipe_size']}) with virtual_shards, of which each is a "
            f"micro-batch, got {micros}"
        )
    return number


def _check_survive(survive: int, virtual_shards: int, sizes: dict[str, int]) -> int:
    number = require_integer("survive", survive)
    if number not in (0, 1):
        raise ValueError(f"survive: expected 0 or 1, got {number}")
    if number and not virtual_shards:
        raise ValueError(
            "survive: expected virtual_shards=, which make a step independent of the number of ranks"
        )
    if number and max(sizes.values()) > 1:
        raise ValueError(
            "survive: expected no layers, sequences or experts divided over ranks, got "
            + ", ".join(f"{name} {size}" for name, size in sizes.items())
        )
    return number


def _check_level(zero_level: int | None) -> int:
    if zero_level is None:
        return 3
    if zero_level not in (2, 3):
        raise ValueError(f"zero_level: expected 2 or 3, got {zero_level!r}")
    warn_once(
        "init_distributed.zero_level",
        "init_distributed(zero_level=...) is deprecated: write Block(module, zero_level=...)",
        stacklevel=4,
    )
    return zero_level


def _check_directories(value: Sequence[str | os.PathLike[str]] | None, survive: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"tier_directories: expected a list of directories, got {value!r}")
    if not value:
        raise ValueError("tier_directories: expected one directory or more, got none")
    if survive:
        raise ValueError(f"tier_directories: cannot be combined with survive yet, got survive={survive}")
    return tuple(os.path.abspath(os.fspath(directory)) for directory in value)


def _check_seed(seed: int) -> int:
    seed = require_integer("seed", seed)
    if not -(2**63) <= seed < 2**64:  # what torch takes
        raise ValueError(f"seed: expected a number of 64 bits, got {seed}")
    return seed


def _seconds(timeout: float | timedelta) -> float:
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"timeout: expected seconds or a timedelta, got {timeout!r} ({type(timeout).__name__})"
        )
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout: expected a positive, finite number of seconds, got {timeout!r}")
    return float(timeout)


def _check_loss_scale(factor: float, steps: int) -> tuple[float, int]:
    """The factor, 1 or more, and the interval of the loss scale."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"loss_scale_factor: expected a number, got {factor!r} ({type(factor).__name__})")
    if not 0 < factor < math.inf:
        raise ValueError(f"loss_scale_factor: expected a positive, finite number, got {factor!r}")
    steps = require_integer("loss_scale_steps", steps, least=1)
    return (1 / factor if factor < 1 else factor), steps


def _choose_backend(backend: str | None) -> str:
    name = "backend"
    if backend is None and os.environ.get("BMTRAIN_BACKEND"):
        name, backend = "environment variable BMTRAIN_BACKEND", os.environ["BMTRAIN_BACKEND"]
    if backend not in (None, "nccl", "gloo"):
        raise ValueError(f"{name}: expected 'nccl', 'gloo' or None, got {backend!r}")
    if torch.version.hip is not None and torch.cuda.is_available() and backend != "gloo":
        raise ValueError(
            f"{name}: torch {torch.__version__} is built for ROCm, whose GPUs are not supported: neither RCCL nor "
            "kernels; use 'gloo' (BMTRAIN_BACKEND=gloo), which connects ranks through the host and computes with "
            "torch's operations"
        )
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if backend == "nccl" and not has_gpu:
        raise ValueError(f"{name}: 'nccl' needs a usable CUDA device, got none: use 'gloo'")
    return backend or ("nccl" if has_gpu else "gloo")
