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


@dataclass
class InitOptions:
    """The arguments of `init_distributed`, checked and normalised."""

    seed: int
    pipe_size: int
    pipe_enabled: bool
    micros: int
    tp_size: int
    ep_size: int
    zero_level: int
    backend: str
    timeout: float
    virtual_shards: int = 0
    survive: int = 0
    sp_size: int = 1
    tier_directories: tuple[str, ...] = ()

    @classmethod
    def check(
        cls,
        seed: int,
        pipe_size: int,
        num_micro_batches: int | None,
        tp_size: int,
        ep_size: int,
        zero_level: int | None,
        backend: str | None,
        timeout: float | timedelta,
        sp_size: int = 1,
    ) -> InitOptions:
        """Raises TypeError or ValueError, naming the argument."""
        sequence_ranks = require_integer("sp_size", sp_size, least=1)
        if sequence_ranks > 1 and max(pipe_size, tp_size, ep_size) > 1:
            raise ValueError(
                f"sp_size {sequence_ranks}: expected no pipeline, no tensor parallelism and no experts divided over "
                f"ranks beside it, got pipe_size {pipe_size}, tp_size {tp_size} and ep_size {ep_size}"
            )
        stages = require_integer("pipe_size", pipe_size)
        enabled = stages >= 1
        micros = max(stages, 1)
        if num_micro_batches is not None:
            given = require_integer("num_micro_batches", num_micro_batches, least=1)
            micros = given if enabled else 1
        if zero_level is not None:
            if zero_level not in (2, 3):
                raise ValueError(f"zero_level: expected 2 or 3, got {zero_level!r}")
            warn_once(
                "init_distributed.zero_level",
                "init_distributed(zero_level=...) is deprecated: write Block(module, zero_level=...)",
                stacklevel=3,
            )
        return cls(
            seed=_check_seed(seed),
            pipe_size=max(stages, 1),
            pipe_enabled=enabled,
            micros=micros,
            tp_size=max(require_integer("tp_size", tp_size), 1),
            ep_size=require_integer("ep_size", ep_size, least=1),
            zero_level=3 if zero_level is None else zero_level,
            backend=_choose_backend(backend),
            timeout=_seconds(timeout),
            sp_size=sequence_ranks,
        )


def check_directories(value: Sequence[str | os.PathLike[str]] | None, survive: int) -> tuple[str, ...]:
    """The directories of tiers; raises TypeError or ValueError, naming the argument."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"tier_directories: expected a list of directories, got {value!r}")
    if len(value) != 1:
        raise ValueError(
            f"tier_directories: expected one directory (several are not supported yet), got {len(value)}"
        )
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


def check_loss_scale(factor: float, steps: int) -> tuple[float, int]:
    """The factor and the interval of the loss scale; raises as documented at `init_distributed`."""
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
