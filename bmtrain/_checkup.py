"""What ``python -m bmtrain doctor`` looks at: each check finds a fact, or a problem and its remedy."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import _C, _build, _comm, _context
from .errors import BMTrainError

__all__ = ["Check", "Surroundings", "check_up"]

_NCCL_MINIMUM = (2, 19)
_MIN_SHARED_MEMORY = 64 << 20  # what torch's data loaders and ranks of one host exchange at least
_MIN_MEMORY = 1 << 30
_MAX_SKEW_SECONDS = 1.0


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Args:
        name: what was looked at.
        found: what is there, or what is wrong.
        remedy: what to do; empty if nothing is wrong.
    """

    name: str
    found: str
    remedy: str = ""

    @property
    def is_problem(self) -> bool:
        return bool(self.remedy)


def _available_memory() -> int:
    """Bytes that a new process could use: of the machine, or of the control group that limits this one."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, limit - used)
    return available


@dataclass(frozen=True)
class Surroundings:
    """What the checks look at; tests put problems here.

    Args:
        environ: environment variables.
        build: as :func:`bmtrain.build_info` gives it.
        sources: of the core.
        shared_memory: the folder that is shared memory.
        available_memory: bytes that are left.
        clock: seconds since the epoch.
        timeout: seconds in which ranks have to meet.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    build: Mapping[str, object] = field(default_factory=_build.build_info)
    sources: Path = Path(__file__).parent.parent / "csrc"
    shared_memory: Path = Path("/dev/shm")
    available_memory: Callable[[], int] = _available_memory
    clock: Callable[[], float] = time.time
    timeout: float = 10.0


def check_up(here: Surroundings) -> Iterator[Check]:
    """Look at everything that training needs. With several ranks each of them has to call it."""
    for check in (
        check_torch,
        check_compiler,
        check_extension,
        check_processor,
        check_cuda,
        check_nccl,
        check_shared_memory,
        check_transport,
        check_memory,
        check_port,
    ):
        try:
            yield check(here)
        except Exception as error:  # a check that fails is a finding, not the end of the report
            yield Check(
                check.__name__.removeprefix("check_"), f"{type(error).__name__}: {error}", "report this"
            )
    yield from _check_ranks(here)


def check_torch(here: Surroundings) -> Check:
    """The core fits the torch that is running."""
    built, running = here.build.get("torch"), str(here.build.get("running_torch"))
    found = f"bmtrain {here.build.get('version')}, torch {running}"
    if built is not None and str(built).partition("+")[0] != running.partition("+")[0]:
        return Check(
            "torch",
            f"{found}, but the core was built for torch {built}",
            f"install torch {built}, or rebuild: {_BUILD}",
        )
    return Check("torch", found)


_BUILD = "pip install -e . --no-build-isolation"


def check_compiler(here: Surroundings) -> Check:
    """There is a C++ compiler, to build the core again or for torch.compile."""
    wanted = here.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        path = shutil.which(name, path=here.environ.get("PATH", os.defpath))
        if path is not None:
            version = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=False, timeout=20
            )
            return Check("compiler", (version.stdout or path).splitlines()[0])
    what = f"CXX={wanted} is not a program" if wanted else "no C++ compiler"
    return Check("compiler", what, "install one (Debian, Ubuntu: apt-get install g++), or let CXX name yours")


def check_extension(here: Surroundings) -> Check:
    """The core is not older than its sources."""
    extension = Path(str(here.build["extension"]))
    built = extension.stat().st_mtime if extension.exists() else 0.0
    sources = [
        path for path in here.sources.rglob("*") if path.suffix in (".cpp", ".h", ".inl", ".cu", ".cuh")
    ]
    newer = [path for path in sources if path.stat().st_mtime > built]
    if newer:
        return Check(
            "core",
            f"{extension.name} is older than {newer[0].name} and {len(newer) - 1} more sources",
            f"build it again: {_BUILD}",
        )
    return Check("core", str(extension))


def check_processor(here: Surroundings) -> Check:
    """The kernels' instruction level is one that this processor has."""
    highest = _C.highest_cpu_isa()
    forced = here.environ.get("BMTRAIN_CPU_ISA", "")
    levels = ("base", "avx2", "avx512")
    if forced and (forced not in levels or levels.index(forced) > levels.index(highest)):
        return Check(
            "processor",
            f"BMTRAIN_CPU_ISA={forced} is more than this processor has ({highest})",
            f"unset BMTRAIN_CPU_ISA, or set it to {highest} or less",
        )
    return Check("processor", f"kernels for {forced or highest}, {torch.get_num_threads()} threads")


