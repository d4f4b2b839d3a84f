"""Programs of C++ that drive a part of the core under a sanitizer of the compiler."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

__all__ = ["build_driver", "build_with_torch", "run_driver", "torch_environment"]

ROOT = Path(__file__).parents[2]


def compiler() -> str:
    """The C++ compiler; skips the test where there is none."""
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def compile_or_skip(command: Sequence[str], folder: Path) -> None:
    """Compile in a folder; skips the test if the compiler came without the sanitizer's library."""
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if built.returncode != 0 and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no such sanitizer: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr


def compile_unit(folder: Path, name: str, patterns: Sequence[str], command: Sequence[str]) -> str:
    """An object in ``folder`` of the files of patterns, from the top of the tree, that are compiled in one go.

    Nothing in it depends on the folder, so that a compiler's cache has it at the next run.
    """
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    (folder / f"{name}.cpp").write_text("".join(f'#include "{file}"\n' for file in files))
    places = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/cpp'}", f"-ffile-prefix-map={folder}=."]
    compile_or_skip([*command, *places, "-c", f"{name}.cpp", "-o", f"{name}.o"], folder)
    return f"{name}.o"


def build_driver(folder: Path, sources: Sequence[str], sanitizers: str) -> Path:
    """A program of sources, named from the top of the tree, that do not define the same names."""
    flags = ["-std=c++20", "-O1", "-g1", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    made = compile_unit(folder, "unit", sources, [compiler(), *flags])
    compile_or_skip([compiler(), *flags, made, "-o", "driver"], folder)
    return folder / "driver"


def build_with_torch(
    folder: Path, units: Mapping[str, Sequence[str]], sanitizers: str, wrapped: Sequence[str] = ()
) -> Path:
    """A program that uses torch's libraries as they are, which are not compiled with the sanitizer.

    Args:
        units: patterns of files by the name of their unit, as `compile_unit` takes them: torch's headers are most of
            the work. Files of one unit must not define the same names.
        sanitizers: as ``-fsanitize`` takes them.
        wrapped: functions of which the sources define ``__wrap_NAME``.
    """
    folder.mkdir(exist_ok=True)
    level = "-O1" if sanitizers == "thread" else "-O0"  # what compiles and runs in the shortest time
    flags = ["-std=c++20", level, "-g1", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    flags += [f"-isystem{path}" for path in include_paths()]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-DAT_PER_OPERATOR_HEADERS"]
    command = [compiler(), *flags]
    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(lambda name: compile_unit(folder, name, units[name], command), units))
    libraries = [f"-L{path}" for path in library_paths()] + [f"-Wl,-rpath,{path}" for path in library_paths()]
    libraries += ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", *(f"-Wl,--wrap={name}" for name in wrapped)]
    compile_or_skip([*command, *objects, *libraries, "-o", "driver"], folder)
    return folder / "driver"


def torch_environment() -> dict[str, str]:
    """For `run_driver`: torch's own libraries free nothing at their end, and start no threads."""
    return {"ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}


def run_driver(program: Path, environment: Mapping[str, str] | None = None, *arguments: Path) -> None:
    """Run it with ``arguments``: it must print ``ok``, and no sanitizer may report anything."""
    command = [program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("ThreadSanitizer cannot run with this kernel's address space layout")
    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", "")
