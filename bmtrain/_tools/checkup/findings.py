"""The inputs and findings of checks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..._base import build as _build
from ..._base.host_memory import available_bytes


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Args:
        name: the subject of the check.
        found: the finding, or the problem.
        remedy: what to do; empty if nothing is wrong.
    """

    name: str
    found: str
    remedy: str = ""

    @property
    def is_problem(self) -> bool:
        return bool(self.remedy)


def _own_processors() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class Surroundings:
    """The inputs of the checks; tests put problems here.

    Args:
        environ: environment variables.
        build: as :func:`bmtrain.build_info` gives it.
        sources: of the core.
        shared_memory: the folder that is shared memory.
        driver: a path that exists where the NVIDIA driver is installed.
        nodes: the folder that lists the machine's memories and the processors near each.
        processors: indices of the processors that this process may run on.
        available_memory: bytes that are left.
        tier_directories: whose drives are measured.
        clock: seconds since the epoch.
        timeout: seconds in which ranks must meet.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    build: Mapping[str, object] = field(default_factory=_build.build_info)
    sources: Path = Path(__file__).parents[2] / "csrc"
    shared_memory: Path = Path("/dev/shm")
    driver: Path = Path("/proc/driver/nvidia/version")
    nodes: Path = Path("/sys/devices/system/node")
    processors: Callable[[], set[int]] = _own_processors
    available_memory: Callable[[], int] = available_bytes
    tier_directories: Sequence[str] = ()
    clock: Callable[[], float] = time.time
    timeout: float = 10.0
