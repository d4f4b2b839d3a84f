"""Every CUDA source compiles, on machines without a GPU too: kernels with nvcc, what joins them to torch with g++."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from harness import run_process
from torch.utils.cpp_extension import CUDA_HOME, include_paths

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.cu"))
GLUE = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*_cuda.cpp"))
NVCC = shutil.which("nvcc") or (
    shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")) if CUDA_HOME else None
)

needs_toolkit = pytest.mark.skipif(NVCC is None or CUDA_HOME is None, reason="no CUDA toolkit")


@needs_toolkit
@pytest.mark.parametrize("source", KERNELS)
def test_kernel(source: str, tmp_path: Path) -> None:
    targets = [f"-gencode=arch=compute_{version},code=sm_{version}" for version in (80, 90)]
    flags = ["-std=c++20", "-O1", "-Icsrc", "-Werror=all-warnings", "-DBMTRAIN_WITH_CUDA", *targets]
    run_process([str(NVCC), *flags, "-c", source, "-o", tmp_path / "out.o"], directory=ROOT, timeout=300)


@pytest.mark.slow
@needs_toolkit
@pytest.mark.parametrize("source", GLUE)
def test_glue(source: str, tmp_path: Path) -> None:
    generated = (
        tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    )  # absent from torch built without CUDA
    generated.parent.mkdir(parents=True)
    generated.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    system = [
        f"-isystem{path}"
        for path in (*include_paths(), str(tmp_path), os.path.join(str(CUDA_HOME), "include"))
    ]
    flags = [
        "-std=c++20",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Icsrc",
        "-DBMTRAIN_WITH_CUDA",
        *system,
    ]
    run_process([os.environ.get("CXX", "c++"), *flags, source], directory=ROOT, timeout=300)