def check_cuda(here: Surroundings) -> Check:
    """What devices there are; none is not a problem."""
    if not torch.cuda.is_available():
        return Check("devices", "no usable GPU: ranks compute on the CPU")
    count, built = torch.cuda.device_count(), here.build.get("cuda")
    found = f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    if built is None:
        return Check(
            "devices",
            f"{found}, but the core was built without CUDA",
            f"install nvcc {torch.version.cuda}, then {_BUILD}",
        )
    return Check("devices", found)


def check_nccl(here: Surroundings) -> Check:
    """NCCL is there where it is needed, and new enough."""
    named = here.environ.get("BMTRAIN_NCCL_LIBRARY")
    remedy = (
        "install a newer one (pip install nvidia-nccl-cu13, or -cu12, as torch.version.cuda says), or let "
        "BMTRAIN_NCCL_LIBRARY name it"
    )
    tried = [named] if named else [*_nccl_wheel(), "libnccl.so.2"]
    for path in tried:
        try:
            library = ctypes.CDLL(path)
            version = ctypes.c_int()
            library.ncclGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            continue
        code = version.value
        number = (code // 10000, code % 10000 // 100) if code >= 10000 else (code // 1000, code % 1000 // 100)
        found = f"NCCL {number[0]}.{number[1]}.{code % 100} at {path}"
        if number < _NCCL_MINIMUM:
            return Check("NCCL", f"{found}, expected at least {_NCCL_MINIMUM[0]}.{_NCCL_MINIMUM[1]}", remedy)
        return Check("NCCL", found)
    if named:
        return Check("NCCL", f"BMTRAIN_NCCL_LIBRARY={named} cannot be opened as one", remedy)
    if torch.cuda.is_available():
        return Check("NCCL", "not found", remedy)
    return Check("NCCL", "not found, and not needed without GPUs")


def _nccl_wheel() -> list[str]:
    """The library of the nvidia-nccl package."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ImportError:
        return []
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    return [str(path) for folder in folders for path in sorted(Path(folder, "lib").glob("libnccl.so*"))]


def check_shared_memory(here: Surroundings) -> Check:
    """Shared memory can be written to and is not nearly full."""
    folder = here.shared_memory
    probe = folder / f"bmtrain-doctor-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return Check(
            "shared memory",
            f"{folder} cannot be written to ({error.strerror})",
            f"mount -t tmpfs tmpfs {folder}, give this user the right to write there (chmod 1777 {folder}), or start "
            "the container with --shm-size=8g",
        )
    free = shutil.disk_usage(folder).free
    if free < _MIN_SHARED_MEMORY:
        return Check(
            "shared memory",
            f"{folder} has {free >> 20} MiB left",
            f"remove old files in {folder}, or start the container with --shm-size=8g",
        )
    return Check("shared memory", f"{folder}, {free >> 20} MiB free")


def check_transport(here: Surroundings) -> Check:
    """What will carry the bytes between CPU ranks."""
    asked = here.environ.get(_comm.TRANSPORT_VARIABLE, "auto")
    try:
        found = _comm.describe_cpu_transport(asked)
    except ValueError as error:
        return Check("CPU transport", str(error), f"unset {_comm.TRANSPORT_VARIABLE}")
    if asked == "shm" and not found.startswith("shared memory"):
        return Check(
            "CPU transport",
            f"{found}, but {_comm.TRANSPORT_VARIABLE}=shm",
            f"unset {_comm.TRANSPORT_VARIABLE}",
        )
    return Check("CPU transport", found)


def check_memory(here: Surroundings) -> Check:
    """There is memory left."""
    available = here.available_memory()
    if available < _MIN_MEMORY:
        return Check(
            "memory",
            f"{available >> 20} MiB available",
            "end other programs, start fewer ranks on this host, or raise the container's limit; "
            "python -m bmtrain plan tells what a run needs",
        )
    return Check("memory", f"{available / 2**30:.1f} GiB available")


def check_port(here: Surroundings) -> Check:
    """The port at which the ranks are to meet can be served."""
    environ = here.environ
    port = environ.get("MASTER_PORT")
    if not port:
        return Check("port", "MASTER_PORT is not set: one process, or a launcher that finds its own")
    if not port.isdigit() or not 0 < int(port) < 65536:
        return Check(
            "port", f"MASTER_PORT={port} is not a port", "set MASTER_PORT to a number from 1024 to 65535"
        )
    if environ.get("RANK", "0") != "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Check("port", f"{port}, served by another process")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(port)))
    except OSError as error:
        return Check(
            "port",
            f"port {port} cannot be served ({error.strerror})",
            f"set MASTER_PORT to a free port, or end what listens there (ss -ltnp 'sport = :{port}')",
        )
    return Check("port", f"{port} is free")


def _check_ranks(here: Surroundings) -> Iterator[Check]:
    """The ranks meet, their clocks agree, collectives and Adam compute what they should."""
    if _context.current() is None:
        from .init import init_distributed

        try:
            init_distributed(timeout=here.timeout)
        except (BMTrainError, ValueError) as error:
            yield Check(
                "ranks",
                str(error).splitlines()[0],
                "start every rank (WORLD_SIZE of them, each with its own RANK), with a MASTER_ADDR and MASTER_PORT "
                "that all of them reach; look at what the missing ones print",
            )
            return
    context = _context.current()
    assert context is not None
    world = context.topology.world_size
    carrier = context.groups["zero"].comm.backend
    transport = context.backend if carrier == context.backend else f"{context.backend} over {carrier}"
    yield Check("ranks", f"rank {context.topology.rank} of {world}, {transport}, {context.device}")
    yield _check_clocks(here, context)
    yield _check_collectives(context)
    yield _check_adam(context)


def _check_clocks(here: Surroundings, context: _context.Context) -> Check:
    group = context.groups["zero"]
    group.comm.barrier("doctor")
    # Seconds do not fit in the exact integers of fp32; fp64 holds them to less than a microsecond.
    mine = torch.tensor([here.clock()], dtype=torch.float64, device=context.device)
    clocks = mine.new_empty(group.size)
    group.comm.all_gather(clocks, mine, "doctor").wait()
    skew = float(clocks.max() - clocks.min())
    if skew > _MAX_SKEW_SECONDS:
        late = int((clocks - clocks.median()).abs().argmax())
        return Check(
            "clocks",
            f"the ranks' clocks differ by {skew:.1f} s, rank {late} the most",
            f"synchronise the clock of rank {late}'s host (timedatectl set-ntp true, or chronyc makestep)",
        )
    return Check("clocks", f"the ranks' clocks agree to {skew * 1e3:.0f} ms")


def _check_collectives(context: _context.Context) -> Check:
    group = context.groups["zero"]
    begin = time.perf_counter()
    mine = torch.full((1024,), float(group.rank + 1), device=context.device)
    whole = mine.new_empty(1024 * group.size)
    group.comm.all_gather(whole, mine, "doctor").wait()
    part = torch.empty_like(mine)
    group.reduce_comm.reduce_scatter(part, whole, _C.ReduceOp.SUM, "doctor").wait()
    wrong = (part != group.size * (group.rank + 1)).any()
    milliseconds = (time.perf_counter() - begin) * 1e3
    if bool(wrong):
        return Check(
            "collectives",
            "a sum over the ranks is wrong",
            "look for a faulty network card or memory (dmesg), then report this",
        )
    return Check("collectives", f"gather and sum over {group.size} ranks are right ({milliseconds:.1f} ms)")


def _check_adam(context: _context.Context) -> Check:
    from .optim import AdamOptimizer

    start = torch.linspace(-1, 1, 4099, device=context.device)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers: list[Any] = [AdamOptimizer([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1)]
    for _ in range(3):
        ours.grad, theirs.grad = ours.detach().sin(), theirs.detach().sin()
        for optimizer in optimizers:
            optimizer.step()
    difference = float((ours.detach() - theirs.detach()).abs().max())
    if not difference < 1e-4:
        return Check(
            "Adam",
            f"differs from torch's by {difference:.2g}",
            "set BMTRAIN_CPU_ISA=base and try again; report this with the name of the processor",
        )
    return Check("Adam", f"agrees with torch's to {difference:.1g}")
