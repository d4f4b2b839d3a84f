"""Building the fake device and the fake NCCL of tests/cuda/fake."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["build_fake"]

ROOT = Path(__file__).resolve().parents[2]


def build_fake(folder: Path, *flags: str) -> Path:
    """Compile the fake into a folder and return the library."""
    library = folder / "libnccl.so.2"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-Icsrc", *flags]
    source = "tests/cuda/fake/fake_nccl.cpp"
    subprocess.run([*command, source, "-o", str(library)], cwd=ROOT, check=True, timeout=120)
    return library
