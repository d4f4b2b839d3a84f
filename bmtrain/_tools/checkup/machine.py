"""Checks of the surroundings of one process: torch, compiler, core, processor, devices, memory, port."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from pathlib import Path

import torch

from ..._base.build import is_for, is_of_wheel
from ..._C import highest_cpu_isa
from ..._ranks import comm
from ..._ranks.cards import check_card
from ..._ranks.comm_nccl import find_candidates
from ...errors import BMTrainError
from .findings import Check, Surroundings

_NCCL_MINIMUM = (2, 19)
_MIN_SHARED_MEMORY = 64 << 20  # what torch's data loaders and ranks of one host exchange at least
_MIN_MEMORY = 1 << 30


def check_torch(here: Surroundings) -> Check:
    """The core fits the torch that is running."""
    built, running = here.build.get("torch"), str(here.build.get("running_torch"))
    found = f"bmtrain {here.build.get('version')}, torch {running}"
    if built is not None and not is_for(str(built), running):
        return Check(
            "torch",
            f"{found}, but the core was built for torch {built}",
            f"install torch {built}, or rebuild: {_BUILD}",
        )
    return Check("torch", found)


_BUILD = "pip install -e . --no-build-isolation"


def check_compiler(here: Surroundings) -> Check:
    """There is a C++ compiler, to build the core again or for torch.compile. A wheel needs none."""
    wanted = here.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        path = shutil.which(name, path=here.environ.get("PATH", os.defpath))
        if path is not None:
            version = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=False, timeout=20
            )
            return Check("compiler", (version.stdout or path).splitlines()[0])
    what = f"CXX={wanted} is not a program" if wanted else "no C++ compiler"
    if is_of_wheel(here.build):
        return Check("compiler", f"{what}: torch.compile would need one")
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
    highest = highest_cpu_isa()
    forced = here.environ.get("BMTRAIN_CPU_ISA", "")
    levels = ("base", "neon") if highest == "neon" else ("base", "avx2", "avx512")
    if forced and (forced not in levels or levels.index(forced) > levels.index(highest)):
        return Check(
            "processor",
            f"BMTRAIN_CPU_ISA={forced} is more than this processor has ({highest})",
            f"unset BMTRAIN_CPU_ISA, or set it to {highest} or less",
        )
    count = torch.get_num_threads()
    return Check("processor", f"kernels for {forced or highest}, {count} thread{'' if count == 1 else 's'}")


def check_memory_nodes(here: Surroundings) -> Check:
    """Whether memory can be far from the processors of this rank; not a problem, as the step works all the same."""
    own = here.processors()
    lists = sorted(here.nodes.glob("node[0-9]*/cpulist"))
    near = [path for path in lists if own & _numbers_in(path.read_text())]
    if len(near) <= 1:
        return Check("memory nodes", f"{max(len(lists), 1)}, this process on one: nothing to place")
    return Check(
        "memory nodes",
        f"{len(lists)}, this process on {len(near)}: each thread has its share of the optimizer's state near it, if it "
        "stays where it is; bind each rank to one (numactl --cpunodebind) where there are as many ranks",
    )


def _numbers_in(text: str) -> set[int]:
    """The numbers in a list of the kernel's, like ``0-3,8``."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def check_cuda(here: Surroundings) -> Check:
    """The devices of this host; none is not a problem."""
    if not torch.cuda.is_available():
        return _check_why_none(here)
    count, built = torch.cuda.device_count(), here.build.get("cuda")
    found = f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    if built is None:
        return Check(
            "devices",
            f"{found}, but the core was built without CUDA",
            f"install nvcc {torch.version.cuda}, then {_BUILD}",
        )
    for number in range(count):
        try:
            check_card(number)
        except BMTrainError as error:
            what, _, remedy = str(error).partition(": ")
            return Check("devices", f"{found}: {what}", remedy)
    return Check("devices", found)


def _check_why_none(here: Surroundings) -> Check:
    """No GPU is fine; one that torch cannot use is not."""
    found = "no usable GPU: ranks compute on the CPU"
    if not here.driver.exists():
        return Check("devices", found)
    if here.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return Check("devices", f"{found}, as CUDA_VISIBLE_DEVICES hides the GPUs")
    if torch.version.cuda is None:
        return Check(
            "devices",
            f"there is an NVIDIA driver, but torch {torch.__version__} was built without CUDA",
            f"install a torch with CUDA (https://pytorch.org/get-started/locally), then {_BUILD}",
        )
    try:
        torch.cuda.init()
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
    else:
        reason = "torch.cuda.is_available() is False"
    return Check(
        "devices",
        f"there is an NVIDIA driver, but torch cannot use it: {reason}",
        f"install a driver for CUDA {torch.version.cuda}, or a torch for the CUDA that nvidia-smi shows",
    )


def check_nccl(here: Surroundings) -> Check:
    """NCCL is there where it is needed, and new enough."""
    named = here.environ.get("BMTRAIN_NCCL_LIBRARY")
    remedy = (
        "install a newer one (pip install nvidia-nccl-cu13, or -cu12, as torch.version.cuda says), or let "
        "BMTRAIN_NCCL_LIBRARY name it"
    )
    tried = [named] if named else [*find_candidates(), "libnccl.so.2"]
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
    """The transport between CPU ranks."""
    asked = here.environ.get(comm.TRANSPORT_VARIABLE, "auto")
    try:
        found = comm.describe_cpu_transport(asked)
    except ValueError as error:
        return Check("CPU transport", str(error), f"unset {comm.TRANSPORT_VARIABLE}")
    if asked == "shm" and not found.startswith("shared memory"):
        return Check(
            "CPU transport", f"{found}, but {comm.TRANSPORT_VARIABLE}=shm", f"unset {comm.TRANSPORT_VARIABLE}"
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
            "bmtrain plan estimates the memory of a run",
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
