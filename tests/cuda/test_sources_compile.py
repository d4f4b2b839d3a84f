"""Every CUDA source compiles, on machines without a GPU too: kernels with nvcc, what joins them to torch with g++."""

from __future__ import annotations

import os
import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import run_process
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.cu"))
GLUE = sorted(
    path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.cpp") if path.stem.endswith("_cuda")
)
TOOLKIT: Path | None = runpy.run_path(str(ROOT / "setup.py"))["find_toolkit"]()

# What torch's build adds for every kernel file.
TORCH_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)

needs_toolkit = pytest.mark.skipif(TOOLKIT is None, reason="no CUDA toolkit")


def newest_architecture(nvcc: Path) -> str:
    return run_process([nvcc, "--list-gpu-arch"], directory=ROOT).stdout.split()[-1].removeprefix("compute_")


# Of each file, the widest loads and stores: those of a pack (csrc/cuda/pack.h).
WIDE = ("ld.global.cs.v4", "st.global.cs.v4")


@pytest.mark.slow
@needs_toolkit
def test_kernels(tmp_path: Path) -> None:
    """They compile without a warning, keep everything in registers and access memory 16 bytes at a time."""
    assert TOOLKIT is not None
    nvcc = TOOLKIT / "bin" / "nvcc"
    versions = dict.fromkeys(["80", "90", newest_architecture(nvcc)])
    targets = [f"-gencode=arch=compute_{version},code=sm_{version}" for version in versions]
    flags = [
        "-std=c++20",
        "-O3",
        "--fmad=false",
        "-Icsrc",
        "-Werror=all-warnings",
        "-Xptxas=-v",
        "--keep",
        *TORCH_FLAGS,
        *targets,
    ]

    def compiled(source: str) -> None:
        folder = tmp_path / Path(source).stem
        folder.mkdir()
        command = [nvcc, *flags, f"--keep-dir={folder}", "-c", source, "-o", folder / "kernels.o"]
        report = run_process(command, directory=ROOT, timeout=300)
        spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", report.stdout)
        assert len(spills) >= len(targets), source
        assert set(spills) == {("0", "0")}, source
        for ptx in folder.glob("*.ptx"):
            assert all(access in ptx.read_text() for access in WIDE), ptx.name

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, KERNELS))


@pytest.mark.slow
@needs_toolkit
def test_glue(tmp_path: Path) -> None:
    """In one unit: torch's headers take most of the time."""
    assert TOOLKIT is not None
    # Not in a torch built without CUDA. (Of torch's CUDA headers the sources take c10/cuda alone: ATen/cuda
    # includes cuSPARSE and others, which a toolkit may come without.)
    generated = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    generated.parent.mkdir(parents=True)
    generated.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    system = [f"-isystem{path}" for path in (*include_paths(), tmp_path, TOOLKIT / "include")]
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Icsrc"]
    sources = [*GLUE, "tests/cuda/simulated/operators.cpp"]
    unit = tmp_path / "unit.cpp"
    unit.write_text("".join(f'#include "{ROOT / source}"\n' for source in sources))
    run_process([os.environ.get("CXX", "c++"), *flags, *system, unit], directory=ROOT, timeout=300)


@needs_toolkit
def test_mirror() -> None:
    """The NCCL that only a machine with a GPU can load."""
    assert TOOLKIT is not None
    flags = [
        "-std=c++20",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Icsrc",
        f"-isystem{TOOLKIT}/include",
    ]
    run_process(
        [os.environ.get("CXX", "c++"), *flags, "tests/cuda/fake/mirror_nccl.cpp"], directory=ROOT, timeout=120
    )
