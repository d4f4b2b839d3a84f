"""The link of ranks that share memory under the sanitizers: no report, and every byte where it belongs."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).parents[2]
LINK = ("shm_link*.cpp", "shm_ring.cpp", "shm_segment.cpp", "shm_heap*.cpp", "host_tensor.cpp")


def build(compiler: str, sanitizers: str, folder: Path) -> Path:
    """The driver, the link, and torch's libraries as they are."""
    sources = [ROOT / "tests" / "cpp" / "shm_link_driver.cpp"]
    sources += [file for pattern in LINK for file in sorted((ROOT / "csrc" / "comm").glob(pattern))]
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    flags += [f"-I{ROOT / 'csrc'}", *(f"-isystem{path}" for path in include_paths())]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]

    def compile_one(source: Path) -> str:
        made = folder / f"{source.stem}.o"
        run([compiler, *flags, "-c", str(source), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    libraries = [f"-L{path}" for path in library_paths()] + [f"-Wl,-rpath,{path}" for path in library_paths()]
    libraries += ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-Wl,--wrap=mmap", "-Wl,--wrap=munmap"]
    run([compiler, *flags, *objects, *libraries, "-o", str(folder / "driver")])
    return folder / "driver"


def run(command: list[str]) -> None:
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0 and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no such sanitizer: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_no_report(sanitizers: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = build(compiler, sanitizers, tmp_path)
    # torch's own libraries free nothing at their end.
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, env=environment)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("ThreadSanitizer cannot run with this kernel's address space layout")
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr
    assert result.stderr == ""
