"""Building the fake device and the fake NCCL of tests/cuda/fake."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from bmtrain import _C
from bmtrain._engine.engine import Engine
from bmtrain._ranks import context
from bmtrain._ranks.context import Context, Group
from bmtrain.topology import GroupKind, Topology

__all__ = ["build_fake", "install_one_of_two"]

ROOT = Path(__file__).resolve().parents[2]


def build_fake(folder: Path, *flags: str) -> Path:
    """Compile the fake into a folder and return the library."""
    library = folder / "libnccl.so.2"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-Icsrc", *flags]
    source = "tests/cuda/fake/fake_nccl.cpp"
    subprocess.run([*command, source, "-o", str(library)], cwd=ROOT, check=True, timeout=120)
    return library


def install_one_of_two(timeout: float = 60.0) -> None:
    """Make this process rank 0 of 2, connected by the fake that BMTRAIN_NCCL_LIBRARY names."""
    cpu, library = torch.device("cpu"), _C.NcclLibrary([])
    world = [
        _C.NcclCommunicator(library, library.make_unique_id(), 0, 2, name, cpu, timeout)
        for name in ("zero", "zero.reduce")
    ]
    place = Topology(0, 2, 1, 1)
    groups = {}
    for kind in GroupKind:
        members = place.members(kind)
        pair = world if len(members) == 2 else [_C.SingleCommunicator(kind.value) for _ in range(2)]
        rank, number = place.get_group_rank(kind), place.get_group_id(kind)
        groups[kind.value] = Group(kind.value, pair[0], pair[1], rank, len(members), number)
    context.install(Context(place, cpu, "nccl", 0, 2, timeout, 0, groups, Engine(cpu)))
